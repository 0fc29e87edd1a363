"""Model families: one declarative file each, the single source for loading, exporting, syncing and planning.

`read_spec(folder)` is the only entry: a model folder in, a `ModelSpec` out, or a `ModelError` that says what is wrong.
"""

import json
from pathlib import Path

from moerl.errors import ModelError
from moerl.models import deepseek, qwen3
from moerl.models.spec import Entry, ModelSpec, Param

__all__ = ["FAMILIES", "Entry", "ModelSpec", "Param", "read_spec"]

FAMILIES = {model_type: family for family in (deepseek, qwen3) for model_type in family.MODEL_TYPES}

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def read_spec(folder: str | Path) -> ModelSpec:
    """Read `config.json` of an HF model folder.

    Raises:
        ModelError: the folder or its config is missing, the model routes to no experts, or its family is unknown.
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; set model.path to a folder that holds config.json and *.safetensors")
    if not config.is_file():
        raise ModelError(f"model folder {folder} has no config.json (found: {_listing(folder)}); expected a Hugging Face checkpoint")
    try:
        hf = json.loads(config.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{config} is not valid JSON: {error}") from error
    kind = hf.get("model_type")
    if not any(hf.get(name) for name in _EXPERT_COUNTS):
        raise ModelError(
            f"{folder} ({kind}) is not a mixture of experts: its config.json has none of {', '.join(_EXPERT_COUNTS)}; "
            "moerl trains MoE models only"
        )
    if kind not in FAMILIES:
        raise ModelError(f"{folder} is of model_type {kind!r}; supported: {', '.join(sorted(FAMILIES))}")
    try:
        return FAMILIES[kind].spec(hf)
    except KeyError as error:
        raise ModelError(f"{config} lacks {error}, which every {kind} model has") from error


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") if names else "nothing"
