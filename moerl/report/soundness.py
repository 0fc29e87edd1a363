"""Whether the recording itself can be trusted, and how evenly experts are used: versions, holes, repeats, load."""

from collections import defaultdict
from typing import Any

import numpy as np

from moerl.report.capture import Meta
from moerl.report.chunk import Chunk
from moerl.report.stats import finite, share
from moerl.routing.compare import expert_counts, imbalance, repeated


class Soundness:
    """Sums over chunks."""

    def __init__(self, meta: Meta) -> None:
        layers, experts = len(meta.layers), meta.experts
        self.meta = meta
        self.rows = 0
        self.samples = 0
        self.versions: dict[int, int] = defaultdict(int)
        self.lags: dict[int, int] = defaultdict(int)
        self.stale: set[int] = set()  # versions of rows older than the trainer that scored them
        self.mixed = self.decreasing = self.newer = 0
        self.zero = np.zeros(layers, np.int64)
        self.zero_rows = self.padding = self.repeated_ids = self.unusable = 0
        self.copies = np.zeros(2, np.int64)  # rows equal to the row before, of the engine and of the trainer
        self.load = np.zeros((layers, experts), np.int64)
        self.stuck: list[tuple[int, int, int]] = []  # step, prompt_id, sample of some zero rows
        self._open: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, chunk: Chunk, zero: np.ndarray) -> None:
        """Count a chunk; zero: bool[n, layer], decisions without routes (see `empty`)."""
        rows, meta = chunk.rows, self.meta
        if not len(rows):
            return
        self.rows += len(rows)
        for values, into in ((rows.version, self.versions), (chunk.lag, self.lags)):
            for value, count in zip(*np.unique(values, return_counts=True), strict=True):
                into[int(value)] += int(count)
        self.stale |= set(np.unique(rows.version[chunk.lag > 0]).tolist())
        self.newer += int(((rows.version > chunk.meta.trainer_version) & (chunk.meta.trainer_version >= 0)).sum())
        self.zero += zero.sum(axis=0)
        none = zero.all(axis=1)
        self.zero_rows += int(none.sum())
        self.repeated_ids += int((repeated(rows.engine_ids) & ~zero).sum())
        self.unusable += max(chunk.unusable.values())
        self.load += expert_counts(rows.engine_ids, meta.experts)
        self.load[:, 0] -= meta.topk * zero.sum(axis=0)  # a hole chose nobody
        for i, ids in enumerate((rows.engine_ids, rows.trainer_ids)):
            if ids is not None:
                same = np.zeros(len(rows), bool)
                same[1:] = (ids[1:] == ids[:-1]).reshape(len(rows) - 1, -1).all(axis=1)
                self.copies[i] += int((same & chunk.follows & ~none).sum())
        self._samples(chunk, none)

    def _samples(self, chunk: Chunk, none: np.ndarray) -> None:
        rows, starts = chunk.rows, chunk.starts
        version = rows.version.astype(np.int64)
        fell = np.zeros(len(rows), bool)
        fell[1:] = (version[1:] < version[:-1]) & (version[1:] >= 0)
        fell[starts] = False
        keys = np.stack([rows.prompt_id[starts], rows.sample[starts]], axis=1).astype(np.int64)
        routed = np.where(none, -1, rows.position)
        pieces = [
            np.minimum.reduceat(version, starts),
            -np.maximum.reduceat(version, starts),
            -np.logical_or.reduceat(fell, starts).astype(np.int64),
            -np.maximum.reduceat(routed, starts),
            -np.maximum.reduceat(rows.position, starts),
        ]
        self._open.append((keys, np.stack(pieces, axis=1)))

    def end_step(self, step: int) -> None:
        """All rows of a step are in: judge its samples."""
        if not self._open:
            return
        keys, pieces = (np.concatenate(parts) for parts in zip(*self._open, strict=True))
        keys, place = np.unique(keys, axis=0, return_inverse=True)
        whole = np.full((len(keys), pieces.shape[1]), np.iinfo(np.int64).max)
        np.minimum.at(whole, place.ravel(), pieces)
        oldest, newest, fell, routed, last = whole[:, 0], *(-whole[:, i] for i in range(1, 5))
        self.samples += len(keys)
        self.mixed += int((oldest < newest).sum())
        self.decreasing += int(fell.sum())
        self.padding += int((last - routed).sum())
        self.stuck += [(step, int(a), int(b)) for a, b in keys[routed < last][: max(0, 20 - len(self.stuck))]]
        self._open = []

    def missing_layers(self) -> list[int]:
        """Model layers for which no row has routes."""
        return [layer for i, layer in enumerate(self.meta.layers) if self.rows and self.zero[i] == self.rows]

    def result(self, trainer_load: np.ndarray | None) -> dict[str, Any]:
        """`soundness` of the report; trainer_load: int64[layer, expert], None for a recording of one side."""
        decisions = self.rows * len(self.meta.layers)
        return {
            "versions": [
                {"version": value, "rows": count, "share": share(count, self.rows)} for value, count in sorted(self.versions.items())
            ],
            "lags": [
                {"lag": value if value >= 0 else None, "rows": count, "share": share(count, self.rows)}
                for value, count in sorted(self.lags.items())
            ],
            "stale_versions": sorted(self.stale),
            "mixed_samples": self.mixed,
            "decreasing_samples": self.decreasing,
            "newer_rows": self.newer,
            "zero_rows": share(self.zero_rows, self.rows),
            "repeated_ids": share(self.repeated_ids, decisions),
            "repeated_rows": share(self.copies[0], self.rows),
            "repeated_rows_trainer": None if trainer_load is None else share(self.copies[1], self.rows),
            "padding_share": share(self.padding, self.rows),
            "missing_layers": self.missing_layers(),
            "engine": self._load(self.load, self.meta.engine_ep),
            "trainer": None if trainer_load is None else self._load(trainer_load, self.meta.ep),
        }

    def _load(self, counts: np.ndarray, ranks: int) -> dict[str, Any]:
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(shares > 0, shares * np.log(shares), 0).sum(axis=1) / np.log(max(2, counts.shape[1]))
        experts = counts.shape[1]
        by_rank = imbalance(np.add.reduceat(counts, np.arange(ranks) * experts // ranks, axis=1)) if ranks <= experts else None
        uneven = imbalance(counts)
        return {
            "by_layer": [
                {
                    "layer": layer,
                    "imbalance": finite(uneven[i]),
                    "entropy": finite(entropy[i]),
                    "dead": np.flatnonzero(counts[i] == 0).tolist(),
                    "rank_imbalance": finite(by_rank[i]) if by_rank is not None else None,
                }
                for i, layer in enumerate(self.meta.layers)
            ],
            "load": shares.tolist(),
        }


def empty(ids: np.ndarray, topk: int) -> np.ndarray:
    """Decisions never recorded: all ids are 0, which no top-k with k > 1 chooses. bool[row, layer] from integer[row, layer, k]."""
    if topk == 1:  # a lone 0 is a choice; only a row that is 0 in every layer is none
        return np.broadcast_to((ids == 0).all(axis=(1, 2))[:, None], ids.shape[:2])
    width = ids.shape[2] * ids.itemsize
    if width % 8 == 0:
        return (np.ascontiguousarray(ids).view(np.uint64) == 0).all(axis=2)
    return (ids == 0).all(axis=2)
