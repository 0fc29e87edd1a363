"""Some rows of a recording, with what every part of the report needs of them computed once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moerl.report.capture import MODES, Meta, Rows
from moerl.routing.compare import common, members

ROWS = 16384


@dataclass(frozen=True)
class Chunk:
    """Attributes:
    meta, rows: what was read; `rows.engine_ids` is the one side, `rows.trainer_ids` the other.
    starts: int[s]: the first row of each sample here. A sample may go on in the next chunk.
    follows: bool[n]: the row continues the sample of the row before it, one position on.
    common: uint8[n, layer]: experts that both sides have in common; None for a recording of one side.
    flipped: bool[n, layer]: the sets differ; None likewise.
    flips: int64[n]: layers that differ.
    flip_row, flip_layer: int[m]: where; one_side, other_side: integer[m, k]: ids there; one_only, other_only: bool[m, k]: the ids
        that the other side lacks.
    d: by mode, float64[n]: trainer minus engine logprob, 0 where not measured. measured: by mode, bool[n].
    unusable: generated tokens with an infinite logprob on either side, by mode.
    lag: int64[n]: the trainer's version minus the row's; -1 if either is unknown or the row's is newer.
    """

    meta: Meta
    rows: Rows
    starts: np.ndarray
    follows: np.ndarray
    common: np.ndarray | None
    flipped: np.ndarray | None
    flips: np.ndarray
    flip_row: np.ndarray
    flip_layer: np.ndarray
    one_side: np.ndarray
    other_side: np.ndarray
    one_only: np.ndarray
    other_only: np.ndarray
    d: dict[str, np.ndarray]
    measured: dict[str, np.ndarray]
    unusable: dict[str, int]
    lag: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


def chunks(meta: Meta, parts: Iterable[Rows]) -> Iterator[Chunk]:
    """Prepare rows part by part, at most `ROWS` together."""
    for part in parts:
        for start in range(0, len(part), ROWS):
            yield prepare(meta, part.take(slice(start, start + ROWS)))


def prepare(meta: Meta, rows: Rows) -> Chunk:
    """What the parts of the report need of some rows."""
    count, k = len(rows), meta.topk
    same = np.zeros(count, bool)
    same[1:] = (rows.prompt_id[1:] == rows.prompt_id[:-1]) & (rows.sample[1:] == rows.sample[:-1])
    follows = same.copy()
    follows[1:] &= rows.position[1:] == rows.position[:-1] + 1
    shared = flipped = None
    flips = np.zeros(count, np.int64)
    where, layer = np.zeros((2, 0), np.int64)
    one = other = np.zeros((0, k), rows.engine_ids.dtype)
    if rows.trainer_ids is not None:
        shared = common(rows.engine_ids, rows.trainer_ids)
        flipped = shared < k
        flips = np.count_nonzero(flipped, axis=1)
        where, layer = np.nonzero(flipped)
        one, other = rows.engine_ids[where, layer], rows.trainer_ids[where, layer]
    d, measured, unusable = {}, {}, {}
    for mode in MODES:
        gap = rows.differences(mode) if len(rows) else np.zeros(0)
        there = rows.response & ~np.isnan(gap)
        measured[mode] = there & np.isfinite(gap)
        unusable[mode] = int((rows.response & ~np.isfinite(gap) & _both_given(rows, mode)).sum())
        d[mode] = np.where(measured[mode], gap, 0.0)
    lag = meta.trainer_version - rows.version.astype(np.int64)
    lag[(rows.version < 0) | (meta.trainer_version < 0) | (lag < 0)] = -1
    return Chunk(
        meta=meta,
        rows=rows,
        starts=np.flatnonzero(~same),
        follows=follows,
        common=shared,
        flipped=flipped,
        flips=flips,
        flip_row=where,
        flip_layer=layer,
        one_side=one,
        other_side=other,
        one_only=~members(one, other),
        other_only=~members(other, one),
        d=d,
        measured=measured,
        unusable=unusable,
        lag=lag,
    )


def _both_given(rows: Rows, mode: str) -> np.ndarray:
    return ~np.isnan(getattr(rows, f"{mode}_logprob")) & ~np.isnan(rows.engine_logprob)
