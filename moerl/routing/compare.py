"""How far two records of the same tokens are apart: routes as sets, logprobs as ratios. numpy only.

Convention: d = trainer logprob - engine logprob of the sampled token, so exp(d) is the importance weight.
"""

import numpy as np

QUANTILES = (0.01, 0.5, 0.99)


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two routings choose different sets of experts.

    Args:
        a, b: integer[row, layer, k]; the order within k carries no meaning.

    Returns:
        bool[row, layer]
    """
    return (np.sort(a.astype(np.int32), axis=-1) != np.sort(b.astype(np.int32), axis=-1)).any(axis=-1)


def k3(d: np.ndarray) -> np.ndarray:
    """Per-token estimate of KL(engine || trainer) on tokens sampled by the engine: exp(d) - 1 - d (Schulman 2020)."""
    return np.expm1(d) - d


def mismatch(d: np.ndarray) -> dict[str, float]:
    """What the gap d = float[n] looks like.

    Returns:
        kl: mean k3; abs_diff: mean |d|; extreme_share: share of tokens with exp(d) outside 1/2..2; wide_share: outside
        1/1.2..1.2; ess: effective sample size of the weights exp(d) divided by n; ratio_p01, ratio_p50, ratio_p99.
    """
    if not len(d):
        return {}
    d = d.astype(np.float64)
    weight = np.exp(d)
    quantiles = np.quantile(weight, QUANTILES)
    return {
        "kl": float(k3(d).mean()),
        "abs_diff": float(np.abs(d).mean()),
        "extreme_share": float((np.abs(d) > np.log(2.0)).mean()),
        "wide_share": float((np.abs(d) > np.log(1.2)).mean()),
        "ess": float(weight.sum() ** 2 / (weight**2).sum() / len(d)),
        **{f"ratio_p{round(100 * q):02d}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def expert_counts(routes: np.ndarray, experts: int) -> np.ndarray:
    """How often each expert was chosen: int64[layer, experts] from integer[row, layer, k]."""
    layers = routes.shape[1]
    counts = np.bincount((routes.astype(np.int64) + experts * np.arange(layers)[:, None]).ravel(), minlength=layers * experts)
    return counts.reshape(layers, experts)


def imbalance(counts: np.ndarray) -> np.ndarray:
    """Busiest expert over the mean, per layer: float[layer] from int64[layer, experts]; 1 is perfect balance, 0 an unused layer."""
    return counts.max(axis=1) * counts.shape[1] / np.maximum(1, counts.sum(axis=1))
