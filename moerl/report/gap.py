"""How large the gap is, in each mode and step, and what replay takes away, with bands over samples.

d = trainer logprob - engine logprob of a generated token. k1 = mean of -d and kl = mean of exp(d) - 1 - d (k3) estimate
KL(engine || trainer) on tokens that the engine sampled; F(tau) is the share of tokens with exp(d) outside 1/tau .. tau.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moerl.report.capture import MODES, Meta
from moerl.report.chunk import Chunk
from moerl.report.stats import bands
from moerl.routing.compare import k3

TAUS = (1.2, 2.0, 5.0, 10.0)
HISTOGRAM = np.concatenate([-np.logspace(1, -5, 25), np.logspace(-5, 1, 25)])
_PER_MODE = ("tokens", "k1", "abs", "k3", "w", "w2", *(f"over_{tau:g}" for tau in TAUS))
COLUMNS = {
    name: i
    for i, name in enumerate(
        (
            *(f"{mode}_{figure}" for mode in MODES for figure in _PER_MODE),
            *("both", "both_natural", "both_replay"),  # tokens that have natural and replayed logprobs, and their k3
            *("rows", "flips", "flipped_rows", "zero_rows"),
        )
    )
}


class Gap:
    """Sums per sample, step by step; a step's samples are kept together, so that its band is one over samples.

    Attributes:
        steps: per step added (meta, keys int64[m, 2] of prompt_id and sample, sums float64[m, column], rewards float64[m]).
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Meta, np.ndarray, np.ndarray, np.ndarray]] = []
        self.histogram = {mode: np.zeros(len(HISTOGRAM) - 1, np.int64) for mode in MODES}
        self._open: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, chunk: Chunk, zero: np.ndarray) -> None:
        """Count a chunk; zero: bool[n], rows without routes."""
        if not len(chunk):
            return
        rows = chunk.rows
        columns = np.zeros((len(rows), len(COLUMNS)))
        for mode in MODES:
            d, there = chunk.d[mode], chunk.measured[mode]
            start = COLUMNS[f"{mode}_tokens"]
            with np.errstate(over="ignore"):
                w = np.exp(d) * there
                figures = (there, -d, np.abs(d), k3(d), w, w * w, *((np.abs(d) > np.log(tau)) for tau in TAUS))
            for i, figure in enumerate(figures):
                columns[:, start + i] = figure
            self.histogram[mode] += np.histogram(np.clip(d[there], -9.99, 9.99), HISTOGRAM)[0]
        both = chunk.measured["natural"] & chunk.measured["replay"]
        last = (both, both * k3(chunk.d["natural"]), both * k3(chunk.d["replay"]), 1, chunk.flips, chunk.flips > 0, zero)
        for i, figure in enumerate(last):
            columns[:, COLUMNS["both"] + i] = figure
        keys = np.stack([rows.prompt_id[chunk.starts], rows.sample[chunk.starts]], axis=1).astype(np.int64)
        self._open.append((keys, np.add.reduceat(columns, chunk.starts), rows.reward[chunk.starts].astype(np.float64)))

    def end_step(self, meta: Meta) -> None:
        """All rows of a step are in: put the pieces of each sample together."""
        if self._open:
            keys, sums, rewards = (np.concatenate(parts) for parts in zip(*self._open, strict=True))
            keys, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
            whole = np.zeros((len(keys), len(COLUMNS)))
            np.add.at(whole, place.ravel(), sums)
            self.steps.append((meta, keys, whole, rewards[first]))
        self._open = []

    def result(self) -> dict[str, Any]:
        """`modes`, `parts`, `steps` and `histogram` of the report."""
        sums = np.concatenate([entry[2] for entry in self.steps]) if self.steps else np.zeros((0, len(COLUMNS)))
        layers = len(self.steps[0][0].layers) if self.steps else 1
        histogram: dict[str, Any] = {"edges": HISTOGRAM.tolist()}
        for mode in MODES:
            total = self.histogram[mode].sum()
            histogram[mode] = (self.histogram[mode] / total).tolist() if total else None
        return {
            "modes": {mode: mode_figures(sums, mode) for mode in MODES},
            "parts": _parts(sums),
            "steps": [self._step(meta, found, layers) for meta, _, found, _ in self.steps],
            "histogram": histogram,
        }

    def _step(self, meta: Meta, sums: np.ndarray, layers: int) -> dict[str, Any]:
        modes = {}
        for mode in MODES:
            found = mode_figures(sums, mode)
            modes[mode] = found and {
                **{name: found[name] for name in ("kl", "abs_diff", "ess")},
                "extreme": found["extreme"]["2"],
                "wide": found["extreme"]["1.2"],
            }
        flip = bands(
            column(sums, ("rows", "flips", "flipped_rows")),
            lambda s: np.stack([s[..., 1] / s[..., 0] / layers, s[..., 2] / s[..., 0]], axis=-1),
        )
        return {
            "step": meta.step,
            "trainer_version": meta.trainer_version,
            "rows": int(sums[:, COLUMNS["rows"]].sum()),
            "samples": len(sums),
            "tokens": int(max(sums[:, COLUMNS[f"{mode}_tokens"]].sum() for mode in MODES)),
            "flip_share": flip[0],
            "tokens_with_flip": flip[1],
            "modes": modes,
        }


def mode_figures(sums: np.ndarray, mode: str) -> dict[str, Any] | None:
    """The figures of a mode from sums per sample, None if it was not measured."""
    start = COLUMNS[f"{mode}_tokens"]
    tokens = sums[:, start].sum()
    if not tokens:
        return None

    def figures(s: np.ndarray) -> np.ndarray:
        n, k1, absolute, kl, w, w2, *over = np.moveaxis(s, -1, 0)
        return np.stack([kl / n, k1 / n, absolute / n, w**2 / w2 / n, *(count / n for count in over)], axis=-1)

    kl, k1, absolute, ess, *over = bands(sums[:, start : start + len(_PER_MODE)], figures)
    return {
        "tokens": int(tokens),
        "kl": kl,
        "k1": k1,
        "abs_diff": absolute,
        "ess": ess,
        "extreme": {f"{tau:g}": figure for tau, figure in zip(TAUS, over, strict=True)},
    }


def column(sums: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Columns of sums per sample by name: float64[m, len(names)]."""
    return sums[:, [COLUMNS[name] for name in names]]


def _parts(sums: np.ndarray) -> dict[str, Any] | None:
    """What replay takes away and what it leaves, on the same tokens and the same resampled samples."""
    both = column(sums, ("both", "both_natural", "both_replay"))
    if not both[:, 0].sum():
        return None
    routing, remainder = bands(both, lambda s: np.stack([(s[..., 1] - s[..., 2]) / s[..., 0], s[..., 2] / s[..., 0]], axis=-1))
    return {"routing": routing, "remainder": remainder}
