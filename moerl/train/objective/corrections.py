"""Weights and masks for what stands between the engine that sampled and the trainer: other arithmetic, other routes, older weights.

Everything is a constant to the gradient. A weight of 1 means that both policies gave the token the same probability.
"""

import torch

from moerl.config.schema import Objective


def correction(objective: Objective, gap: torch.Tensor) -> torch.Tensor:
    """Weight of each token from its gap = log(old / engine), float32[m].

        none      1
        tis       min(w, tis_cap)                               w = exp(gap)
        mis       w where w <= mis_cap, else 0
        icepop    w where icepop_low <= w <= icepop_high, else 0

    For tis_sequence and mis_sequence, gap is the sum over the token's whole sequence (the log of the product of its ratios), and so all
    tokens of a sequence have one weight: unbiased where uncut, but its variance grows with the length.

    Sources: TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; MIS and the sequence level,
    Liu et al. 2025, "When Speed Kills Stability"; IcePop, Ling team 2025 (arXiv 2510.18855).
    """
    weight = gap.exp()
    match objective.correction:
        case "tis" | "tis_sequence":
            return weight.clamp(max=objective.tis_cap)
        case "mis" | "mis_sequence":
            return _where(weight <= objective.mis_cap, weight)
        case "icepop":
            return _where((weight >= objective.icepop_low) & (weight <= objective.icepop_high), weight)
    return torch.ones_like(weight)


def on_policy_enough(drift: torch.Tensor, advantages: torch.Tensor, threshold: float) -> torch.Tensor:
    """Off-policy sequence masking: bool[m], False at the tokens of sequences that are bad and no longer the policy's own.

        M = 0 where A < 0 and mean over the sequence of log(engine / live) > threshold, else 1

    One learns from one's own mistakes; from another's, little. Source: DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        drift: float32[m] that mean, an estimate of KL(engine || live) per token, at each of the sequence's tokens.
        advantages: float32[m].
    """
    return ~((advantages < 0) & (drift > threshold))


def _where(keep: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Not a product: an infinite weight times 0 is not 0."""
    return torch.where(keep, weight, torch.zeros_like(weight))
