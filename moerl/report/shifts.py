"""Whether routes stand in the wrong place: at another layer, or at another position of their sample.

Both compare the engine's choice with what the trainer chose elsewhere. Right routes have most experts in common with the trainer's
choice at their own place, and few with any other.
"""

from collections import Counter
from typing import Any

import numpy as np

from moerl.report.capture import Meta
from moerl.report.chunk import Chunk
from moerl.report.stats import share
from moerl.routing.compare import common

OFFSETS = (-2, -1, 0, 1, 2)
_ROWS_PER_CHUNK = 96  # for layers; every row counts for positions, at a few layers
_LAYERS = 4
_CLEARLY = 0.2  # by so much more experts in common is another place the right one
_LEAST_ROWS = 6
_NAMED = 20


class Shifts:
    """Sums over chunks."""

    def __init__(self, meta: Meta) -> None:
        layers = len(meta.layers)
        self.meta = meta
        self.rows = 0
        self.match = np.zeros((layers, layers))
        self.layers = np.unique(np.linspace(0, layers - 1, _LAYERS).astype(int))
        self.samples = 0
        self.offsets: Counter[int] = Counter()  # samples whose routes clearly fit another position
        self.shifted: list[tuple[int, int, int, int]] = []  # step, prompt_id, sample, offset of some of them
        self.totals = np.zeros((2, len(OFFSETS)))
        self._open: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that has both sides."""
        if chunk.flipped is None or not len(chunk):
            return
        self._layers(chunk)
        self._positions(chunk)

    def _layers(self, chunk: Chunk) -> None:
        some = slice(None, None, -(-len(chunk) // _ROWS_PER_CHUNK))
        one, other = (_bits(ids[some], self.meta.experts) for ids in (chunk.rows.engine_ids, chunk.rows.trainer_ids))
        self.rows += len(one)
        self.match += np.bitwise_count(one[:, :, None] & other[:, None]).sum(axis=(0, 3))

    def _positions(self, chunk: Chunk) -> None:
        one, other = (np.ascontiguousarray(ids[:, self.layers]) for ids in (chunk.rows.engine_ids, chunk.rows.trainer_ids))
        rows, k = len(chunk), self.meta.topk
        sums = np.zeros((rows, 2, len(OFFSETS)))
        for i, offset in enumerate(OFFSETS):
            there = _neighbours(chunk.follows, offset)
            place = np.flatnonzero(there)
            sums[place, 0, i] = common(one[place], other[place + offset]).mean(axis=1) / k
            sums[place, 1, i] = 1
        keys = np.stack([chunk.rows.prompt_id[chunk.starts], chunk.rows.sample[chunk.starts]], axis=1).astype(np.int64)
        self._open.append((keys, np.add.reduceat(sums, chunk.starts)))

    def end_step(self, step: int) -> None:
        """All rows of a step are in: judge its samples."""
        if not self._open:
            return
        keys, sums = (np.concatenate(parts) for parts in zip(*self._open, strict=True))
        keys, place = np.unique(keys, axis=0, return_inverse=True)
        whole = np.zeros((len(keys), *sums.shape[1:]))
        np.add.at(whole, place.ravel(), sums)
        self._open = []
        self.samples += len(keys)
        self.totals += whole.sum(axis=0)
        match = np.where(whole[:, 1] >= _LEAST_ROWS, whole[:, 0] / np.maximum(whole[:, 1], 1), 0)
        best = match.argmax(axis=1)
        own = match[:, OFFSETS.index(0)]
        for i in np.flatnonzero(match[np.arange(len(keys)), best] > own + _CLEARLY):
            self.offsets[OFFSETS[best[i]]] += 1
            if len(self.shifted) < _NAMED:
                self.shifted.append((step, int(keys[i, 0]), int(keys[i, 1]), OFFSETS[best[i]]))

    def layer_match(self) -> np.ndarray | None:
        """float[engine layer, trainer layer]: share of experts in common, of the rows looked at."""
        return self.match / (self.rows * self.meta.topk) if self.rows else None

    def moved_layers(self) -> list[tuple[int, int]]:
        """(engine layer, the trainer's layer it clearly fits better), by model layer number."""
        match = self.layer_match()
        if match is None:
            return []
        best = match.argmax(axis=1)
        return [
            (self.meta.layers[i], self.meta.layers[j])
            for i, j in enumerate(best)
            if i != j and match[i, j] > match[i, i] + _CLEARLY and match[i, j] > 0.5
        ]

    def result(self) -> dict[str, Any]:
        """`layer_match` and `position_match` of the report."""
        match = self.layer_match()
        return {
            "layer_match": match.tolist() if match is not None else None,
            "position_match": {str(offset): share(self.totals[0, i], self.totals[1, i]) for i, offset in enumerate(OFFSETS)},
        }


def _bits(ids: np.ndarray, experts: int) -> np.ndarray:
    """uint64[row, layer, word]: a set of experts as bits, of integer[row, layer, k]."""
    found = np.zeros((*ids.shape[:2], -(-experts // 64) * 64), np.uint8)
    np.put_along_axis(found, ids.astype(np.int64), 1, axis=2)
    return np.packbits(found, axis=2).view(np.uint64)


def _neighbours(follows: np.ndarray, offset: int) -> np.ndarray:
    """bool[n]: the row `offset` away belongs to the same sample, without a gap between."""
    there = np.ones(len(follows), bool)
    for step in range(abs(offset)):
        if offset > 0:  # rows i+1 .. i+offset each continue the one before
            moved = np.zeros(len(follows), bool)
            moved[: len(follows) - step - 1] = follows[step + 1 :]
        else:  # rows i .. i-offset+1 do
            moved = np.zeros(len(follows), bool)
            moved[step:] = follows[: len(follows) - step]
        there &= moved
    return there
