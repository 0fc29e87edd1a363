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
    found = (a != b).any(axis=-1)  # most agree in the same order; only the others are sorted
    left, right = (np.sort(one[found].astype(np.int32), axis=-1) for one in (a, b))
    found[found] = (left != right).any(axis=-1)
    return found


def members(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which ids of a decision are also in another's: bool[m, k] from integer[m, k] and integer[m, k] of one type."""
    left, right = (np.ascontiguousarray(one.T) for one in (a, b))  # one long column per slot, which the comparison runs along
    found = np.zeros(left.shape, bool)
    for row, ids in zip(found, left, strict=True):
        for others in right:
            row |= ids == others
    return found.T


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many experts two routings have in common: uint8[row, layer] from integer[row, layer, k] of one type.

    An id that stands twice in one decision counts once for each expert that the other lacks: fewer than k are then in common.
    """
    rows, layers, k = a.shape
    found = np.full(rows * layers, k, np.uint8)
    a, b = (np.ascontiguousarray(one).reshape(-1, k) for one in (a, b))
    others = np.flatnonzero(~_identical(a, b))  # most agree, in the same order too
    left, right = a[others], b[others]
    found[others] = np.minimum(members(left, right).sum(axis=1), members(right, left).sum(axis=1))
    return found.reshape(rows, layers)


def repeated(a: np.ndarray) -> np.ndarray:
    """Whether a decision names an expert twice: bool[row, layer] from integer[row, layer, k]."""
    columns = np.ascontiguousarray(a.reshape(-1, a.shape[2]).T)
    found = np.zeros(columns.shape[1], bool)
    for i, ids in enumerate(columns):
        for others in columns[i + 1 :]:
            found |= ids == others
    return found.reshape(a.shape[:2])


def _identical(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal in the same order: bool[m] from integer[m, k]; eight bytes at a time where k fits."""
    width = a.shape[1] * a.itemsize
    if width % 8 == 0 and len(a):
        a, b = (one.view(np.uint64) for one in (a, b))
    return (a == b)[:, 0] if a.shape[1] == 1 else (a == b).all(axis=1)


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
    counts = np.zeros((routes.shape[1], experts), np.int64)
    for layer, found in enumerate(counts):  # a layer at a time: the copy that bincount makes of its input then stays in the cache
        found[:] = np.bincount(routes[:, layer].ravel(), minlength=experts)
    return counts


def imbalance(counts: np.ndarray) -> np.ndarray:
    """Busiest expert over the mean, per layer: float[layer] from int64[layer, experts]; 1 is perfect balance, 0 an unused layer."""
    return counts.max(axis=1) * counts.shape[1] / np.maximum(1, counts.sum(axis=1))
