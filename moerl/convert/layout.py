"""Which global tensors a Megatron checkpoint of a model has, and which rows of which HF tensors lie where in them.

    Entry --keys, global_shape--> names and shape in the checkpoint --chunks--> boxes, each filled from rows of HF tensors

Megatron stores each weight as one tensor of the whole model, whatever the layout of the ranks: experts as [expert, rows, columns], gate
above up, the parts of grouped-query attention interleaved per key-value head. A chunk is a box of such a tensor, stored and read in one
piece; here it holds one HF tensor, or a range of its rows where it is large, or all parts of a grouped-query attention.

Megatron's own layers and Transformer Engine's have different names for some norms, which Transformer Engine fuses into the linear after
them. Those vectors are stored under every name, so that both kinds of layers find theirs. Nothing here imports torch or Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from moerl.models import Entry, ModelSpec
from moerl.models.shard import shard_shape, windows

BLOCK_ROWS = 128
"""Rows are cut at multiples of it, so that no cut goes through a block of a block-quantised weight."""


@dataclass(frozen=True)
class Piece:
    """Rows of one HF tensor inside a chunk.

    Attributes:
        rows: (first, one past the last) in the HF tensor.
        at: the first one's number in the chunk.
    """

    name: str
    rows: tuple[int, int]
    at: int


@dataclass(frozen=True)
class Chunk:
    """A box of the global tensors that an entry is stored as.

    Attributes:
        shape: of the global tensor.
        offset, sizes: of the box in it.
        pieces: what fills the box; together every row of it.
    """

    entry: Entry
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the box without the expert axis."""
        return self.sizes[1:] if self.entry.param.expert else self.sizes


def keys(entry: Entry) -> tuple[str, ...]:
    """Names of the entry in a checkpoint; each holds all of it. Only norms have several."""
    names = entry.megatron_names if len(entry.param.shape) == 1 else (entry.megatron,)
    return tuple(dict.fromkeys(_checkpoint_name(name, entry.expert) for name in names))


def extra_state(entry: Entry, spec: ModelSpec) -> str | None:
    """Name of the (empty) state that Megatron's linear layers save beside their weight; None for what isn't one."""
    module, _, leaf = keys(entry)[0].rpartition(".")
    last = module.rpartition(".")[2]
    if leaf != "weight" or not (last.startswith("linear_") or last == "eh_proj") or len(entry.param.shape) != 2:
        return None
    return f"{module}._extra_state/shard_" + (f"{entry.expert}_{spec.experts}" if entry.param.expert else "0_1")


def global_shape(entry: Entry, spec: ModelSpec) -> tuple[int, ...]:
    """Shape of the entry's tensor in a checkpoint, without padding of the vocabulary."""
    whole = shard_shape(entry.param, 0, 1)
    return (spec.experts, *whole) if entry.param.expert else whole


def chunks(entry: Entry, spec: ModelSpec, limit: int) -> Iterator[Chunk]:
    """The boxes of an entry, in the order of their rows.

    Args:
        limit: elements of a box, at most, where its rows may be cut.
    """
    param, shape = entry.param, global_shape(entry, spec)
    held = list(windows(param, 0, 1))
    if param.head_rows:
        yield _chunk(entry, shape, 0, tuple(Piece(entry.hf[one.part], one.rows, one.at) for one in held))
        return
    for one in held:
        first, last = one.rows
        step = max(limit // prod(shape[(2 if param.expert else 1) :]) // BLOCK_ROWS, 1) * BLOCK_ROWS
        for row in range(first, last, step):
            end = min(row + step, last)
            yield _chunk(entry, shape, one.at + row - first, (Piece(entry.hf[one.part], (row, end), 0),))


def _chunk(entry: Entry, shape: tuple[int, ...], at: int, pieces: tuple[Piece, ...]) -> Chunk:
    rows = sum(last - first for first, last in (piece.rows for piece in pieces))
    columns = shape[2:] if entry.param.expert else shape[1:]
    lead = (entry.expert,) if entry.param.expert else ()
    return Chunk(entry, shape, (*lead, at, *(0 for _ in columns)), (*(1 for _ in lead), rows, *columns), pieces)


def _checkpoint_name(name: str, expert: int | None) -> str:
    """A module's name for a weight -> the checkpoint's: experts are stacked, and MTP's decoder layer has an older name."""
    if expert is not None:
        name = name.replace(f".experts.local_experts.{expert}.", ".experts.experts.")
    return name.replace(".mtp_model_layer.", ".transformer_layer.")
