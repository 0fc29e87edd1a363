"""`Shard`: one rank's part of one weight, as the trainer holds it, and which boxes of the HF tensors lie where in it.

`index`/`parts` count along `param.tp_axis`: by tensor parallelism, or expert tensor parallelism for experts. A shard of several HF
tensors holds a slice of each, one below the other (gate over up). Those of grouped-query attention are interleaved instead, per
key-value head:

    HF   q [heads * d, hidden]   k, v [groups * d, hidden]
    rank 0 of 2                  q of group 0, k 0, v 0, q of group 1, k 1, v 1, … up to half of the groups
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from moerl.errors import ModelError
from moerl.models.spec import Entry, Param

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """Attributes:
    tensor: the live parameter (or its fp32 master), not a copy.
    index, parts: which of how many slices this is; 0 of 1 when replicated.
    """

    entry: Entry
    tensor: "torch.Tensor"
    index: int
    parts: int


@dataclass(frozen=True)
class Window:
    """A box of one HF tensor inside a shard. Vectors are columns of one element.

    Attributes:
        part: of which of `param.hf`.
        rows, cols: (first, one past the last) in the HF tensor; the shard has the columns `cols` only.
        at: first row in the shard.
    """

    part: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    at: int
    vector: bool

    @property
    def in_hf(self) -> tuple[slice, ...]:
        """Index of the box in the HF tensor."""
        return (slice(*self.rows),) if self.vector else (slice(*self.rows), slice(*self.cols))

    @property
    def in_shard(self) -> slice:
        """Index of the box in the shard."""
        return slice(self.at, self.at + self.rows[1] - self.rows[0])


def cut_units(param: Param) -> int:
    """How many indivisible units tensor parallelism has to cut between: key-value heads, or elements along `tp_axis`."""
    return param.groups if param.head_rows else param.shape[param.tp_axis or 0]


def windows(param: Param, index: int, parts: int) -> Iterator[Window]:
    """What slice `index` of `parts` holds, in the order of its rows; empty windows are left out.

    Only the vocabulary may be cut unevenly: as if it were padded to a multiple of `parts`.

    Raises:
        ModelError: `parts` does not divide anything else.
    """
    if cut_units(param) % parts and not param.is_vocabulary:
        units = "key-value heads" if param.head_rows else "elements"
        raise ModelError(f"{param.megatron}: {cut_units(param)} {units} cannot be cut into {parts} parts; choose a divisor")
    below = 0
    for part, group in _blocks(param, index, parts):
        shape = param.part_shape(part)
        rows, cols = (0, shape[0]), (0, prod(shape[1:]))
        if param.tp_axis == 1:
            each = cols[1] // parts
            cols = (index * each, (index + 1) * each)
        else:
            each = shape[0] // param.groups if param.head_rows else -(-shape[0] // parts)
            rows = (min(group * each, shape[0]), min((group + 1) * each, shape[0]))
        if rows[0] < rows[1] and cols[0] < cols[1]:
            yield Window(part, rows, cols, below, len(shape) == 1)
        below += rows[1] - rows[0]


def _blocks(param: Param, index: int, parts: int) -> Iterator[tuple[int, int]]:
    """(part, number of its block of rows), from a shard's first row on."""
    mine = param.groups // parts if param.head_rows else 1
    for group in range(index * mine, (index + 1) * mine):
        for part in range(len(param.hf)):
            yield part, group


def shard_shape(param: Param, index: int, parts: int) -> tuple[int, ...]:
    """Shape of slice `index` of `parts`, without padding of the vocabulary."""
    held = list(windows(param, index, parts))
    rows = sum(window.rows[1] - window.rows[0] for window in held)
    return (rows, held[0].cols[1] - held[0].cols[0]) if held and param.tp_axis == 1 else (rows, *param.shape[1:])
