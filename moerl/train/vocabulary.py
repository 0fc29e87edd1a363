"""Log-probability and entropy from a tensor-parallel vocabulary, without gathering it.

Each rank holds logits [n, V / tp]. Two small all-reduces of [n] vectors (maximum, then three sums) give the answer on every
rank; the backward pass needs no communication. Where the engine cut its distribution, `logprobs_within` does the same with three
vectors over the few tokens that it kept.
"""

from collections.abc import Callable
from typing import Any

import torch

from moerl.train.objective import masked_logprobs

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


def logprobs_within(
    ids: torch.Tensor, offsets: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, logprobs: torch.Tensor, group: Any
) -> torch.Tensor:
    """
    Args:
        ids, offsets: int64[m], int64[n + 1] tokens that are allowed in each row, the label among them; a row without any is unrestricted.
        logits, labels, group: as for `logprob_and_entropy`; columns of padding may hold anything.
        logprobs: float32[n] its answer.

    Returns:
        float32[n]: those of restricted rows within their tokens, the others as they were.
    """
    rows = offsets.diff().nonzero().squeeze(1)

    def over(operation: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce(values: torch.Tensor) -> torch.Tensor:
            if group.size() > 1:
                torch.distributed.all_reduce(values, op=operation, group=group)
            return values

        return reduce

    found = masked_logprobs(
        logits[rows],
        labels[rows],
        ids,
        offsets.unique_consecutive(),
        first=group.rank() * logits.shape[1],
        add=over(torch.distributed.ReduceOp.SUM),
        largest=over(torch.distributed.ReduceOp.MAX),
    )
    return logprobs.index_copy(0, rows, found)


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
