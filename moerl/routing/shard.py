"""Which rows and layers of a packed microbatch's routes belong to which rank: traces aligned to 5D parallelism. numpy only.

    rows of the microbatch --zigzag per sequence (CP)--> local rows --equal chunks (sequence parallel TP)--> router rows
    all MoE layers --> those of the rank's pipeline stages

Under context parallelism each padded sequence is cut into 2 * cp equal pieces and rank r holds pieces r and 2 * cp - 1 - r, so
that causal work is balanced. Invariant: over the ranks of one data-parallel replica every (row, layer) is held exactly once,
so `join` of all cuts is the whole again.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from moerl.errors import ReplayError
from moerl.routing.layout import Layout


class Place(NamedTuple):
    """Where a rank stands within its data-parallel replica.

    Attributes:
        cp, tp: (index, size).
        moe_indices: which of the layout's MoE layers (positions in `layout.layers`) it holds, ascending.
    """

    cp: tuple[int, int]
    tp: tuple[int, int]
    moe_indices: tuple[int, ...]

    @property
    def multiple(self) -> int:
        """Padded sequence lengths must be multiples of this."""
        return self.tp[1] * (2 * self.cp[1] if self.cp[1] > 1 else 1)


def context_rows(cu_seqlens: np.ndarray, cp: tuple[int, int]) -> np.ndarray:
    """Rows int64[n / cp] of the packed microbatch that a context-parallel rank holds, in its order.

    Args:
        cu_seqlens: int[s + 1] boundaries of the padded sequences; every length is divisible by 2 * cp (by nothing if cp is 1).
    """
    rank, size = cp
    if size == 1:
        return np.arange(int(cu_seqlens[-1]))
    pieces = []
    for start, stop in itertools.pairwise(cu_seqlens.astype(np.int64)):
        piece = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(np.arange(start + number * piece, start + (number + 1) * piece))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def router_rows(cu_seqlens: np.ndarray, cp: tuple[int, int], tp: tuple[int, int]) -> np.ndarray:
    """Rows int64[n / cp / tp] that a rank's routers see, in their order."""
    rows = context_rows(cu_seqlens, cp)
    return rows[tp[0] * len(rows) // tp[1] : (tp[0] + 1) * len(rows) // tp[1]]


def cut(routes: np.ndarray, cu_seqlens: np.ndarray, place: Place) -> np.ndarray:
    """This rank's routes, in router order.

    Args:
        routes: integer[n, moe_layer, k] of the whole microbatch.

    Returns:
        integer[n / cp / tp, layers here, k], contiguous.
    """
    rows = router_rows(cu_seqlens, place.cp, place.tp)
    return np.ascontiguousarray(routes[np.ix_(rows, place.moe_indices)])


def join(cuts: Iterable[tuple[Place, np.ndarray]], cu_seqlens: np.ndarray, layout: Layout) -> np.ndarray:
    """The whole microbatch's routes from the cuts of all ranks of a replica.

    Returns:
        integer[n, moe_layer, k]

    Raises:
        ReplayError: some (row, layer) is held by no rank, or by two.
    """
    total = int(cu_seqlens[-1])
    held = np.zeros((total, len(layout.layers)), np.int64)
    whole = np.zeros((total, len(layout.layers), layout.topk), layout.dtype)
    for place, part in cuts:
        where = np.ix_(router_rows(cu_seqlens, place.cp, place.tp), place.moe_indices)
        held[where] += 1
        whole[where] = part
    if (held != 1).any():
        row, index = np.argwhere(held != 1)[0]
        raise ReplayError(
            f"every row and layer must be held by one rank, but row {row} of layer {layout.layers[index]} is held by {held[row, index]} "
            f"({int((held != 1).sum())} of {held.size} are wrong); do the ranks agree on the parallel sizes?"
        )
    return whole
