"""A Megatron distributed checkpoint as it lies on disk: its global tensors, and any box of one on demand.

    checkpoint --open_checkpoint--> Checkpoint --read_box--> a box, put together from the chunks that overlap it

Any layout of chunks will do, so checkpoints of trainers are read like converted ones. Where a box is a chunk, as in converted ones, it is
the tensor as it was read; torch's own `FileSystemReader.read_data` would copy it twice more. Megatron is not imported.
"""

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moerl.convert.saved import Place, load_tensor, locate
from moerl.errors import CheckpointError

_TRAINING = ("optimizer", "chained_", "rng", "opt_param_scheduler")
"""First words of what a trainer stores besides the model."""


@dataclass(frozen=True)
class Checkpoint:
    """Attributes:
    tensors: name -> shape, type and chunks of every tensor of the model.
    largest: name -> elements of its largest chunk.
    by_expert: name and first index -> the chunks that hold it, of tensors with three axes.
    places: name and offset of a chunk -> where its elements are, of those that were looked at; None if only torch can read it.
    """

    folder: Path
    metadata: Metadata
    tensors: Mapping[str, TensorStorageMetadata]
    largest: Mapping[str, int] = field(repr=False)
    by_expert: Mapping[tuple[str, int], list[ChunkStorageMetadata]] = field(repr=False)
    places: dict[tuple[str, torch.Size], Place | None] = field(default_factory=dict, repr=False)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the description of a checkpoint.

    Raises:
        CheckpointError: it is none, or one of another format.
    """
    stated = folder / "metadata.json"
    if not stated.is_file() or not (folder / ".metadata").is_file():
        names = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder} is no Megatron distributed checkpoint: expected metadata.json and .metadata, found {names}")
    backend = json.loads(stated.read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is a checkpoint of format {backend!r}; only torch_dist can be read")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{folder}/.metadata is damaged: {error}") from error
    tensors = {
        key: one
        for key, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata) and not key.startswith(_TRAINING)
    }
    by_expert = defaultdict(list)
    for key, one in tensors.items():
        for chunk in one.chunks if len(one.size) == 3 else ():
            for expert in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                by_expert[key, expert].append(chunk)
    largest = {key: max(prod(chunk.sizes) for chunk in one.chunks) for key, one in tensors.items()}
    return Checkpoint(folder, metadata, tensors, largest, dict(by_expert))


def read_box(checkpoint: Checkpoint, key: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, in the type it is stored in.

    Raises:
        CheckpointError: chunks do not fill the box, or a file cannot be read.
    """
    described = checkpoint.tensors[key]
    near = _near(checkpoint, key, offset[0] if offset else 0)
    wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    items = create_read_items_for_chunk_list(key, TensorStorageMetadata(described.properties, described.size, near), [wanted])
    if sum(prod(item.lengths) for item in items) != prod(sizes):
        raise CheckpointError(f"{checkpoint.folder}: the chunks of {key} do not make up {list(sizes)} at {list(offset)}; it is incomplete")
    box = torch.empty(tuple(sizes), dtype=described.properties.dtype)
    for item in items:
        part = _load(checkpoint, key, item.storage_index.offset, item.storage_offsets, item.lengths)
        if part.shape == box.shape:
            return part  # the usual case, without a copy
        box[_span(item.dest_offsets, item.lengths)] = part
    return box


def can_be_cut(checkpoint: Checkpoint, key: str, first: int) -> bool:
    """Whether boxes of a tensor, with `first` on its first axis where it has three, are read without reading more than them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    offsets = (chunk.offsets for chunk in _near(checkpoint, key, first))
    return all(_place(checkpoint, key, offset) is not None for offset in offsets)


def _near(checkpoint: Checkpoint, key: str, first: int) -> Sequence[ChunkStorageMetadata]:
    """The chunks that may overlap boxes which begin with `first`."""
    described = checkpoint.tensors[key]
    return checkpoint.by_expert.get((key, first), []) if len(described.size) == 3 else described.chunks


def _load(checkpoint: Checkpoint, key: str, offset: torch.Size, inside: torch.Size, lengths: torch.Size) -> torch.Tensor:
    """A box of the chunk at `offset`: `lengths` elements from `inside` on."""
    place = _place(checkpoint, key, offset)
    if place is None or (first := _contiguous(place.shape, inside, lengths)) is None:
        return _read(checkpoint, key, offset, load_tensor)[_span(inside, lengths)]
    return _read(checkpoint, key, offset, lambda *_: place.read(first, tuple(lengths)))


def _place(checkpoint: Checkpoint, key: str, offset: torch.Size) -> Place | None:
    """Where the elements of the chunk at `offset` are."""
    if (key, offset) not in checkpoint.places:
        checkpoint.places[key, offset] = _read(checkpoint, key, offset, locate)
    return checkpoint.places[key, offset]


def _contiguous(shape: Sequence[int], inside: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Number of a box's first element if all of them lie one after another in a tensor of this shape, else None."""
    cut = next((axis for axis, length in enumerate(lengths) if length != 1), len(lengths))  # the only axis that may be cut
    if tuple(lengths[cut + 1 :]) != tuple(shape[cut + 1 :]):
        return None
    return sum(at * prod(shape[axis + 1 :]) for axis, at in enumerate(inside))


def _read[T](checkpoint: Checkpoint, key: str, offset: torch.Size, read: Callable[[Path, int, int], T]) -> T:
    """Of the chunk at `offset`, what `read` makes of (file, first byte, bytes)."""
    place = checkpoint.metadata.storage_data[MetadataIndex(key, offset)]
    path = checkpoint.folder / place.relative_path
    try:
        return read(path, place.offset, place.length)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path}: {key} at {list(offset)} cannot be read: {error}") from error


def _span(first: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(one, one + length) for one, length in zip(first, lengths, strict=True))
