"""Log-probabilities under the policy that really sampled: the softmax over the nucleus that the engine cut out, not over everything.

With top-p or top-k the engine samples from a few tokens of each position. Compared over the whole vocabulary the ratio of the two
policies then holds the cut-off mass as well, and the live policy would be trained towards tokens that could never be drawn. Both are
put on the same tokens: those that the engine kept (`rollout.mask.SamplingMask`). Keep sampling mask, DeepSeek-V3.2, arXiv 2512.02556.
"""

from collections.abc import Callable

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


def masked_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    first: int = 0,
    add: Reduce = _alone,
    largest: Reduce = _alone,
) -> torch.Tensor:
    """Log-probability of each row's label in the softmax over the row's allowed tokens:  x_label - log sum over allowed j of exp(x_j).

    Args:
        logits: float32[n, v] scaled by the temperature; log-probabilities do as well. Under tensor parallelism this rank's columns, in
            which those of padding are so low that they weigh nothing.
        labels: int64[n] over the whole vocabulary, each among its row's allowed tokens.
        ids: int64[m] allowed tokens over the whole vocabulary, row after row, each once in its row.
        offsets: int64[n + 1] where each row begins in `ids`; a row without any is not restricted.
        first: token of the first column.
        add, largest: sum and maximum of a vector over the tensor-parallel ranks; the identity where the columns are all there are.
            They are not differentiated through: the gradient of the columns is each rank's own.

    Returns:
        float32[n], the same on all tensor-parallel ranks.
    """
    rows, columns = _here(ids, offsets, first, logits.shape[1])
    free = offsets.diff() == 0
    picked = logits[rows, columns]
    bottom = torch.full_like(logits[:, 0], -torch.inf)
    highest = bottom.scatter_reduce(0, rows, picked.detach(), "amax")
    highest[free] = logits.detach()[free].amax(1)
    highest = largest(highest)
    mine = torch.zeros_like(bottom).index_add(0, rows, (picked - highest[rows]).exp())
    mine = mine.index_add(0, free.nonzero().squeeze(1), (logits[free] - highest[free, None]).exp().sum(1))
    own = (labels >= first) & (labels < first + logits.shape[1])
    column = (labels - first).clamp(0, logits.shape[1] - 1)
    label = torch.where(own, logits.gather(1, column[:, None]).squeeze(1) - highest, 0.0)
    return _total(label, add) - _total(mine, add).log()


def _here(ids: torch.Tensor, offsets: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, column) int64 each, of the allowed tokens that lie in this rank's columns."""
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=ids.device), offsets.diff(), output_size=len(ids))
    here = (ids >= first) & (ids < first + width)
    return rows[here], ids[here] - first


def _total(mine: torch.Tensor, add: Reduce) -> torch.Tensor:
    """The sum over ranks, whose gradient is that of this rank's term."""
    return add(mine.detach().clone()) + (mine - mine.detach())
