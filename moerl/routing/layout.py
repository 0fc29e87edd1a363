"""What a trace fits, and which of its rows came from which weights: the small values that everything in this room shares."""

from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Which model a trace fits: `layers` are 0-based numbers of its MoE layers, `experts` routed experts, `topk` per token."""

    layers: tuple[int, ...]
    experts: int
    topk: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


class VersionRun(NamedTuple):
    """Rows `start` (inclusive) to `stop` (exclusive) were computed by weights of `version`."""

    version: int
    start: int
    stop: int


def describe(layout: Layout) -> str:
    return f"MoE layers {ranges(layout.layers)}, {layout.experts} experts, top-{layout.topk}"


def ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """`[1, 2, 3, 7]` as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs) or "none"


def cut_runs(runs: tuple[VersionRun, ...], start: int, stop: int) -> tuple[VersionRun, ...]:
    """The runs of rows `start` to `stop`, counted from `start`."""
    parts = (VersionRun(run.version, max(run.start, start) - start, min(run.stop, stop) - start) for run in runs)
    return tuple(part for part in parts if part.stop > part.start)


def join_runs(first: tuple[VersionRun, ...], rows: int, second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Runs of `rows` rows, then the runs of what follows them; equal neighbours become one."""
    joined = list(first)
    for run in second:
        moved = VersionRun(run.version, run.start + rows, run.stop + rows)
        if joined and joined[-1].version == moved.version:
            joined[-1] = joined[-1]._replace(stop=moved.stop)
        else:
            joined.append(moved)
    return tuple(joined)


def filler_routes(rows: int, layout: Layout) -> np.ndarray:
    """Routes for padding rows: distinct experts within a row, all experts equally often over the rows.

    Returns:
        uint8|uint16[rows, moe_layer, k]
    """
    first = np.arange(rows)[:, None] * layout.topk + np.arange(layout.topk)
    ids = (first % layout.experts).astype(layout.dtype)
    return np.repeat(ids[:, None], len(layout.layers), axis=1)
