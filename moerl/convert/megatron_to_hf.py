"""A Megatron distributed checkpoint -> a Hugging Face folder.

    open_checkpoint, the HF config --plan--> files of Target --jobs.run--> model-*.safetensors --finish--> index, config, tokenizer

A target is one HF tensor: a part of a weight, a copy of one, or a quantised weight with its scales behind it. Files are written from
their first byte to their last, rows as they are read: some at a time, or at most one chunk of the checkpoint, and all parts of a
grouped-query attention.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from moerl.convert import jobs
from moerl.convert.carry import CARRIED, RECORD, carry, config_for, same_model, without_mtp
from moerl.convert.folder import INDEX, NAMES, some
from moerl.convert.jobs import Job, Output, Written
from moerl.convert.layout import BLOCK_ROWS, chunks, extra_state, global_shape, keys
from moerl.convert.limits import Limits
from moerl.convert.quantised import weight_block
from moerl.convert.stored import Checkpoint, can_be_cut, open_checkpoint, read_box
from moerl.convert.survey import Mtp
from moerl.errors import CheckpointError
from moerl.models import Entry, ModelSpec
from moerl.numerics.fp8 import Block, quantise_blocks

Format = Literal["keep", "bfloat16", "float32", "fp8"]
_STRIP_ELEMENTS = 1 << 22
"""Elements that are quantised together, roughly."""
_READ_ELEMENTS = 1 << 21
"""Elements that are read together, roughly: few enough to be still in a cache when they are written."""


@dataclass(frozen=True)
class Target:
    """One HF tensor to write.

    Attributes:
        part: which of `entry.hf` it holds.
        key: where the entry is in the checkpoint.
        block: of a quantised weight, whose scales follow it; None otherwise.
    """

    name: str
    entry: Entry
    part: int
    key: str
    dtype: torch.dtype
    block: Block | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.param.part_shape(self.part)

    @property
    def stored(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, type, shape) of what is written, in order."""
        if self.block is None:
            return [(self.name, self.dtype, self.shape)]
        scales = tuple(-(-size // edge) for size, edge in zip(self.shape, self.block, strict=True))
        return [(self.name, torch.float8_e4m3fn, self.shape), (self.name + "_scale_inv", torch.float32, scales)]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self.stored)


@dataclass(frozen=True)
class Plan:
    """Attributes:
    source: HF folder that config and tokenizer are taken from.
    config: the written config.json.
    dtype: as asked for.
    mtp: whether the weights for multi-token prediction are written.
    """

    checkpoint: Checkpoint
    source: Path
    spec: ModelSpec
    config: dict[str, Any]
    dtype: Format
    mtp: bool
    targets: tuple[Target, ...]
    limits: Limits

    @property
    def files(self) -> dict[str, tuple[Target, ...]]:
        """File name -> what it holds."""
        held: list[list[Target]] = [[]]
        size = 0
        for target in self.targets:
            if held[-1] and size + target.nbytes > self.limits.file_bytes:
                held.append([])
                size = 0
            held[-1].append(target)
            size += target.nbytes
        if len(held) == 1:
            return {"model.safetensors": tuple(held[0])}
        return {f"model-{number + 1:05d}-of-{len(held):05d}.safetensors": tuple(one) for number, one in enumerate(held)}


def plan(source: Path, hf_config: Path | None, *, dtype: Format, mtp: Mtp, sizes: Callable[[int], Limits]) -> Plan:
    """Decide what is written, after comparing the checkpoint with the config.

    Args:
        hf_config: HF folder of the model; None: what the checkpoint carries.
        sizes: from the bytes to write.

    Raises:
        CheckpointError: with all weights that are missing, surplus or misshapen, or all fields that differ. ModelError: no config.
    """
    checkpoint = open_checkpoint(source)
    if hf_config is None and not (source / CARRIED / "config.json").is_file():
        raise CheckpointError(f"{source} carries no Hugging Face config; give the model's folder with --hf-config")
    folder = hf_config or source / CARRIED
    spec = same_model(source, folder)
    converted = (source / RECORD).is_file()
    record = json.loads((source / RECORD).read_text()) if converted else {"mtp": "unknown", "copies": spec.mtp_copies()}
    ahead = list(spec.mtp_entries())
    has_ahead = any(key in checkpoint.tensors for entry in ahead for key in keys(entry))
    if ahead and mtp == "keep" and not has_ahead and record["mtp"] != "absent":
        raise CheckpointError(
            f"{source} has no weights for multi-token prediction, which {folder}/config.json announces; with --mtp drop the folder "
            "is written without them"
        )
    writes_ahead = has_ahead and mtp == "keep"
    located = _locate(checkpoint, spec, [*spec.entries(), *(ahead if writes_ahead else ())], drops=mtp == "drop")
    copies = {name: of for name, of in record["copies"].items() if writes_ahead or name not in spec.mtp_copies()}
    block = _block(spec) if dtype == "fp8" else None
    targets = tuple(_targets(checkpoint, located, copies, dtype, block, spec))
    most: Counter[torch.dtype] = Counter()
    for target in targets:
        most[target.dtype] += target.nbytes
    config = spec.hf_config if writes_ahead or mtp == "keep" else without_mtp(spec.hf_config)
    config = config_for(config, str(most.most_common(1)[0][0]).removeprefix("torch."), block)
    return Plan(checkpoint, folder, spec, config, dtype, writes_ahead, targets, sizes(sum(target.nbytes for target in targets)))


def convert(planned: Plan, final: Path, advance: Callable[[int], None] = lambda count: None) -> list[Written]:
    """Write a planned folder to `final`, or go on where that was interrupted.

    Raises:
        CheckpointError: see `jobs`; a chunk cannot be read; a value that is to be quantised is not finite.
    """
    folder = jobs.prepare(final, purpose(planned))
    files = planned.files
    todo = [Job(name, sum(one.nbytes for one in held), partial(_write, planned, held)) for name, held in files.items()]
    written = jobs.run(folder, todo, planned.limits.workers, advance)
    if len(files) > 1:
        placed = {stored[0]: name for name, held in files.items() for target in held for stored in target.stored}
        index = {"metadata": {"total_size": sum(target.nbytes for target in planned.targets)}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    carried = carry(planned.source, folder, planned.config)
    record = {
        "source": str(planned.checkpoint.folder),
        "family": planned.spec.family,
        "mtp": "keep" if planned.mtp else "none",
        "tensors": len(planned.targets),
        "carried": carried,
        "files": {one.name: {"nbytes": one.nbytes, "xxh3_64": one.checksum} for one in written},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2))
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            with path.open("rb") as file:
                os.fsync(file.fileno())
    jobs.publish(folder, final)
    return written


def purpose(planned: Plan) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to go on."""
    described = planned.checkpoint.folder / ".metadata"
    return {
        "direction": "megatron-to-hf",
        "source": str(planned.checkpoint.folder.resolve()),
        "described": [described.stat().st_size, described.stat().st_mtime_ns, jobs.checksum(described)],
        "config": planned.config,
        "dtype": planned.dtype,
        "mtp": planned.mtp,
        "limits": {"chunk_elements": planned.limits.chunk_elements, "file_bytes": planned.limits.file_bytes},
    }


def _block(spec: ModelSpec) -> Block:
    block = weight_block(spec.hf_config) or (BLOCK_ROWS, BLOCK_ROWS)
    if BLOCK_ROWS % block[0]:
        raise CheckpointError(
            f"config.json asks for blocks of {list(block)}; blocks of rows that don't divide {BLOCK_ROWS} cannot be written"
        )
    return block


def _locate(checkpoint: Checkpoint, spec: ModelSpec, entries: Sequence[Entry], *, drops: bool) -> dict[Entry, str]:
    """Entry -> the name it has here."""
    located, problems, missing = {}, [], []
    known = {key for entry in (*entries, *spec.mtp_entries()) for key in keys(entry)}
    for entry in entries:
        names = [key for key in keys(entry) if key in checkpoint.tensors]
        if not names:
            missing.append(keys(entry)[0])
            continue
        located[entry] = names[0]
        size, expected = tuple(checkpoint.tensors[names[0]].size), global_shape(entry, spec)
        padded = entry.param.is_vocabulary and len(size) == 2 and size[0] > expected[0] and size[1] == expected[1]
        if size != expected and not padded and entry.expert in (None, 0):
            problems.append(f"{names[0]}: shape {list(size)}, expected {list(expected)}")
    missing = list(dict.fromkeys(missing))
    surplus = [key for key in checkpoint.tensors if key not in known and not (drops and key.startswith("mtp."))]
    problems += [f"{len(missing)} tensors are missing: {some(missing)}"] if missing else []
    problems += [f"{len(surplus)} tensors are unknown: {some(surplus)}"] if surplus else []
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit the config ({spec.family}):\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    return located


def _targets(
    checkpoint: Checkpoint, located: Mapping[Entry, str], copies: Mapping[str, str], dtype: Format, block: Block | None, spec: ModelSpec
) -> Iterator[Target]:
    published = spec.hf_config["quantization_config"] if weight_block(spec.hf_config) else {}
    unquantised = tuple(published.get("modules_to_not_convert") or ())
    for entry, key in located.items():
        stored = checkpoint.tensors[key].properties.dtype
        plain = stored if dtype == "keep" or entry.param.fp32 else torch.float32 if dtype == "float32" else torch.bfloat16
        linear = extra_state(entry, spec) is not None and not key.endswith("eh_proj.weight")
        for part, name in enumerate(entry.hf):
            excepted = any(name == f"{module}.weight" or name.startswith(f"{module}.") for module in unquantised)
            yield Target(name, entry, part, key, plain, block if linear and not excepted else None)
            for copy, of in copies.items():
                if of == name:
                    yield Target(copy, entry, part, key, plain)


def _write(planned: Plan, held: Sequence[Target], output: Output) -> None:
    """One safetensors file: the length of its header, the header, all values."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in (one for target in held for one in target.stored):
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    output.write(len(text).to_bytes(8, "little"))
    output.write(text)
    parts: dict[str, torch.Tensor] = {}
    for target in held:
        if target.entry.param.head_rows and target.name not in parts:
            parts = _separate(planned, target)
        blocks = [parts[target.name]] if target.entry.param.head_rows else _rows(planned, target)
        scales = []
        for rows in blocks:
            if target.block is None:
                output.write(_bytes(rows.to(target.dtype)))
            else:
                scales += _write_quantised(target, rows, output)
        if target.block is not None:
            output.write(_bytes(torch.cat(scales)))


def _rows(planned: Plan, target: Target) -> Iterator[torch.Tensor]:
    """The rows of a target in order, some at a time: few, or at least as many as one chunk of the checkpoint holds if that must be."""
    limit = min(planned.limits.chunk_elements, _READ_ELEMENTS)
    if not can_be_cut(planned.checkpoint, target.key, target.entry.expert or 0):
        limit = max(planned.limits.chunk_elements, planned.checkpoint.largest[target.key])
    for chunk in chunks(target.entry, planned.spec, limit):
        if chunk.pieces[0].name == target.entry.hf[target.part]:
            yield read_box(planned.checkpoint, target.key, chunk.offset, chunk.sizes).view(chunk.held)


def _separate(planned: Plan, target: Target) -> dict[str, torch.Tensor]:
    """All parts of a grouped-query attention by name."""
    param, (chunk,) = target.entry.param, chunks(target.entry, planned.spec, 0)
    box = read_box(planned.checkpoint, target.key, chunk.offset, chunk.sizes)
    parts = {name: torch.empty(param.part_shape(part), dtype=box.dtype) for part, name in enumerate(target.entry.hf)}
    for piece in chunk.pieces:
        first, last = piece.rows
        parts[piece.name][first:last] = box[piece.at : piece.at + last - first]
    return parts


def _write_quantised(target: Target, rows: torch.Tensor, output: Output) -> list[torch.Tensor]:
    """Write rows that start with a block's first as fp8; their scales."""
    if not bool(torch.isfinite(rows).all()):
        raise CheckpointError(f"{target.key}: a value is not finite, so its block cannot be quantised; write another --dtype")
    step = max(_STRIP_ELEMENTS // rows.shape[1] // target.block[0], 1) * target.block[0]
    scales = []
    for strip in rows.split(step):
        values, scale = quantise_blocks(strip, target.block)
        output.write(_bytes(values))
        scales.append(scale)
    return scales


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
