"""Sums over the tokens of a sequence, where sequences are packed into one microbatch and cut by context parallelism.

    this rank's tokens --add up by sequence--> float64[k, s] --reduce, over the ranks that hold the other pieces--> totals --> each token

Under context parallelism a sequence's tokens lie on several ranks, all of which must see the same total. Totals are values, not
functions of the parameters: nothing here is differentiated, so no gradient has to travel back between ranks, and one collective per
microbatch is all. Losses are written so that this is exact (see `losses.sequence_log_ratio`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequences:
    """Which sequence each row belongs to.

    Attributes:
        ids: int64[n] number of each of this rank's rows' sequence within the microbatch.
        count: sequences in the microbatch, those of padding included; the same on all ranks that share them.
        counts: whether this rank counts the sequences where they are counted: true on exactly one of those ranks.
        reduce: float64[k, s] -> the sum of it over those ranks; called once per loss, on all of them. The identity where no one else
            holds a piece.
    """

    ids: torch.Tensor
    count: int
    counts: bool
    reduce: Callable[[torch.Tensor], torch.Tensor]


def sequence_ids(cu_seqlens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64[n]: which sequence each of the rows int64[n] of a microbatch lies in.

    Args:
        cu_seqlens: int[s + 1] boundaries of the padded sequences of the whole microbatch.
    """
    return torch.searchsorted(cu_seqlens[1:].to(rows.dtype), rows, right=True)


@dataclass(frozen=True)
class Totals:
    """Of each trained token's whole sequence, float32[m]; the same on every rank that holds a piece of it.

    Attributes:
        length: its trained tokens.
        sums: by name.
        trained: sequences that this rank counts, those without trained tokens left out.
    """

    length: torch.Tensor
    sums: dict[str, torch.Tensor]
    trained: torch.Tensor

    def mean(self, name: str) -> torch.Tensor:
        return self.sums[name] / self.length


def totals(sequences: Sequences, keep: torch.Tensor, columns: dict[str, torch.Tensor]) -> Totals:
    """Totals of the columns, float32[m] of the trained tokens: those of this rank's rows at which keep, bool[n], holds."""
    ids = sequences.ids[keep]
    parts = torch.stack([torch.ones_like(ids, dtype=torch.float64), *(column.detach().double() for column in columns.values())])
    mine = torch.zeros(len(parts), sequences.count, dtype=torch.float64, device=ids.device).index_add_(1, ids, parts)
    whole = sequences.reduce(mine)
    length, *sums = whole[:, ids].float()
    return Totals(length, dict(zip(columns, sums, strict=True)), (whole[0] > 0).sum() * int(sequences.counts))
