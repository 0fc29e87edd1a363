"""A Hugging Face folder -> a Megatron distributed checkpoint ("torch_dist"), which any layout of ranks can load.

    survey --plan--> files of chunks --jobs.run--> __0_0.distcp, ... --finish--> .metadata, metadata.json, huggingface/, conversion.json

The files are those that `megatron.core.dist_checkpointing` writes: torch's distributed checkpoint format, with Megatron's names, an empty
state beside each linear layer, and a common state. Values stay in the type they are stored in, except that quantised ones become bfloat16.

Memory: each worker holds one chunk at a time, of at most `chunk_elements`, besides the parts of a grouped-query attention, which are one.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from moerl.convert import jobs
from moerl.convert.carry import CARRIED, RECORD, carry, without_mtp
from moerl.convert.copies import check_copies
from moerl.convert.jobs import Job, Output, Written
from moerl.convert.layout import Chunk, chunks, extra_state, keys
from moerl.convert.limits import Limits
from moerl.convert.quantised import fill
from moerl.convert.survey import Survey
from moerl.errors import ModelError

COMMON_STATE = "common_state/shard_0_1"


@dataclass(frozen=True)
class Plan:
    """Attributes:
    files: the chunks of each output file.
    states: names of the empty states, which lie in the last file.
    """

    files: tuple[tuple[Chunk, ...], ...]
    states: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [f"__{number}_0.distcp" for number in range(len(self.files))]


def plan(found: Survey, limits: Limits) -> Plan:
    """Spread the chunks over files, in the order of the model.

    Raises:
        ModelError: HF tensors that one weight is made of are stored in different types.
    """
    files: list[list[Chunk]] = [[]]
    states, mixed, size = [], [], 0
    for entry in found.entries():
        types = {found.weights[name].dtype for name in entry.hf}
        if len(types) > 1:
            mixed.append(f"{', '.join(entry.hf)}: {', '.join(sorted(map(str, types)))}")
        for chunk in chunks(entry, found.spec, limits.chunk_elements):
            nbytes = chunk_bytes(found, chunk)
            if files[-1] and size + nbytes > limits.file_bytes:
                files.append([])
                size = 0
            files[-1].append(chunk)
            size += nbytes
        if state := extra_state(entry, found.spec):
            states.append(state)
    if mixed:
        raise ModelError("tensors that Megatron holds as one are stored in different types:\n" + "\n".join(f"  - {one}" for one in mixed))
    return Plan(tuple(map(tuple, files)), tuple(states))


def convert(found: Survey, final: Path, limits: Limits, advance: Callable[[int], None] = lambda count: None) -> list[Written]:
    """Convert a surveyed folder to `final`, or go on where a conversion of it was interrupted.

    Raises:
        CheckpointError, ModelError: see `jobs`, `plan` and `check_copies`.
    """
    planned = plan(found, limits)
    folder = jobs.prepare(final, purpose(found, limits))
    check_copies(found, limits.chunk_elements)
    todo = [
        Job(name, sum(chunk_bytes(found, chunk) for chunk in held), partial(_write, found, held, planned.states if last else ()))
        for name, held, last in zip(planned.names, planned.files, _lasts(planned.files), strict=True)
    ]
    written = jobs.run(folder, todo, limits.workers, advance)
    _finish(found, planned, folder, written)
    jobs.publish(folder, final)
    return written


def chunk_bytes(found: Survey, chunk: Chunk) -> int:
    return chunk.elements * found.weights[chunk.pieces[0].name].dtype.itemsize * len(keys(chunk.entry))


def purpose(found: Survey, limits: Limits) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to go on."""
    stats = {path: path.stat() for path in sorted({one.path for one in found.stored.values()})}
    return {
        "direction": "hf-to-megatron",
        "source": str(found.folder.resolve()),
        "config": found.spec.hf_config,
        "files": {path.name: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()},
        "mtp": found.mtp,
        "limits": {"chunk_elements": limits.chunk_elements, "file_bytes": limits.file_bytes},
    }


def read_chunk(found: Survey, chunk: Chunk) -> torch.Tensor:
    """The chunk's values, in its shape in the checkpoint."""
    tensor = torch.empty(chunk.held, dtype=found.weights[chunk.pieces[0].name].dtype)
    for piece in chunk.pieces:
        first, last = piece.rows
        fill(found.weights[piece.name], first, last, tensor[piece.at : piece.at + last - first])
    return tensor.view(chunk.sizes)


def _lasts(files: Sequence[Any]) -> Iterator[bool]:
    return (number == len(files) - 1 for number in range(len(files)))


def _write(found: Survey, held: Sequence[Chunk], states: Sequence[str], output: Output) -> list[list[int]]:
    """Write the chunks, each under all its names, then the states; [offset, bytes] of each in this order."""
    places = []

    def put(write: Callable[[], object]) -> None:
        start = output.tell()
        write()
        places.append([start, output.tell() - start])

    for chunk in held:
        tensor = read_chunk(found, chunk)
        for _ in keys(chunk.entry):
            put(partial(torch.save, tensor, output))
    for content in chain((_pickled([None]) for _ in states), (_pickled([_common_state()]),) if states else ()):
        put(partial(output.write, content))
    return places


def _common_state() -> dict[str, Any]:
    """What Megatron keeps beside tensors: how the names of this checkpoint are to be understood."""
    return {"checkpoint_version": 3.0, "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False}}


def _pickled(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _finish(found: Survey, planned: Plan, folder: Path, written: Sequence[Written]) -> None:
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for name, held, last, one in zip(planned.names, planned.files, _lasts(planned.files), written, strict=True):
        places = iter(one.result)
        for chunk in held:
            for key in keys(chunk.entry):
                results.append(_placed(_tensor_index(found, tensors, key, chunk), name, *next(places)))
        for state in (*planned.states, COMMON_STATE) if last else ():
            tensors[state] = BytesStorageMetadata()
            results.append(_placed(MetadataIndex(state), name, *next(places)))
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=tensors), [results])
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    config = without_mtp(found.spec.hf_config) if found.mtp == "drop" else found.spec.hf_config
    carried = carry(found.folder, folder / CARRIED, config)
    record = {
        "source": str(found.folder),
        "family": found.spec.family,
        "mtp": found.mtp,
        "tensors": dict(found.counts),
        "copies": found.copies,
        "ignored": [name for name, known in found.known.items() if known.role == "ignorable"],
        "carried": carried,
        "files": {one.name: {"nbytes": one.nbytes, "xxh3_64": one.checksum} for one in written},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2))
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".distcp":
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _tensor_index(found: Survey, tensors: dict[str, Any], key: str, chunk: Chunk) -> MetadataIndex:
    """Note the chunk in the description of its tensor; how it is found there."""
    if key not in tensors:
        dtype = found.weights[chunk.pieces[0].name].dtype
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(chunk.shape), [])
    known = tensors[key].chunks
    known.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)))
    return MetadataIndex(key, chunk.offset, len(known) - 1)


def _placed(index: MetadataIndex, name: str, offset: int, length: int) -> WriteResult:
    return WriteResult(index, length, _StorageInfo(name, offset, length))
