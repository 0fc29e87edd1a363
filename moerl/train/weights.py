"""Weights between a Hugging Face folder, this rank's Megatron parameters, and the shards that are sent to engines.

    folder --load_hf--> parameters of this rank --local_shards--> [Shard(entry, tensor, index, parts)] in canonical order

Both directions rest on one table, `placed`, that finds for every parameter of this rank which `Entry` of the model's
specification it is: it renumbers layers (pipeline stages) and experts (expert parallelism) globally and understands the local
names as well as Transformer Engine's.

A tensor-parallel vocabulary is padded to a multiple of tp: the surplus rows are zero, are masked out of the softmax, and are
cut off in `local_shards`, so that the parts of an entry always concatenate to its full shape.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moerl.errors import ModelError
from moerl.models.names import classify
from moerl.models.shard import Shard, shard_shape, windows
from moerl.models.spec import Entry, ModelSpec
from moerl.train.megatron import Ranks, unwrap

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$")
_SHOWN = 12


@dataclass(frozen=True)
class Placed:
    """One of this rank's tensors and what it is.

    Attributes:
        name: in its chunk.
        tensor: the live parameter or buffer.
        index, parts: which slice along `entry.param.tp_axis`; 0 of 1 when replicated.
    """

    name: str
    tensor: torch.Tensor
    entry: Entry
    index: int
    parts: int


def placed(model: list[torch.nn.Module], spec: ModelSpec, ranks: Ranks) -> list[Placed]:
    """Every weight of this rank, in the specification's canonical order.

    Raises:
        ModelError: a parameter that the specification does not know.
    """
    known: dict[str, tuple[int, Entry]] = {}
    for order, entry in enumerate((*spec.entries(), *spec.mtp_entries())):
        known |= dict.fromkeys(entry.megatron_names, (order, entry))
    found, unknown = [], []
    for chunk in model:
        for name, tensor in _tensors(unwrap(chunk)):
            full = _global_name(name, unwrap(chunk), spec, ranks)
            if full not in known:
                unknown.append(full)
                continue
            order, entry = known[full]
            found.append((order, _place(name, tensor, entry, ranks)))
    if unknown:
        raise ModelError(f"the Megatron model has parameters that the {spec.family} family does not describe: {_some(unknown)}")
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def local_shards(model: list[torch.nn.Module], spec: ModelSpec, ranks: Ranks) -> list[Shard]:
    """This rank's part of the model, in canonical order; tensors are live (in bfloat16 training: what engines must serve).

    The copy of a tied embedding that the last pipeline stage keeps as its output layer is left out.
    """
    return shards_of(placed(model, spec, ranks), spec)


def shards_of(items: list[Placed], spec: ModelSpec) -> list[Shard]:
    """`local_shards` of what `placed` has found."""
    own = (item for item in items if not (spec.tied_embeddings and item.name == "output_layer.weight"))
    return [Shard(item.entry, cut_padding(item, item.tensor.detach()), item.index, item.parts) for item in own]


def cut_padding(item: Placed, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` (shaped like the item's: the weight itself, its gradient) without the rows of vocabulary padding; a view."""
    param = item.entry.param
    return tensor[: shard_shape(param, item.index, item.parts)[0]] if param.is_vocabulary else tensor


def load_hf(model: list[torch.nn.Module], spec: ModelSpec, folder: str | Path, ranks: Ranks, *, mtp: bool = False) -> None:
    """Fill this rank's weights from a Hugging Face folder, reading only this rank's slices.

    An optimizer that exists already must be told with `reload_model_params()`.

    Args:
        mtp: the model has a layer for multi-token prediction, and so must the folder.

    Raises:
        ModelError: files are missing, or names, shapes or types differ; all differences in one message, on every rank alike.
    """
    files = _open_all(Path(folder))
    try:
        _check(files, spec, Path(folder), mtp)
        for item in placed(model, spec, ranks):
            _fill(item, files)
    finally:
        for file in {id(file): file for file in files.values()}.values():
            file.__exit__(None, None, None)


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer


def _global_name(name: str, chunk: torch.nn.Module, spec: ModelSpec, ranks: Ranks) -> str:
    if match := _LAYER.match(name):
        layer = chunk.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{name[match.end() :]}"
    first = ranks.ep[0] * (spec.experts // ranks.ep[1])
    return _EXPERT.sub(lambda match: str(first + int(match[0])), name)


def _place(name: str, tensor: torch.Tensor, entry: Entry, ranks: Ranks) -> Placed:
    param = entry.param
    index, parts = ranks.etp if param.expert else ranks.tp
    if param.tp_axis is None or parts == 1:
        return Placed(name, tensor, entry, 0, 1)
    if (
        tensor.shape[param.tp_axis] == shard_shape(param, 0, 1)[param.tp_axis]
    ):  # Transformer Engine keeps some of these whole on every rank.
        return Placed(name, tensor, entry, 0, 1)
    return Placed(name, tensor, entry, index, parts)


def _fill(item: Placed, files: dict[str, Any]) -> None:
    param, target = item.entry.param, item.tensor.detach()
    if param.is_vocabulary:
        target.zero_()
    for window in windows(param, item.index, item.parts):
        name = item.entry.hf[window.part]
        target[window.in_shard].copy_(files[name].get_slice(name)[window.in_hf])


def _open_all(folder: Path) -> dict[str, Any]:
    """Tensor name -> open safetensors file; only headers are read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{index} lists files that are not there: {_some(missing)}; download the checkpoint again")
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors; expected a Hugging Face checkpoint with weights")
    files: dict[str, Any] = {}
    for path in paths:
        file = safe_open(path, framework="pt").__enter__()
        files |= dict.fromkeys(file.keys(), file)
    return files


def _check(files: dict[str, Any], spec: ModelSpec, folder: Path, mtp: bool) -> None:
    """Compare the folder with the specification: names, shapes, types."""
    expected = {name: entry for entry in (*spec.entries(), *(spec.mtp_entries() if mtp else ())) for name in entry.hf}
    missing = [name for name in expected if name not in files]
    extra = [name for name, known in classify(spec, files).items() if known.role == "unknown" and not _beyond(name, spec)]
    wrong = []
    for name, entry in expected.items():
        if name not in files:
            continue
        view = files[name].get_slice(name)
        shape = entry.param.part_shape(entry.hf.index(name))
        if tuple(view.get_shape()) != shape:
            wrong.append(f"{name}: shape {tuple(view.get_shape())}, expected {shape}")
        elif view.get_dtype() not in ("F32", "BF16", "F16"):
            wrong.append(f"{name}: type {view.get_dtype()}, expected F32, BF16 or F16 (convert quantised checkpoints to bfloat16 first)")
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} tensors are unknown: {_some(extra)}")
    if wrong:
        problems.append(f"{len(wrong)} tensors differ: {_some(wrong)}")
    if problems:
        raise ModelError(f"{folder} does not fit its own config.json ({spec.family}):\n  - " + "\n  - ".join(problems))


def _beyond(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor belongs to a layer behind the decoder's: multi-token prediction, which may be of another model's making."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= spec.layers


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
