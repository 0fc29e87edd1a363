"""Whether a Hugging Face folder and a Megatron checkpoint hold the same model, bit for bit, found out in another way than converting.

    every chunk of the checkpoint --names.runs--> rows of HF tensors --compared--> every HF element met exactly once by each name

Nothing of the conversion is used: names come from a table of their own (`names`), HF tensors are read through safetensors' slices,
chunks are loaded whole by torch, scales are multiplied element by element. The files' checksums are compared with those noted at their
writing. Memory: one chunk of the checkpoint and as many rows of HF tensors, which lie in memory maps.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from moerl.convert.names import Model, parts_of, runs
from moerl.errors import CheckpointError

_SHOWN = 20
_TRAINING = ("optimizer", "chained_", "rng", "opt_param_scheduler")

Box = tuple[int, int, int, int]
"""First and last row, first and last column."""


@dataclass(frozen=True)
class Found:
    """Attributes:
    tensors, elements: of the HF folder, all equal to the checkpoint's.
    rounded: of the tensors, those that are the checkpoint's values rounded to the folder's type. The others are equal bit for bit.
    absent: weights for multi-token prediction in the folder that the checkpoint does not have.
    files: whose checksum is that of their writing.
    """

    tensors: int
    elements: int
    rounded: int
    absent: int
    files: int


@dataclass
class _Comparison:
    """What has been seen so far. `boxes`: of each HF tensor, by Megatron tensor."""

    hf: "_Folder"
    model: Model
    problems: list[str] = field(default_factory=list)
    rounded: set[str] = field(default_factory=set)
    boxes: dict[str, dict[str, list[Box]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


def verify(folder: Path, checkpoint: Path, advance: Callable[[int], None] = lambda count: None) -> Found:
    """Compare; `advance` is told of bytes as they are compared.

    Raises:
        CheckpointError: with what is missing, surplus, met twice, different or damaged.
    """
    config = json.loads((folder / "config.json").read_text())
    seen = _Comparison(_Folder(folder), Model.of(config))
    files = sum(_check_files(place, seen.problems) for place in (folder, checkpoint))
    metadata = FileSystemReader(checkpoint).read_metadata()
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, BytesStorageMetadata) or key.startswith(_TRAINING):
            continue
        for chunk in described.chunks:
            tensor = _load(checkpoint, metadata, key, chunk.offsets)
            if tuple(tensor.shape) != tuple(chunk.sizes):
                seen.problems.append(f"{key}: a chunk of {list(tensor.shape)} where {list(chunk.sizes)} is noted")
                continue
            _compare_chunk(seen, key, tuple(described.size), tuple(chunk.offsets), tensor)
            advance(tensor.nbytes)
    absent = _check_coverage(seen)
    if seen.problems:
        more = len(seen.problems) - _SHOWN
        lines = [f"  - {one}" for one in seen.problems[:_SHOWN]] + ([f"  - and {more} more"] if more > 0 else [])
        raise CheckpointError(f"{folder} and {checkpoint} do not hold the same model:\n" + "\n".join(lines))
    elements = sum(prod(seen.hf.shape(name)) for name in seen.boxes)
    return Found(len(seen.boxes), elements, len(seen.rounded), absent, files)


def _compare_chunk(seen: _Comparison, key: str, size: tuple[int, ...], offset: tuple[int, ...], tensor: torch.Tensor) -> None:
    """Compare a chunk with the HF rows that it should be; experts one by one."""
    if len(size) == 3:
        for number, one in enumerate(tensor):
            _compare_rows(seen, key, offset[0] + number, size[1:], offset[1:], one)
    else:
        _compare_rows(seen, key, None, size, offset, tensor)


def _compare_rows(
    seen: _Comparison, key: str, expert: int | None, size: tuple[int, ...], offset: tuple[int, ...], tensor: torch.Tensor
) -> None:
    parts = parts_of(key, expert, seen.model)
    if parts is None or not all(part in seen.hf.files for part in parts):
        seen.problems.append(f"{key}: surplus, the folder has no {' or '.join(parts) if parts else 'tensor that belongs to it'}")
        return
    rows, columns = size[0], (offset[1], offset[1] + tensor.shape[1]) if len(size) == 2 else (0, 1)
    vocabulary = key in ("embedding.word_embeddings.weight", "output_layer.weight")
    last = offset[0] + tensor.shape[0]
    if vocabulary:  # padded behind its last token
        rows = seen.hf.shape(parts[0])[0]
        last = min(last, rows)
    elif rows != sum(seen.hf.shape(part)[0] for part in parts):
        seen.problems.append(f"{key}: {rows} rows, but {' + '.join(parts)} have others")
        return
    for run in runs(parts, rows, offset[0], last, seen.model):
        held = tensor[run.at - offset[0] : run.at - offset[0] + run.count]
        box = (run.first, run.first + run.count, *columns)
        seen.boxes[run.name][f"{key}/{expert}"].append(box)
        if problem := _difference(seen, run.name, box, held):
            seen.problems.append(f"{key}{f' of expert {expert}' if expert is not None else ''}, {run.name}: {problem}")


def _difference(seen: _Comparison, name: str, box: Box, held: torch.Tensor) -> str | None:
    """How an HF tensor's box differs from what the checkpoint holds."""
    wanted, scales = seen.hf.box(name, box)
    if wanted.shape != held.shape:
        return f"shape {list(wanted.shape)}, the checkpoint has {list(held.shape)}"
    if scales is not None:
        product = (wanted.float() * scales.float()).to(torch.bfloat16)
        if _same_bits(product, held):
            return None
        seen.rounded.add(name)
        far = ~rounded_to_fp8(product, held, scales)
        return f"{int(far.sum())} of {far.numel()} values are no fp8 rounding of the checkpoint's" if bool(far.any()) else None
    if wanted.dtype != held.dtype:
        seen.rounded.add(name)
    if not _same_bits(wanted, held.to(wanted.dtype)):
        return f"{int((wanted != held.to(wanted.dtype)).sum())} of {wanted.numel()} values differ"
    return None


def rounded_to_fp8(product: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Which products of fp8 numbers with their scales, in bfloat16, are the nearest to `values`, up to rounding of the scales: bool.

    Half of the spacing of float8_e4m3fn is 1/16 of a normal number at most, and 2^-10 below those; bfloat16 adds 2^-9 of the product.
    """
    product, values = product.float(), values.float()
    room = torch.maximum(values.abs() / 16, scales.float() * 2**-10) * 1.001 + product.abs() * 2**-8
    return (product - values).abs() <= room  # false where it is not finite


def _check_coverage(seen: _Comparison) -> int:
    """Every HF tensor is met exactly once by each Megatron tensor that it belongs to; how many for multi-token prediction are absent."""
    absent = []
    copies = _copies(seen)
    for name in seen.hf.files:
        if name.endswith((".rotary_emb.inv_freq", ".weight_scale_inv", ".weight_scale")) or name in copies:
            continue
        if name not in seen.boxes:
            ahead = name.startswith(tuple(f"model.layers.{seen.model.layers + more}." for more in range(4)))
            absent.append(name) if ahead else seen.problems.append(f"{name}: missing, the checkpoint has nothing of it")
            continue
        shape = seen.hf.shape(name)
        for key, boxes in seen.boxes[name].items():
            area = sum((last - first) * (right - left) for first, last, left, right in boxes)
            if len(set(boxes)) != len(boxes) or area != prod(shape):
                seen.problems.append(f"{name}: {area} of its {prod(shape)} elements are met in {len(boxes)} pieces by {key.split('/')[0]}")
    if any(name in seen.boxes for name in seen.hf.files if name.startswith(f"model.layers.{seen.model.layers}.")):
        seen.problems += [f"{name}: missing, though the checkpoint has others of its layer" for name in absent]
    for name, of in copies.items():
        _check_copy(seen, name, of)
    return len(absent)


def _copies(seen: _Comparison) -> dict[str, str]:
    """Tensors that the checkpoint has only as others."""
    ahead = f"model.layers.{seen.model.layers}."
    head = "lm_head.weight" if "lm_head.weight" in seen.boxes else "model.embed_tokens.weight"
    pairs = {
        "lm_head.weight": "model.embed_tokens.weight",
        ahead + "embed_tokens.weight": "model.embed_tokens.weight",
        ahead + "shared_head.head.weight": head,
    }
    return {name: of for name, of in pairs.items() if name in seen.hf.files and name not in seen.boxes}


def _check_copy(seen: _Comparison, name: str, of: str) -> None:
    rows, columns = seen.hf.shape(of)
    if seen.hf.shape(name) != (rows, columns):
        seen.problems.append(f"{name}: shape {list(seen.hf.shape(name))}, but it repeats {of}, {[rows, columns]}")
        return
    for first in range(0, rows, 4096):
        box = (first, min(first + 4096, rows), 0, columns)
        if problem := _difference(seen, name, box, seen.hf.box(of, box)[0]):
            seen.problems.append(f"{name}: repeats {of}, but {problem}")
            return


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _load(checkpoint: Path, metadata: Metadata, key: str, offset: torch.Size) -> torch.Tensor:
    place = metadata.storage_data[MetadataIndex(key, offset)]
    try:
        with (checkpoint / place.relative_path).open("rb") as file:
            return torch.load(_create_file_view(file, place.offset, place.length), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint / place.relative_path}: {key} cannot be read: {error}") from error


class _Folder:
    """An HF folder's tensors, through safetensors. `files`: tensor -> its file."""

    def __init__(self, folder: Path):
        self.files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - no mapping
                self.files[name] = file
                self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def box(self, name: str, box: Box) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values as stored, the scale of each value or None)"""
        first, last, left, right = box
        whole = self.files[name].get_slice(name)
        if len(self.shape(name)) == 1:
            return whole[first:last], None
        values = whole[first:last, left:right]
        for suffix in ("_scale_inv", "_scale"):
            if name + suffix in self.files:
                return values, self._scales(name, name + suffix, box)
        return values, None

    def _scales(self, name: str, of: str, box: Box) -> torch.Tensor:
        first, last, left, right = box
        scales = self.files[of].get_tensor(of)
        if of.endswith("_scale"):
            return scales.view(-1, 1)[first:last].expand(last - first, right - left)
        rows, columns = (self._edge(size, count) for size, count in zip(self.shape(name), scales.shape, strict=True))
        whole = scales.repeat_interleave(columns, 1)[:, left:right]
        numbers = torch.arange(first, last) // rows
        return whole[numbers]

    def _edge(self, size: int, count: int) -> int:
        """Of blocks along one axis: published checkpoints have 128; smaller powers of two occur in tests' models."""
        return next(edge for edge in (128, 64, 32, 16, 8, 4, 2, 1) if -(-size // edge) == count)


def _check_files(folder: Path, problems: list[str]) -> int:
    """Compare the files' checksums with the folder's own record, if it has one; how many were compared."""
    record = folder / "conversion.json"
    if not record.is_file():
        return 0
    noted = json.loads(record.read_text())["files"]
    for name, one in noted.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != one["nbytes"] or _checksum(path) != one["xxh3_64"]:
            problems.append(f"{path}: {'damaged since it was written' if path.is_file() else 'missing'}")
    return len(noted)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
