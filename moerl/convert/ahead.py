"""The layer for multi-token prediction of a model that was trained without it: its tensors as a folder or a checkpoint has them.

    HF folder or Megatron checkpoint --find--> Ahead --tensors--> (name, tensor), copies of the embedding and output layer left out

Those copies are no weights of the layer: they repeat what training changes, so whoever writes a folder repeats them anew (`repeated`).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from moerl.convert.carry import RECORD
from moerl.convert.folder import Stored, read_folder
from moerl.convert.layout import chunks, keys
from moerl.convert.stored import Checkpoint, open_checkpoint, read_box
from moerl.models import Entry, ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Ahead:
    """What one folder or checkpoint holds behind the decoder's layers.

    Attributes:
        copies: HF tensors of it that repeat another one -> that one.
        missing: HF tensors that config.json announces and it lacks, copies excepted.
        held: where its tensors are: HF name -> place in a folder, or the entries that a checkpoint has.
    """

    spec: ModelSpec
    copies: Mapping[str, str]
    missing: tuple[str, ...]
    held: Mapping[str, Stored] | tuple[Checkpoint, tuple[Entry, ...]]

    @property
    def is_empty(self) -> bool:
        """Whether it holds no weight of such a layer."""
        return not (self.held if isinstance(self.held, Mapping) else self.held[1])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of it but copies, in the stored types."""
        return _of_folder(self.held) if isinstance(self.held, Mapping) else _of_checkpoint(*self.held, self.spec)


def find(origin: Path, spec: ModelSpec) -> Ahead:
    """Look at an HF folder or a Megatron checkpoint, without reading weights. Of a folder all layers behind the decoder's count, whatever
    its config announces.

    Raises:
        ModelError, CheckpointError: it is damaged, or neither.
    """
    announced = [name for entry in spec.mtp_entries() for name in entry.hf]
    if (origin / "metadata.json").is_file():
        checkpoint, copies = open_checkpoint(origin), spec.mtp_copies()
        entries = tuple(entry for entry in spec.mtp_entries() if _key(entry, checkpoint))
        if (origin / RECORD).is_file():
            recorded = json.loads((origin / RECORD).read_text())["copies"]
            copies = {name: of for name, of in copies.items() if name in recorded}
        found = {name for entry in entries for name in entry.hf}
        return Ahead(spec, copies if entries else {}, tuple(name for name in announced if name not in found), (checkpoint, entries))
    stored = read_folder(origin)
    copies = {name: of for name, of in spec.mtp_copies().items() if name in stored}
    repeats = {name + scale for name in copies for scale in ("", "_scale_inv", "_scale")}
    held = {name: one for name, one in stored.items() if _is_behind(name, spec) and name not in repeats}
    return Ahead(spec, copies if held else {}, tuple(name for name in announced if name not in held), held)


def repeated(tensors: Iterable[tuple[str, torch.Tensor]], copies: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream, with each copy behind what it repeats."""
    for name, tensor in tensors:
        yield name, tensor
        for copy, of in copies.items():
            if of == name:
                yield copy, tensor


def _is_behind(name: str, spec: ModelSpec) -> bool:
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= spec.layers


def _key(entry: Entry, checkpoint: Checkpoint) -> str | None:
    return next((key for key in keys(entry) if key in checkpoint.tensors), None)


def _of_folder(held: Mapping[str, Stored]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in dict.fromkeys(one.path for one in held.values()):
        with safe_open(path, framework="pt") as file:
            for name in (name for name, one in held.items() if one.path == path):
                yield name, file.get_tensor(name)


def _of_checkpoint(checkpoint: Checkpoint, entries: Iterable[Entry], spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in entries:
        key = _key(entry, checkpoint)
        dtype = checkpoint.tensors[key].properties.dtype
        parts = {name: torch.empty(entry.param.part_shape(part), dtype=dtype) for part, name in enumerate(entry.hf)}
        for chunk in chunks(entry, spec, checkpoint.largest[key]):
            box = read_box(checkpoint, key, chunk.offset, chunk.sizes).view(chunk.held)
            for piece in chunk.pieces:
                first, last = piece.rows
                parts[piece.name][first:last] = box[piece.at : piece.at + last - first]
        yield from parts.items()
