"""Surrogates of single tokens, and the loss that is summed from them.

Every surrogate is to be maximised, and is local to its token: the gradient of a token's log-probability depends on no other rank's.
"""

from typing import Any

import torch

from moerl.config.schema import Objective
from moerl.errors import TrainError
from moerl.train.objective.corrections import correction, on_policy_enough
from moerl.train.objective.sequences import Sequences, Totals, totals

Surrogate = tuple[torch.Tensor, torch.Tensor]
"""(float32[m] to be maximised, bool[m] where the clip took effect)."""


def ppo(log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_ratio).

    PPO, arXiv 1707.06347; two sides of their own (Clip-Higher): DAPO, arXiv 2503.14476.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


def sequence_log_ratio(logprobs: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """log s of GSPO, where s = exp(mean over a sequence's tokens of log(live / old)), in its form by token: for `ppo`.

        log s_t = sg[log s] + log pi_t - sg[log pi_t]

    Its value is log s at every token, and ppo of it clips whole sequences. Its gradient is that of the token alone; over a sequence
    of n tokens of one advantage they add up to s A sum_t grad log pi_t = n A grad s, that of n times the sequence's own surrogate.
    So a rank that holds some of the tokens needs the value of s from the others, and no gradient. GSPO, arXiv 2507.18071, section 4.3.

    Args:
        logprobs: float32[m] log pi, with gradient.
        mean: float32[m] log s of each token's sequence.
    """
    return mean.detach() + (logprobs - logprobs.detach())


def cispo(logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """sg[clip(r, 1 - low, 1 + high)] A log pi: the weight is clipped, but no token loses its gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585; they leave the lower side open (low = 1).
    """
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return clipped * advantages * logprobs, clipped != ratio


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, engine: torch.Tensor | None = None) -> torch.Tensor:
    """k3 estimate of KL(live || reference) at each token: x - log x - 1 with x = reference / live (Schulman 2020).

    With the engine's log-probabilities, live / engine times that: unbiased for tokens that the engine sampled, and so is its gradient
    (live / engine) log(live / reference) grad log live, while that of k3 alone grows without bound where live << reference.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    away = reference - logprobs
    kl = torch.expm1(away) - away
    return kl if engine is None else (logprobs - engine).exp() * kl


def grpo_loss(
    objective: Objective,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    columns: dict[str, torch.Tensor],
    sequences: Sequences | None = None,
    budget_tokens: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The step's loss and what it is divided by, both summed over this rank's trained tokens.

        tokens      sum of all tokens' losses / number of tokens (DAPO)
        sequences   sum of the means of each sequence's tokens / number of sequences (GRPO, GSPO)
        constant    sum of all tokens' losses / (number of sequences * budget_tokens) (Dr. GRPO)

    Args:
        logprobs, entropy: float32[n] of the labels under the live policy.
        mask: float32[n], 1 at trained tokens.
        columns: float32[n] each: advantages, engine_logprobs, and old_logprobs, reference_logprobs where they apply.
        sequences: of the rows; needed with `objective.needs_sequences`.
        budget_tokens: most tokens that a response may have.

    Returns:
        (loss sum, its denominator as a whole number, sums for `measures.averages`).

    Raises:
        TrainError: no sequences, where they are needed.
    """
    if objective.needs_sequences and sequences is None:
        raise TrainError("this objective looks at whole sequences, but was not told which rows belong together")
    keep = mask > 0
    logprobs, entropy = logprobs[keep], entropy[keep]
    columns = {name: column[keep] for name, column in columns.items()}
    live, engine, advantages = logprobs.detach(), columns["engine_logprobs"], columns["advantages"]
    old = engine if objective.old_policy == "engine" else columns.get("old_logprobs", live)
    gap, found = old - engine, None
    if sequences is not None:
        found = totals(sequences, keep, {"log_ratio": live - old, "gap": gap, "drift": engine - live})
    surrogate, clipped = _surrogate(objective, logprobs, old, advantages, found)
    gap = found.sums["gap"] if objective.correction.endswith("_sequence") else gap
    weight = correction(objective, gap)
    sums: dict[str, Any] = {"entropy": entropy.detach(), "clip_share": clipped.float(), "correction_weight": weight}
    if objective.correction != "none":
        sums |= {"correction_cut_share": (weight != gap.exp()).float(), "correction_weight_squared": weight**2}
    if objective.opsm_threshold > 0:
        enough = on_policy_enough(found.mean("drift"), advantages, objective.opsm_threshold)
        weight = weight * enough
        sums["opsm_masked_share"] = (~enough).float()
    loss = -weight * surrogate - objective.entropy_coef * entropy
    if "reference_logprobs" in columns:
        kl = reference_kl(logprobs, columns["reference_logprobs"], engine if objective.unbiased_kl else None)
        loss = loss + objective.kl_coef * kl
        sums["reference_kl"] = kl.detach()
    if objective.length_normalization == "sequences":
        loss = loss / found.length
    return loss.sum(), _denominator(objective, mask, found, budget_tokens), _summed(sums, mask, found)


def _surrogate(
    objective: Objective, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, found: Totals | None
) -> Surrogate:
    clip = objective.clip_low, objective.clip_high
    match objective.loss:
        case "cispo":
            return cispo(logprobs, logprobs - old, advantages, *clip)
        case "gspo":
            return ppo(sequence_log_ratio(logprobs, found.mean("log_ratio")), advantages, *clip)
    return ppo(logprobs - old, advantages, *clip)


def _denominator(objective: Objective, mask: torch.Tensor, found: Totals | None, budget_tokens: int) -> torch.Tensor:
    match objective.length_normalization:
        case "sequences":
            return found.trained
        case "constant":
            return found.trained * budget_tokens
    return mask.sum()


def _summed(values: dict[str, torch.Tensor], mask: torch.Tensor, found: Totals | None) -> dict[str, torch.Tensor]:
    """Sums over tokens, and of shares also over sequences: a token stands for 1 / length of its own."""
    sums = {name: value.sum() for name, value in values.items()} | {"tokens": mask.sum()}
    if found is not None:
        shares = {name: value for name, value in values.items() if name.endswith("_share")}
        sums |= {f"{name}_of_sequences": (value / found.length).sum() for name, value in shares.items()}
        sums["sequences"] = (1 / found.length).sum()
    return sums


def supervised_loss(
    entropy_bonus: float, logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the labels minus a bonus for entropy (confidence penalty, arXiv 1701.06548), summed over tokens."""
    keep = mask > 0
    loss = (-logprobs - entropy_bonus * entropy)[keep].sum()
    return loss, mask.sum(), {"entropy": entropy.detach()[keep].sum(), "logprob": logprobs.detach()[keep].sum()}
