"""What a step minimises: GRPO with asymmetric clipping, token-level, corrected for the engine-trainer gap.

    ratio   = pi(token) / pi_old(token)             clipped to [1 - clip_low, 1 + clip_high]
    weight  = pi_old(token) / engine(token)         truncated (TIS) or masked (IcePop), never differentiated
    loss    = - sum over tokens of weight * min(ratio * A, clip(ratio) * A)  + kl_coef * k3(pi, reference)

Sources: GRPO, arXiv 2402.03300; asymmetric clip and token-level loss, DAPO, arXiv 2503.14476; group statistics without the
standard deviation, Dr. GRPO, arXiv 2503.20783; truncated importance sampling between engine and trainer, Yao et al. 2025
(TIS); IcePop, Ling team 2025. The engine's logprob is the behaviour policy; with one update per batch pi_old is pi itself,
detached, so the ratio is 1 and only the weight carries the gap.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moerl.config.schema import Objective


def group_advantages(objective: Objective) -> Callable[[np.ndarray], np.ndarray]:
    """Rewards float32[g] of one group -> advantages float32[g]: centred, and scaled by the standard deviation if set so."""

    def advantages(rewards: np.ndarray) -> np.ndarray:
        centred = rewards - rewards.mean()
        return centred / (rewards.std() + 1e-6) if objective.normalize_std else centred

    return advantages


def correction(objective: Objective, gap: torch.Tensor) -> torch.Tensor:
    """Weight of each token from gap = log(pi_old / engine), float32[n]."""
    weight = gap.exp()
    if objective.correction == "tis":
        return weight.clamp(max=objective.tis_cap)
    if objective.correction == "icepop":
        return weight * ((weight >= objective.icepop_low) & (weight <= objective.icepop_high))
    return torch.ones_like(weight)


def grpo_loss(
    objective: Objective, logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, columns: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss summed over trained tokens.

    Args:
        logprobs, entropy: float32[n] of the labels under the current policy.
        mask: float32[n], 1 at trained tokens.
        columns: float32[n] each: advantages, engine_logprobs, and old_logprobs, reference_logprobs where they apply.

    Returns:
        (loss sum, number of trained tokens, sums of metrics over trained tokens).
    """
    old = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
    advantages = columns["advantages"]
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    gap = ((old - columns["engine_logprobs"]) * mask).detach()
    weight = correction(objective, gap)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -weight * surrogate - objective.entropy_coef * entropy
    sums: dict[str, Any] = {
        "entropy": entropy.detach(),
        "clip_share": (clipped * advantages < ratio * advantages).float(),
        "correction_weight": weight,
    }
    if objective.correction != "none":
        sums["correction_cut_share"] = (weight != gap.exp()).float()
    if "reference_logprobs" in columns:
        away = columns["reference_logprobs"] - logprobs
        kl = torch.expm1(away) - away
        loss = loss + objective.kl_coef * kl
        sums["reference_kl"] = kl.detach()
    # masked by selection, not by a product: a non-finite value at padding must not reach the sum
    keep = mask > 0
    return loss[keep].sum(), mask.sum(), {name: value[keep].sum() for name, value in sums.items()}


def supervised_loss(
    entropy_bonus: float, logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the labels minus a bonus for entropy (confidence penalty, arXiv 1701.06548), summed over tokens."""
    keep = mask > 0
    loss = (-logprobs - entropy_bonus * entropy)[keep].sum()
    return loss, mask.sum(), {"entropy": entropy.detach()[keep].sum(), "logprob": logprobs.detach()[keep].sum()}
