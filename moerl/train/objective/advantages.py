"""Rewards of the completions of one prompt -> what each is worth beside the others. numpy only."""

from collections.abc import Callable, Iterable

import numpy as np

from moerl.config.schema import Objective

STD_FLOOR = 1e-6
"""Added to the standard deviation; a group of equal rewards has advantages of exactly 0 either way."""


def group_advantages(objective: Objective) -> Callable[[np.ndarray], np.ndarray]:
    """Rewards r, float32[g] of one group -> advantages float32[g].

        baseline mean            A_i = r_i - mean(r)
        baseline leave_one_out   A_i = r_i - mean of the other r_j  = g / (g - 1) * (r_i - mean(r))
        normalize_std            A_i = A_i / (std(r) + 1e-6), std over all g

    mean with normalize_std is GRPO (arXiv 2402.03300), without it Dr. GRPO (arXiv 2503.20783); leave_one_out is RLOO (arXiv 2402.14740).
    """

    def advantages(rewards: np.ndarray) -> np.ndarray:
        exact = rewards.astype(np.float64)  # whose sum of equal float32 values has no rounding error, which 1 / STD_FLOOR would magnify
        centred = exact - exact.mean()
        if objective.baseline == "leave_one_out":
            centred = centred * (len(rewards) / (len(rewards) - 1))
        return (centred / (exact.std() + STD_FLOOR) if objective.normalize_std else centred).astype(np.float32)

    return advantages


def is_uniform(rewards: np.ndarray) -> bool:
    """Whether all completions of a group got the same reward, float[g]: such a group has no gradient, and DAPO (arXiv 2503.14476)
    samples another in its place."""
    return bool((rewards == rewards[0]).all())


def uniform_share(groups: Iterable[np.ndarray]) -> float:
    """Share of groups, each the rewards float[g] of one, from which nothing is learned; 0 without any."""
    found = [is_uniform(rewards) for rewards in groups]
    return sum(found) / max(1, len(found))


def overlong_penalty(lengths: np.ndarray, limit_tokens: int, margin_tokens: int) -> np.ndarray:
    """DAPO's soft punishment of overlong answers (arXiv 2503.14476, eq. 13), to be added to the rewards.

        n <= limit - margin            0
        limit - margin < n <= limit    (limit - margin - n) / margin
        n > limit                      -1

    Args:
        lengths: int[g] response tokens n.
        limit_tokens: most tokens of a response.
        margin_tokens: how far below the limit the punishment begins, at least 1.

    Returns:
        float32[g] from -1 to 0.
    """
    return np.clip((limit_tokens - margin_tokens - lengths) / margin_tokens, -1.0, 0.0).astype(np.float32)
