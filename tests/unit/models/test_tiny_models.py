"""Tiny models of every family: transformers builds and reads the tensors that our tables name, from either spelling of a config."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.models import FAMILIES, ModelSpec, read_spec
from tests.unit.models import tiny

SMALL = {"hidden": 64, "layers": 3, "experts": 16, "expert_width": 32}
WRITTEN = {
    "deepseek_v3": tiny_config(**SMALL, topk=4, groups=4, group_topk=2),
    "deepseek_v2": tiny_deepseek_v2_config(**SMALL, groups=4),
    "deepseek_v2_lite": tiny_deepseek_v2_config(**SMALL, groups=1, group_topk=1),
    "qwen3": tiny_qwen3_config(**SMALL, topk=4),
    "qwen3, dense and tied": tiny_qwen3_config(**SMALL, topk=4) | {"mlp_only_layers": [1], "tie_word_embeddings": True},
    "glm4": tiny_glm4_config(**SMALL, topk=4),
    "glm4_air": tiny_glm4_config(**SMALL, topk=4, qk_norm=False) | {"attention_bias": False},
}


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "np") as stored:
        return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118


def table(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {name: entry.param.part_shape(part) for entry in spec.entries() for part, name in enumerate(entry.hf)}


@pytest.mark.parametrize("model", tiny.BASES)
def test_transformers_builds_the_tensors_of_our_table(model: str, tmp_path: Path) -> None:
    """From scaled-down published configs; and what it writes as config is read alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = tiny.config(model)
    fields = {name: value for name, value in hf.items() if name != "model_type"}
    built = AutoConfig.for_model(hf["model_type"].replace("kimi_k2", "deepseek_v3"), **fields)
    AutoModelForCausalLM.from_config(built).save_pretrained(tmp_path)
    spec = FAMILIES[hf["model_type"]].spec(hf)
    assert shapes(tmp_path) == table(spec)

    written = json.loads((tmp_path / "config.json").read_text())
    assert not {"rope_theta", "rope_scaling", "torch_dtype"} & set(written), "the other spellings are what this is about"
    again = read_spec(tmp_path)
    assert (again.params, again.megatron, again.megatron_model) == (spec.params, spec.megatron, spec.megatron_model)
    assert again.mtp_params == spec.mtp_params


@pytest.mark.parametrize("model", WRITTEN)
def test_transformers_reads_what_we_write(model: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    spec = write_tiny(tmp_path, WRITTEN[model])
    assert shapes(tmp_path) == table(spec)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not [kind for kind, names in report.items() if names]


@pytest.mark.parametrize("make", [tiny_config, tiny_glm4_config])
def test_multi_token_prediction_is_written_too(make, tmp_path: Path) -> None:
    spec = write_tiny(tmp_path, make(**SMALL, topk=4, mtp=True) | {"n_group": 1, "topk_group": 1})
    own = {name: entry.param.part_shape(part) for entry in spec.mtp_entries() for part, name in enumerate(entry.hf)}
    copies = dict.fromkeys(spec.mtp_copies(), (spec.vocab_size, spec.hidden_size))
    assert shapes(tmp_path) == table(spec) | own | copies
    assert len(shapes(tmp_path)) == spec.tensor_count(mtp=True)


@pytest.mark.parametrize("spelling", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_multi_token_prediction_is_announced_in_two_spellings(spelling: str) -> None:
    for model in ("deepseek_v3", "glm4"):
        hf = {name: value for name, value in tiny.config(model).items() if name != "num_nextn_predict_layers"}
        family = FAMILIES[hf["model_type"]]
        assert [family.spec(hf | {spelling: count}).mtp_layers for count in (0, 1)] == [0, 1]
        assert family.spec(hf).mtp_layers == 0


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("deepseek_v3", {}, (1, 2, 3)),
        ("deepseek_v3", {"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ("deepseek_v3", {"moe_layer_freq": 2}, (2,)),
        ("deepseek_v2", {"first_k_dense_replace": 3}, (3,)),
        ("glm4", {"first_k_dense_replace": 2}, (2, 3)),
        ("qwen3", {}, (0, 1, 2, 3)),
        ("qwen3", {"mlp_only_layers": [0, 2]}, (1, 3)),
        ("qwen3", {"decoder_sparse_step": 2}, (1, 3)),
        ("qwen3", {"mlp_only_layers": None}, (0, 1, 2, 3)),
    ],
)
def test_moe_layers(model: str, changes: dict, expected: tuple[int, ...]) -> None:
    hf = tiny.config(model) | changes
    spec = FAMILIES[hf["model_type"]].spec(hf)
    assert spec.moe_layers == expected
    assert spec.megatron["moe_layer_freq"] == [int(layer in expected) for layer in range(4)]


def test_heads_share_the_hidden_size_where_head_dim_is_absent() -> None:
    hf = {name: value for name, value in tiny.config("qwen3").items() if name != "head_dim"} | {"num_attention_heads": 4}
    assert FAMILIES["qwen3_moe"].spec(hf).megatron["kv_channels"] == 16
