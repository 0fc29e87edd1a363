"""How near a router was to another choice, and how much of its weight goes to experts that another side did not choose. torch only.

Selection scores are what the top-k is taken of: with the correction bias where there is one, logits where the softmax comes after it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Near:
    """Rows of one microbatch for which a recorded pass keeps margins as well as experts.

    Attributes:
        rows: int64[m] places among the router's rows.
        engine: integer[m, layers here, k] the engine's experts of these rows.
    """

    rows: torch.Tensor
    engine: torch.Tensor


def best_experts(score_function: str) -> int:
    """How many of a group's experts count when groups compete: the best one in DeepSeek-V2 (softmax), the best two since V3."""
    return 1 if score_function == "softmax" else 2


def selection_margin(
    scores: torch.Tensor, chosen: torch.Tensor, num_groups: int | None = None, group_topk: int | None = None, best: int = 2
) -> torch.Tensor:
    """k-th minus (k+1)-th best selection score among the experts of the groups that may be chosen from.

    Args:
        scores: float[n, experts].
        chosen: int64[n, k].
        num_groups, group_topk: experts lie in equal groups, of which those with the largest sums of their `best` best scores may be
            chosen from; None where all may.

    Returns:
        float32[n]; infinite where every expert of the open groups was chosen.
    """
    scores = scores.float()
    rest = scores
    if group_topk:
        grouped = scores.unflatten(1, (num_groups, -1))
        strength = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        closed = torch.ones_like(strength, dtype=torch.bool).scatter(1, strength.topk(group_topk, dim=-1).indices, False)
        rest = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
    return scores.gather(1, chosen).amin(dim=1) - rest.scatter(1, chosen, -torch.inf).amax(dim=1)


def flipped_mass(weights: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """Share of the gate weights that goes to experts which the engine did not choose.

    Args:
        weights: float[n, experts], zero at experts that were not chosen.
        engine: integer[n, k].

    Returns:
        float32[n], 0 to 1.
    """
    weights = weights.float()
    return weights.scatter(1, engine.long(), 0.0).sum(dim=1) / weights.sum(dim=1)
