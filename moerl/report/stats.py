"""Figures with bands, and histograms, from sums: nothing here holds rows.

Tokens of a sample are correlated, so a band resamples whole samples: a figure is a function of sums over samples, and the bootstrap
draws samples with replacement (with a fixed seed, so that a report is the same each time).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES = 400
MOST_BLOCKS = 1000
BAND = (2.5, 97.5)  # percentiles: 95 %
_SEED = 20


def finite(value: Any) -> float | None:
    """A plain float, None where there is none."""
    return float(value) if value is not None and math.isfinite(value) else None


def share(part: Any, whole: Any) -> float | None:
    """part / whole as a plain float, None of nothing."""
    return float(part) / float(whole) if whole else None


def bands(sums: np.ndarray, figures: Callable[[np.ndarray], np.ndarray]) -> list[dict[str, float | None] | None]:
    """Figures of all samples with a 95 % band each.

    Args:
        sums: float[sample, column].
        figures: float[..., column] of summed columns to float[..., figure].

    Returns:
        per figure `{"value", "low", "high"}`; None where the figure is not defined, low and high None with fewer than two samples.
    """
    values = _quiet(figures, sums.sum(axis=0))
    low, high = np.full((2, len(values)), np.nan)
    if len(sums) >= 2:
        blocks = _blocks(sums)
        rng = np.random.default_rng(_SEED)
        counts = rng.multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=RESAMPLES).astype(np.float64)
        low, high = np.percentile(_quiet(figures, counts @ blocks), BAND, axis=0)
    return [
        {"value": float(value), "low": finite(a), "high": finite(b)} if math.isfinite(value) else None
        for value, a, b in zip(values, low, high, strict=True)
    ]


def _blocks(sums: np.ndarray) -> np.ndarray:
    """Samples, neighbours added up where there are more than `MOST_BLOCKS`."""
    if len(sums) <= MOST_BLOCKS:
        return sums
    return np.add.reduceat(sums, np.linspace(0, len(sums), MOST_BLOCKS, endpoint=False).astype(int), axis=0)


def _quiet(figures: Callable[[np.ndarray], np.ndarray], sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(figures(sums), np.float64)


def log_edges(low: float, high: float, per_decade: int) -> np.ndarray:
    """Edges of logarithmic bins, float[n+1]."""
    return np.logspace(math.log10(low), math.log10(high), round(per_decade * math.log10(high / low)) + 1)


def half_bins(edges: np.ndarray) -> np.ndarray:
    """Bin of every float16, by its bits: uint8[65536]; bin 0 is at most 0, bin i is edges[i-1] .. edges[i], the ends are open.

    A look-up is many times as fast as a search, and margins are many.
    """
    with np.errstate(invalid="ignore"):
        values = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
        bins = 1 + np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return np.where(values > 0, bins, 0).astype(np.uint8)


def median_of(counts: np.ndarray, middles: np.ndarray) -> float | None:
    """Median of a histogram, as the middle of its bin."""
    total = counts.sum()
    return float(middles[np.searchsorted(counts.cumsum(), total / 2)]) if total else None


def middles_of(edges: np.ndarray) -> np.ndarray:
    """A value per bin of `half_bins`: 0, then the geometric middles."""
    return np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:])])


def upper_tail(x: float) -> float:
    """Probability that a standard normal value is above x."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def implied_error(counts: np.ndarray, flipped: float, middles: np.ndarray) -> float | None:
    """Standard deviation of the error of a score difference under which as many margins would be overturned as were.

    A decision flips if its margin m and a Gaussian error e have m + e < 0, so with the probability of the upper tail at m / sigma.

    Args:
        counts: decisions per bin of margins. flipped: how many flipped. middles: margin per bin.

    Returns:
        None where there are no margins, or more flips than any error explains (half of all); 0 without flips.
    """
    total = counts.sum()
    if not total or flipped >= 0.5 * total:
        return None
    if not flipped:
        return 0.0
    low, high = math.log(1e-9), math.log(1e3)
    for _ in range(50):
        middle = (low + high) / 2
        if expected_flips(counts, math.exp(middle), middles).sum() < flipped:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def expected_flips(counts: np.ndarray, sigma: float, middles: np.ndarray) -> np.ndarray:
    """Flips per bin of margins under a Gaussian error of standard deviation sigma: float[bin]."""
    return counts * np.array([upper_tail(middle / sigma) for middle in middles])
