"""From sums over all tokens of all ranks to the figures of a step. Plain numbers and numpy."""

import numpy as np

from moerl.routing.compare import k3

OF_SEQUENCES = "_of_sequences"


def averages(sums: dict[str, float]) -> dict[str, float]:
    """Metrics from the sums of `losses.grpo_loss`, added up over microbatches and ranks, with its loss and denominator.

    Args:
        sums: loss, denominator, tokens, sequences (where they were looked at), and any others: of tokens, or where the name ends with
            `_of_sequences` of sequences.

    Returns:
        means by name; correction_ess: effective sample size of the correction's weights, (sum w)^2 / (tokens * sum w^2).
    """
    tokens = max(1.0, sums["tokens"])
    means = {}
    for name, value in sums.items():
        if name == "loss":
            means[name] = value / max(1.0, sums["denominator"])
        elif name.endswith(OF_SEQUENCES):
            means[name] = value / max(1.0, sums["sequences"])
        elif name not in ("denominator", "tokens", "sequences", "correction_weight_squared"):
            means[name] = value / tokens
    if sums.get("correction_weight_squared"):
        means["correction_ess"] = sums["correction_weight"] ** 2 / (tokens * sums["correction_weight_squared"])
    return means


def by_lag(gap: np.ndarray, lag: np.ndarray) -> dict[str, float]:
    """How much tokens are still worth that were sampled some versions ago.

    Args:
        gap: float[m] trainer minus engine logprob of the sampled tokens.
        lag: float32[m] versions between the weights that sampled each token and those that are trained.

    Returns:
        of each lag that occurs: ess_lag{n}, the effective sample size (sum w)^2 / (m_n * sum w^2) of the weights w = exp(gap), kl_lag{n},
        the KL from the engine's policy by the k3 estimator, and token_share_lag{n}.
    """
    found = {}
    whole = np.rint(lag).astype(np.int64)
    for versions in np.unique(whole):
        logs = gap[whole == versions].astype(np.float64)
        weight = np.exp(logs - logs.max())  # the size doesn't change with the scale of the weights
        found[f"ess_lag{versions}"] = float(weight.sum() ** 2 / (weight**2).sum() / len(weight))
        found[f"kl_lag{versions}"] = float(k3(logs).mean())
        found[f"token_share_lag{versions}"] = len(weight) / len(gap)
    return found
