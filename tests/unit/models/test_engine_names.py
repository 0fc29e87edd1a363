"""Our tables against SGLang's models of every family: its own loader must put every element where `Param.engine` says."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.models import FAMILIES, Entry, ModelSpec, classify
from moerl.reshard.boxes import kinds
from moerl.reshard.engine_boxes import EngineTopology, engine_parameters, engine_slice, is_linear
from tests.unit.models import published
from tests.unit.models.by_sglang import engines

SMALL = {"hidden": 64, "layers": 3, "experts": 8, "expert_width": 32}
MODELS = {
    "deepseek_v3": tiny_config(**SMALL, topk=4, groups=4, group_topk=2, mtp=True),
    "deepseek_v2": tiny_deepseek_v2_config(**SMALL, topk=4, groups=4, group_topk=2),
    "deepseek_v2_lite": tiny_deepseek_v2_config(**SMALL, topk=4, groups=1, group_topk=1),
    "qwen3": tiny_qwen3_config(**SMALL, topk=4),
    "glm4": tiny_glm4_config(**SMALL, topk=4, mtp=True),
    "glm4_air": tiny_glm4_config(**SMALL, topk=4, qk_norm=False) | {"attention_bias": False},
}
AHEAD = [name for name, hf in MODELS.items() if hf.get("num_nextn_predict_layers")]
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""What a draft model takes over from its target."""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, tuple[ModelSpec, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Model, or model with ":draft" -> (specification, tensors of the folder, SGLang's parameters)."""
    root = tmp_path_factory.mktemp("engines")
    made = {name: (write_tiny(root / name, hf, seed=number), root / name) for number, (name, hf) in enumerate(MODELS.items())}
    names = [*MODELS, *(f"{name}:draft" for name in AHEAD)]
    found = engines(root, [str(root / name) for name in names])
    stored = {name: load_file(Path(folder) / "model.safetensors") for name, (_, folder) in made.items()}
    return {
        name: (made[model][0], stored[model], parameters)
        for name, parameters in zip(names, found, strict=True)
        for model in [name.partition(":")[0]]
    }


def put_together(entries: Iterable[Entry], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Engine parameter -> its tensor: HF tensors one below the other, experts stacked."""
    parts: dict[str, dict[int | None, list[torch.Tensor]]] = {}
    for entry in entries:
        dtype = torch.float32 if entry.param.fp32 else torch.bfloat16
        held = parts.setdefault(entry.engine, {}).setdefault(entry.expert, [])
        held += [stored[name].to(dtype) for name in entry.hf]
    joined = {name: [torch.cat(rows) for rows in experts.values()] for name, experts in parts.items()}
    return {name: torch.stack(each) if None not in parts[name] else each[0] for name, each in joined.items()}


def check(expected: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> None:
    assert set(held) == set(expected)
    for name, tensor in expected.items():
        padded = torch.zeros_like(held[name])
        padded[tuple(map(slice, tensor.shape))] = tensor
        assert held[name].dtype == tensor.dtype, name
        assert torch.equal(held[name], padded), name


@pytest.mark.parametrize("model", MODELS)
def test_the_engine_holds_what_the_table_says(model: str, built) -> None:
    spec, stored, held = built[model]
    check(put_together(spec.entries(), stored), held)
    (expected,) = engine_parameters(kinds(spec), EngineTopology(cpu=True))
    assert {name: (each.shape, each.dtype) for name, each in expected.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in held.items()
    }


@pytest.mark.parametrize("model", AHEAD)
def test_the_draft_model_holds_multi_token_prediction(model: str, built) -> None:
    spec, stored, held = built[f"{model}:draft"]
    assert set(SHARED) <= set(held)
    check(put_together(spec.mtp_entries(), stored), {name: tensor for name, tensor in held.items() if name not in SHARED})
    assert not any(held[name].any() for name in SHARED), "the loader left them for the target's"


def test_engines_quantise_what_the_published_checkpoint_does() -> None:
    spec, stored = FAMILIES["deepseek_v3"].spec(published.config("DeepSeek-V3")), published.tensors("DeepSeek-V3")
    seen = {each.entry.param: stored[name].dtype for name, each in classify(spec, stored).items() if each.entry}
    assert {param: dtype == "float8_e4m3fn" for param, dtype in seen.items()} == {param: is_linear(param) for param in seen}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_biases_are_cut_as_their_weights(tp: int) -> None:
    """Also where more ranks than key-value heads repeat them."""
    spec = FAMILIES["glm4_moe"].spec(tiny_glm4_config(heads=16, kv_heads=4))
    found = {kind.hf: kind for kind in kinds(spec) if "self_attn" in kind.hf}
    for part in "qkv":
        weight, bias = (found["model.layers.{layer}.self_attn." + f"{part}_proj.{what}"] for what in ("weight", "bias"))
        for rank in range(tp):
            slices = [engine_slice(kind, EngineTopology(tp=tp), rank) for kind in (weight, bias)]
            assert slices[0].rows == slices[1].rows
            assert slices[1].cols == (0, 1)
