"""Where the two sides choose different experts: by layer, position, kind of token, version, and how often the token occurs.

A decision is one (row, layer); it flips if the two sets of experts differ.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from moerl.report.capture import Meta
from moerl.report.chunk import Chunk
from moerl.report.stats import share
from moerl.routing.compare import k3

_STEPS = (4, 5, 6, 7)  # quarters of each power of two
EDGES = np.array([0, 1, 2, 4, *(quarter << power for power in range(1, 24) for quarter in _STEPS)])
FREQUENCIES = 4  # the bins of token counts grow by this factor


class Flips:
    """Sums over chunks; memory is that of the vocabulary, of the layers, and of the versions."""

    def __init__(self, meta: Meta) -> None:
        layers = len(meta.layers)
        self.meta = meta
        self.rows = 0
        self.flips = np.zeros(layers, np.int64)
        self.flipped_rows = 0
        self.union = np.zeros(layers)  # sum of the Jaccard indices
        self.first = np.zeros(layers + 1, np.int64)  # the last entry: no layer differs
        self.counts = np.zeros(layers + 1, np.int64)
        self.heat = np.zeros((len(EDGES) - 1, layers), np.int64)
        self.position = np.zeros((len(EDGES) - 1, 3), np.int64)  # rows, flips, rows with a flip
        self.kind = np.zeros((2, 3), np.int64)
        self.lag: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(7))  # then natural: tokens, k3; replay: tokens, k3
        self.version: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1 + layers, np.int64))
        self.token = np.zeros((2, 0), np.int64)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that has both sides."""
        flipped, flips, rows = chunk.flipped, chunk.flips, chunk.rows
        if flipped is None or not len(rows):
            return
        k, layers = self.meta.topk, len(self.meta.layers)
        any_flip = flips > 0
        self.rows += len(rows)
        by_layer = np.count_nonzero(flipped, axis=0)
        self.flips += by_layer
        self.flipped_rows += int(any_flip.sum())
        shared = chunk.common[chunk.flip_row, chunk.flip_layer].astype(np.float64)
        self.union += len(rows) - by_layer + np.bincount(chunk.flip_layer, shared / (2 * k - shared), layers)
        self.first += np.bincount(np.where(any_flip, flipped.argmax(axis=1), layers), minlength=layers + 1)
        self.counts += np.bincount(flips, minlength=layers + 1)
        triple = np.stack([np.ones(len(rows), np.int64), flips, any_flip], axis=1)
        place = np.clip(np.searchsorted(EDGES, rows.position, side="right") - 1, 0, len(EDGES) - 2)
        for value in np.unique(place):
            self.heat[value] += np.count_nonzero(flipped[place == value], axis=0)
            self.position[value] += triple[place == value].sum(axis=0)
        for value in (0, 1):
            self.kind[value] += triple[rows.response == bool(value)].sum(axis=0)
        self._by_version(chunk, triple)
        self._by_token(rows.token, flips)

    def _by_version(self, chunk: Chunk, triple: np.ndarray) -> None:
        for value in np.unique(chunk.lag):
            which = chunk.lag == value
            self.lag[int(value)][:3] += triple[which].sum(axis=0)
            for i, mode in ((3, "natural"), (5, "replay")):
                self.lag[int(value)][i : i + 2] += chunk.measured[mode][which].sum(), k3(chunk.d[mode][which]).sum()
        for value in np.unique(chunk.rows.version):
            which = chunk.rows.version == value
            self.version[int(value)] += np.concatenate([[which.sum()], np.count_nonzero(chunk.flipped[which], axis=0)])

    def _by_token(self, tokens: np.ndarray, flips: np.ndarray) -> None:
        real = tokens >= 0
        if not real.any():
            return
        size = max(self.token.shape[1], int(tokens.max()) + 1)
        self.token = np.pad(self.token, ((0, 0), (0, size - self.token.shape[1])))
        self.token[0] += np.bincount(tokens[real], minlength=size)
        self.token[1] += np.bincount(tokens[real], flips[real], minlength=size).astype(np.int64)

    def result(self) -> dict[str, Any] | None:
        """`flips` of the report; None where nothing has two sides."""
        if not self.rows:
            return None
        layers = self.meta.layers
        return {
            "by_layer": [
                {
                    "layer": layer,
                    "share": share(self.flips[i], self.rows),
                    "jaccard": share(self.union[i], self.rows),
                    "first_share": share(self.first[i], self.rows),
                }
                for i, layer in enumerate(layers)
            ],
            **self._positions(),
            "by_kind": [{"kind": kind, **self._triple(self.kind[i])} for i, kind in enumerate(("prompt", "response"))],
            "by_lag": [
                {
                    "lag": lag if lag >= 0 else None,
                    **self._triple(found),
                    "tokens": int(found[3]),
                    "kl_natural": share(found[4], found[3]),
                    "kl_replay": share(found[6], found[5]),
                }
                for lag, found in sorted(self.lag.items())
            ],
            "by_version": [
                {
                    "version": version,
                    "rows": int(found[0]),
                    "share": share(found[1:].sum(), found[0] * len(layers)),
                    "by_layer": [share(count, found[0]) for count in found[1:]],
                }
                for version, found in sorted(self.version.items())
            ],
            "by_frequency": self._frequencies(),
            "flipped_layers": [
                {"layers": i, "rows": int(count), "share": share(count, self.rows)} for i, count in enumerate(self.counts) if count
            ],
        }

    def _triple(self, found: np.ndarray) -> dict[str, Any]:
        rows, flips, flipped = found[:3]
        return {
            "rows": int(rows),
            "share": share(flips, rows * len(self.meta.layers)),
            "tokens_with_flip": share(flipped, rows),
        }

    def _positions(self) -> dict[str, Any]:
        last = int(np.flatnonzero(self.position[:, 0])[-1]) + 1
        rows = self.position[:last, 0]
        heat = [[share(count, total) for count, total in zip(found, rows, strict=True)] for found in self.heat[:last].T]
        by_position = [
            {"from": int(EDGES[i]), "to": int(EDGES[i + 1]) - 1, **self._triple(self.position[i])} for i in range(last) if rows[i]
        ]
        return {"heat": {"edges": EDGES[: last + 1].tolist(), "share": heat}, "by_position": by_position}

    def _frequencies(self) -> list[dict[str, Any]]:
        found, low, (count, flips) = [], 1, self.token
        while len(count) and low <= count.max():
            which = (count >= low) & (count < low * FREQUENCIES)
            if which.any():
                rows = int(count[which].sum())
                found.append(
                    {
                        "from": low,
                        "to": low * FREQUENCIES - 1,
                        "token_ids": int(which.sum()),
                        "rows": rows,
                        "share": share(flips[which].sum(), rows * len(self.meta.layers)),
                    }
                )
            low *= FREQUENCIES
        return found
