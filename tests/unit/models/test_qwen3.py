"""The Qwen3-MoE family file: names, shapes and layers, published models, and what is refused."""

import json
from math import prod
from pathlib import Path

import pytest

from moerl.convert.tiny import tiny_qwen3_config, write_tiny
from moerl.errors import ModelError
from moerl.models import qwen3, read_spec

PUBLISHED = {
    "Qwen3-30B-A3B": (
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768, "intermediate_size": 6144},
        18_867,
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
        },
        36_945,
        235_093_634_560,
    ),
}
"""Sizes in which the published configs differ, tensors and parameters of the checkpoint."""
COMMON = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMALL = tiny_qwen3_config(layers=4, experts=4, topk=2)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_have_all_their_tensors(model: str, tmp_path: Path) -> None:
    sizes, tensors, parameters = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | sizes))
    spec = read_spec(tmp_path)
    held = [entry.param.part_shape(part) for entry in spec.entries() for part in range(len(entry.hf))]
    assert (len(held), sum(map(prod, held))) == (tensors, parameters)
    assert (spec.family, spec.experts, spec.topk, len(spec.moe_layers)) == ("qwen3", 128, 8, sizes["num_hidden_layers"])
    assert spec.megatron_model == {"rotary_base": 1e6}
    assert (spec.megatron["moe_router_pre_softmax"], spec.megatron["kv_channels"], spec.megatron["num_query_groups"]) == (False, 128, 4)
    assert not spec.latent_attention


def test_what_transformers_writes_is_read_alike(tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_tiny(tmp_path, SMALL)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "rewritten")
    written = json.loads((tmp_path / "rewritten" / "config.json").read_text())
    assert "rope_theta" not in written, "the other spelling is what this test is about"
    old, new = read_spec(tmp_path), read_spec(tmp_path / "rewritten")
    assert (old.megatron, old.megatron_model, old.params) == (new.megatron, new.megatron_model, new.params)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "mlp_only_layers": [1, 2]}])
def test_transformers_and_the_checkpoint_agree_on_names_and_shapes(changes: dict, tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors import safe_open

    spec = write_tiny(tmp_path, SMALL | changes)
    with safe_open(tmp_path / "model.safetensors", "np") as stored:
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    assert shapes == {name: entry.param.part_shape(part) for entry in spec.entries() for part, name in enumerate(entry.hf)}
    assert ("lm_head.weight" in shapes) is not spec.tied_embeddings
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not [kind for kind, names in report.items() if names]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
    ],
)
def test_moe_layers(changes: dict, expected: tuple[int, ...]) -> None:
    spec = qwen3.spec(SMALL | changes)
    assert spec.moe_layers == expected
    assert spec.megatron["moe_layer_freq"] == [int(layer in expected) for layer in range(4)]


def test_heads_share_the_hidden_size_where_head_dim_is_absent() -> None:
    config = {name: value for name, value in SMALL.items() if name != "head_dim"}
    assert qwen3.spec(config).megatron["kv_channels"] == 32


def test_engines_fuse_queries_keys_and_values() -> None:
    fused = [entry.hf for entry in qwen3.spec(SMALL).entries() if entry.engine == "model.layers.1.self_attn.qkv_proj.weight"]
    assert fused == [tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")]


def test_everything_unsupported_is_named_at_once() -> None:
    changes = {
        "attention_bias": True,
        "use_sliding_window": True,
        "hidden_act": "gelu",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "num_key_value_heads": 3,
        "decoder_sparse_step": 0,
    }
    with pytest.raises(ModelError) as error:
        qwen3.spec(SMALL | changes)
    assert not [field for field in changes if field not in str(error.value)]
    assert str(error.value).count("\n  - ") == len(changes)


def test_a_field_that_every_model_has_is_named_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in SMALL.items() if name != "num_key_value_heads"}))
    with pytest.raises(ModelError, match="lacks 'num_key_value_heads', which every qwen3_moe model has"):
        read_spec(tmp_path)
