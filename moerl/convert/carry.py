"""What goes along with the weights: config, tokenizer, chat template, generation settings; and whether two configs mean one model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.convert.folder import INDEX
from moerl.errors import CheckpointError
from moerl.models import ModelSpec, read_spec

CARRIED = "huggingface"
"""Folder inside a converted checkpoint."""
RECORD = "conversion.json"
"""What was converted from what, inside every converted folder."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")
_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
_IGNORED = ("torch_dtype", "dtype", "quantization_config", "transformers_version", "_name_or_path", "use_cache", *_MTP_FIELDS)
"""Fields of config.json that say nothing of the values of the weights."""


def carry(source: Path, target: Path, config: dict[str, Any]) -> list[str]:
    """Copy every file of `source` that holds no weights to `target`, which is made if missing; config.json as given.

    Returns:
        Their names.
    """
    target.mkdir(exist_ok=True)
    names = ["config.json"]
    original = json.loads((source / "config.json").read_text())
    if config == original:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(config, indent=2))
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.suffix in _WEIGHTS or path.name in ("config.json", INDEX, RECORD)
        if path.is_file() and not skipped and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
            names.append(path.name)
    return names


def without_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """`config` of the same model without layers for multi-token prediction."""
    return {name: 0 if name in _MTP_FIELDS else value for name, value in config.items()}


def config_for(config: dict[str, Any], dtype: str, block: tuple[int, int] | None) -> dict[str, Any]:
    """`config` with what it says of the weights' type made true.

    Args:
        dtype: torch's name of the type of most weights; for fp8, of the rest.
        block: of fp8 weights; None if there are none.
    """
    changed = dict(config)
    if block is None:
        changed.pop("quantization_config", None)
    elif not _has_block(config, block):
        changed["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
    if "dtype" in changed:
        changed["dtype"] = dtype
    if "torch_dtype" in changed or "dtype" not in changed:
        changed["torch_dtype"] = dtype
    return changed


def _has_block(config: dict[str, Any], block: tuple[int, int]) -> bool:
    return (config.get("quantization_config") or {}).get("weight_block_size") == list(block)


def same_model(checkpoint: Path, folder: Path) -> ModelSpec:
    """The model of an HF folder, which must be the one that a checkpoint was converted from, where that says so.

    Raises:
        CheckpointError: with every field in which the two configs differ. ModelError: the folder has no usable config.
    """
    spec = read_spec(folder)
    if (checkpoint / CARRIED / "config.json").is_file():
        carried = read_spec(checkpoint / CARRIED)
        if differing := list(_differences(carried, spec)):
            raise CheckpointError(
                f"{checkpoint} was made from another model than {folder}/config.json describes ({len(differing)} fields differ):\n"
                + "\n".join(f"  - {line}" for line in differing)
            )
    return spec


def _differences(left: ModelSpec, right: ModelSpec) -> Iterator[str]:
    """Fields of the configs that differ, where what moerl makes of the two differs; then what else it makes of them."""
    one, other = _meaning(left), _meaning(right)
    if one == other:
        return
    found = False
    for name in sorted({*left.hf_config, *right.hf_config}):
        if name not in _IGNORED and left.hf_config.get(name) != right.hf_config.get(name):
            found = True
            yield f"{name}: the checkpoint has {left.hf_config.get(name)!r}, config.json has {right.hf_config.get(name)!r}"
    if not found:
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                yield f"{name}: the checkpoint has {one.get(name)!r}, config.json has {other.get(name)!r}"


def _meaning(spec: ModelSpec) -> dict[str, Any]:
    return {
        "family": spec.family,
        "layers": spec.layers,
        "moe_layers": spec.moe_layers,
        "experts": spec.experts,
        "topk": spec.topk,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "tied_embeddings": spec.tied_embeddings,
        **spec.megatron,
        **{f"model {name}": value for name, value in spec.megatron_model.items()},
    }
