"""What is refused before anything is loaded: every reason at once, each naming the field that decides."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moerl.errors import ModelError
from moerl.models import FAMILIES, read_spec
from tests.unit.models import published, tiny

SUPPORTED = "supported: deepseek_v2, deepseek_v3, glm4_moe, kimi_k2, qwen3_moe"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

FOREIGN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mixtral": (published.config("Mixtral-8x7B-v0.1"), ["model_type is 'mixtral' (with num_local_experts = 8)"]),
    "gpt-oss": (
        {"model_type": "gpt_oss", "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"]},
        ["model_type is 'gpt_oss' (with num_local_experts = 128)", "layer_types names sliding_attention"],
    ),
    "sparse attention": (
        tiny.config("deepseek_v3") | {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64},
        ["model_type is 'deepseek_v32' (with n_routed_experts = 16)", "index_topk, index_n_heads: sparse attention"],
    ),
    "hybrid attention": (
        tiny.config("qwen3") | {"model_type": "qwen3_next", "linear_num_key_heads": 16, "layer_types": ["linear_attention"]},
        ["model_type is 'qwen3_next'", "linear_num_key_heads: linear attention", "layer_types names linear_attention"],
    ),
    "vision": (
        {"model_type": "qwen3_vl_moe", "vision_config": {"depth": 27}, "text_config": tiny.config("qwen3")},
        ["model_type is 'qwen3_vl_moe'", "vision_config: images", "text_config: a language model inside another one"],
    ),
    "dense": (
        {"model_type": "llama"},
        ["model_type is 'llama' and none of n_routed_experts, num_experts, num_local_experts is given: it is not a mixture of experts"],
    ),
    "no type": ({"num_experts": 8}, ["model_type is None (with num_experts = 8)"]),
}


def refused(folder: Path, hf: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ModelError) as error:
        read_spec(folder)
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    hf, expected = FOREIGN[kind]
    text = refused(tmp_path, hf)
    assert not [words for words in expected if words not in text]
    assert SUPPORTED in text
    assert text.count("\n  - ") == len(expected)


HALF: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "moe_layer_freq": [1, 0],
        "num_nextn_predict_layers": 2,
        "n_group": 3,
        "num_experts_per_tok": 1,
        "rope_interleave": False,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "index_topk": 2048,
        "vision_config": {"depth": 1},
    },
    "deepseek_v2": {
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 0,
        "topk_group": 5,
        "num_experts_per_tok": 17,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4},
    },
    "qwen3": {
        "attention_bias": True,
        "use_sliding_window": True,
        "hidden_act": "gelu",
        "rope_scaling": YARN,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 0,
        "num_experts_per_tok": 0,
        "partial_rotary_factor": 0.5,
        "linear_num_value_heads": 32,
    },
    "glm4": {
        "hidden_act": "gelu",
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "moe_layer_freq": 2,
        "num_nextn_predict_layers": 2,
        "partial_rotary_factor": 1.5,
        "rope_scaling": YARN,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("model", HALF)
def test_everything_unsupported_in_a_family_is_named_at_once(model: str, tmp_path: Path) -> None:
    changes = HALF[model]
    text = refused(tmp_path, tiny.config(model) | changes)
    assert not [field for field in changes if not re.search(rf"\b{field}\b", text)]
    assert text.count("\n  - ") == len(changes)
    hf = tiny.config(model) | changes
    with pytest.raises(ModelError) as error:
        FAMILIES[hf["model_type"]].spec(hf)
    assert str(error.value).partition("\n")[2] == text.partition("\n")[2], "the family file itself says the same"


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("deepseek_v3", {"n_group": 16, "topk_group": 8}, "n_group is 16, which leaves 1 experts per group, expected at least 2"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 1}, "num_experts_per_tok is 4, but topk_group 1 of n_group 8 groups hold 2 experts"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5, expected 1 to 4: no more groups can be chosen than n_group"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank is 0, expected at least 1"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' without original_max_position_embeddings"),
        ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 2.0}}, "rope_scaling.attention_factor is 2.0, expected none"),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate is false"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters has settings per type of layer"),
        (
            "qwen3",
            {"head_dim": None, "num_attention_heads": 10},
            "hidden_size is 64, expected a multiple of num_attention_heads, which is 10",
        ),
        ("deepseek_v2_lite", {"n_group": 4, "topk_group": 4}, "n_group is 4, expected 1: topk_method 'greedy' knows no groups"),
        ("deepseek_v3", {"n_group": 0}, "n_routed_experts is 16, expected a multiple of n_group, which is 0"),
        ("deepseek_v3", {"hidden_size": "64"}, "hidden_size is '64', expected a positive number"),
        ("deepseek_v3", {"n_routed_experts": [16]}, "n_routed_experts is [16], expected a positive number"),
        ("glm4", {"n_group": 5}, "n_routed_experts is 16, expected a multiple of n_group, which is 5"),
    ],
)
def test_the_sentence(model: str, changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in refused(tmp_path, tiny.config(model) | changes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("deepseek_v3", {"rope_scaling": None}),
        ("deepseek_v3", {"n_shared_experts": None, "n_group": None, "topk_group": None}),
        ("deepseek_v2", {"topk_group": 4}),
        ("qwen3", {"sliding_window": 4096, "layer_types": ["full_attention"] * 4}),
        ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ],
)
def test_what_looks_similar_and_is_supported(model: str, changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(model) | changes))
    assert read_spec(tmp_path).tensor_count() > 0


@pytest.mark.parametrize("model", tiny.BASES)
def test_all_missing_fields_are_named_at_once(model: str, tmp_path: Path) -> None:
    hf = tiny.config(model)
    required = FAMILIES[hf["model_type"]].REQUIRED
    text = refused(tmp_path, {name: value for name, value in hf.items() if name not in required})
    assert not [name for name in required if f"{name} is missing, which every" not in text]


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not exist; set model\.path"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object, but list"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_spec(tmp_path)
