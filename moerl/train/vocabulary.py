"""Log-probability and entropy from a tensor-parallel vocabulary, without gathering it.

Each rank holds logits [n, V / tp]. Two small all-reduces of [n] vectors (maximum, then three sums) give the answer on every
rank; the backward pass needs no communication.
"""

from typing import Any

import torch

_MASKED = -1e30
"""Logit of padding columns: its probability is exactly 0, and 0 * _MASKED is finite, unlike with -inf."""


def logprob_and_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        logits: float32[n, v] this rank's columns, rank after rank; columns at or beyond `vocab` are padding.
        labels: int64[n] over the whole vocabulary.
        vocab: number of real columns over all ranks.
        group: tensor-parallel group.

    Returns:
        (log-probability float32[n] of the labels, entropy float32[n] in nats), both differentiable in `logits`.
    """
    first = group.rank() * logits.shape[1]
    if first + logits.shape[1] > vocab:
        padding = torch.arange(first, first + logits.shape[1], device=logits.device) >= vocab
        logits = logits.masked_fill(padding, _MASKED)
    return _LogprobEntropy.apply(logits, labels - first, group)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parallel = group.size() > 1
        maximum = logits.max(dim=1).values
        if parallel:
            torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
        shifted = logits - maximum[:, None]
        weights = shifted.exp()
        mine = (labels >= 0) & (labels < logits.shape[1])
        columns = labels.clamp(0, logits.shape[1] - 1)
        chosen = shifted.gather(1, columns[:, None]).squeeze(1) * mine
        sums = torch.stack([weights.sum(1), (weights * shifted).sum(1), chosen])
        if parallel:
            torch.distributed.all_reduce(sums, group=group)
        total, moment, chosen = sums.unbind(0)
        normaliser = total.log()
        entropy = normaliser - moment / total
        probabilities = weights.div_(total[:, None])
        ctx.save_for_backward(probabilities, shifted.sub_(normaliser[:, None]), entropy, columns, mine)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, logprobs, entropy, columns, mine = ctx.saved_tensors
        grad = probabilities * (-grad_logprob[:, None] - grad_entropy[:, None] * (logprobs + entropy[:, None]))
        grad.scatter_add_(1, columns[:, None], (grad_logprob * mine)[:, None])
        return grad, None, None
