"""Model families: one declarative file each, the single source for loading, exporting, converting, syncing and planning.

`read_spec(folder)` is the entry: a model folder in, a `ModelSpec` out, or a `ModelError` that says everything that is wrong before any
weight is read. `classify` says what the tensors of a checkpoint are.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moerl.errors import ModelError
from moerl.models import checks, deepseek, deepseek_v2, glm4, qwen3
from moerl.models.names import Known, classify
from moerl.models.spec import Entry, ModelSpec, Param

__all__ = ["FAMILIES", "Entry", "Known", "ModelSpec", "Param", "classify", "read_spec"]

FAMILIES = {model_type: family for family in (deepseek, deepseek_v2, glm4, qwen3) for model_type in family.MODEL_TYPES}

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def read_spec(folder: str | Path) -> ModelSpec:
    """Read `config.json` of an HF model folder.

    Raises:
        ModelError: the folder or its config is missing, the model routes to no experts, its family is unknown, or its family file does
            not describe all that the config asks for; every reason in one message.
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
    if not isinstance(hf, dict):
        raise ModelError(f"{config} is not a JSON object, but {type(hf).__name__}")
    kind = hf.get("model_type")
    problems = FAMILIES[kind].problems(hf) if kind in FAMILIES else _unknown(hf)
    checks.refuse(f"{config} describes a model that is not supported", problems)
    return FAMILIES[kind].spec(hf)


def _unknown(hf: Mapping[str, Any]) -> Iterator[str]:
    """Why a model of no family here is refused."""
    experts = [f"{name} = {hf[name]}" for name in _EXPERT_COUNTS if hf.get(name)]
    foreign = list(checks.foreign(hf))
    if experts or foreign:
        given = f" (with {experts[0]})" if experts else ""
        yield f"model_type is {hf.get('model_type')!r}{given}; supported: {', '.join(sorted(FAMILIES))}"
        yield from foreign
    else:
        yield (
            f"model_type is {hf.get('model_type')!r} and none of {', '.join(_EXPERT_COUNTS)} is given: it is not a mixture of experts, "
            f"and moerl trains MoE models only; supported: {', '.join(sorted(FAMILIES))}"
        )


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") if names else "nothing"
