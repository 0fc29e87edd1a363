"""Published models: every tensor of their checkpoints is accounted for, in both directions, and all sizes are right."""

import json
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from moerl.models import FAMILIES, ModelSpec, classify, read_spec
from tests.unit.models import published

INVENTORIES = [name for name in published.SUPPORTED if "tensors" in published.read(name)]
ALIKE = {"DeepSeek-V3.1": "DeepSeek-V3", "DeepSeek-R1": "DeepSeek-V3", "Qwen3-30B-A3B-FP8": "Qwen3-30B-A3B"}
"""Models with the same tensors, scales aside."""
IGNORED = Counter({"Kimi-K2-Instruct": 61})


def spec_of(model: str, folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(published.config(model)))
    return read_spec(folder)


@pytest.mark.parametrize("model", INVENTORIES)
def test_every_tensor_is_accounted_for_once_in_its_shape(model: str, tmp_path: Path) -> None:
    spec, stored = spec_of(model, tmp_path), published.tensors(model)
    known = classify(spec, stored)
    roles = Counter(each.role for each in known.values())
    fp8 = sum(tensor.dtype == "float8_e4m3fn" for tensor in stored.values())
    ours = {"parameter": spec.tensor_count(), "mtp": spec.tensor_count(mtp=True) - spec.tensor_count() - 2 * spec.mtp_layers}
    others = {"copy": 2 * spec.mtp_layers, "scale": fp8, "ignorable": IGNORED[model]}
    assert roles == Counter(ours | others)

    entries = [*spec.entries(), *spec.mtp_entries()]
    expected = {name: (entry, part) for entry in entries for part, name in enumerate(entry.hf)}
    assert len(expected) == sum(len(entry.hf) for entry in entries), "no name stands for two tensors"
    assert {name: (each.entry, each.part) for name, each in known.items() if each.entry} == expected
    assert {name: each.of for name, each in known.items() if each.role == "copy"} == spec.mtp_copies()
    for name, each in known.items():
        shape = stored[name].shape
        if each.entry:
            assert shape == each.entry.param.part_shape(each.part), name
            # Engines may keep more in float32 than checkpoints do.
            assert stored[name].dtype != "float32" or each.entry.param.fp32, name
        elif each.role == "copy":
            assert shape == stored[each.of].shape, name
        elif each.role == "scale":
            weight = stored[each.of]
            block = (128, 128) if name.endswith("_inv") else (1, weight.shape[1])
            assert shape == tuple(-(-size // edge) for size, edge in zip(weight.shape, block, strict=True)), name
            assert weight.dtype == "float8_e4m3fn", name
    more = sum(prod(stored[name].shape) for name, each in known.items() if each.role in ("scale", "ignorable"))
    assert spec.parameter_count(mtp=True) + more == published.read(model)["element_count"]


@pytest.mark.parametrize("model", ALIKE)
def test_models_that_differ_in_training_or_scales_only(model: str, tmp_path: Path) -> None:
    spec, other = spec_of(model, tmp_path), spec_of(ALIKE[model], tmp_path)
    assert (spec.params, spec.mtp_params, spec.megatron) == (other.params, other.mtp_params, other.megatron)


@pytest.mark.parametrize(
    ("model", "decoder", "everything"),
    [
        ("DeepSeek-V3", 671_026_419_200, 684_489_845_504),
        ("DeepSeek-V2-Lite", 15_706_484_224, 15_706_484_224),
        ("Kimi-K2-Instruct", 1_026_408_232_448, 1_026_408_232_448),
        ("GLM-4.5", 352_797_829_024, 358_337_791_296),
        ("Qwen3-235B-A22B", 235_093_634_560, 235_093_634_560),
        ("Qwen3-30B-A3B", 30_532_122_624, 30_532_122_624),
    ],
)
def test_parameter_counts(model: str, decoder: int, everything: int, tmp_path: Path) -> None:
    spec = spec_of(model, tmp_path)
    assert (spec.parameter_count(), spec.parameter_count(mtp=True)) == (decoder, everything)


@pytest.mark.parametrize("model", [name for name in published.SUPPORTED if name not in ALIKE])
def test_transformers_builds_as_many_parameters(model: str, tmp_path: Path) -> None:
    """On the meta device; routers' correction biases are buffers there, and multi-token prediction is not built."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = spec_of(model, tmp_path)
    fields = {name: value for name, value in spec.hf_config.items() if name not in ("quantization_config", "model_type")}
    kind = spec.hf_config["model_type"].replace("kimi_k2", "deepseek_v3")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), attn_implementation="eager")
    biases = (buffer for name, buffer in built.named_buffers() if name.endswith("e_score_correction_bias"))
    assert sum(each.numel() for each in (*built.parameters(), *biases)) == spec.parameter_count()


def test_what_is_not_a_name_of_the_model_is_unknown(tmp_path: Path) -> None:
    spec = spec_of("DeepSeek-V3", tmp_path)
    names = [
        "model.layers.62.input_layernorm.weight",  # behind the layer for multi-token prediction
        "model.layers.60.eh_proj.weight",  # before it
        "model.layers.61.mlp.gate_proj.weight",  # it has experts
        "model.layers.2.mlp.gate.weight",  # dense
        "model.layers.3.mlp.experts.256.up_proj.weight",
        "model.layers.03.mlp.gate.weight",
        "model.layers.3.mlp.experts.{expert}.up_proj.weight",
        "model.layers.3.input_layernorm.weight_scale_inv",  # of a vector
        "model.layers.3.self_attn.surprise.weight_scale_inv",
        "language_model.model.norm.weight",
        "lm_head.bias",
    ]
    assert {name: each.role for name, each in classify(spec, names).items()} == dict.fromkeys(names, "unknown")


def test_a_tied_head_may_be_stored_and_layers_ahead_need_an_announcement(tmp_path: Path) -> None:
    hf = published.config("DeepSeek-V3") | {"num_nextn_predict_layers": 0, "tie_word_embeddings": True}
    known = classify(FAMILIES["deepseek_v3"].spec(hf), ["lm_head.weight", "model.layers.61.eh_proj.weight", "model.rotary_emb.inv_freq"])
    assert [each.role for each in known.values()] == ["copy", "unknown", "ignorable"]
    assert known["lm_head.weight"].of == "model.embed_tokens.weight"
