"""Hugging Face folder <-> Megatron parameters: exact, complete, and explicit about every difference."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_qwen3_config, write_tiny
from moerl.errors import ModelError
from moerl.models import qwen3, read_spec
from moerl.train import megatron, weights

CONFIG = tiny_config(hidden=32, layers=3, experts=4, topk=2, groups=2, group_topk=1, expert_width=16)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(spec, folder, ranks, model) of one process."""
    folder = tmp_path_factory.mktemp("weights")
    spec = write_tiny(folder, CONFIG, seed=2)
    config = Config(model={"path": str(folder)}, train={"dtype": "float32", "device": "cpu"})
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    model = megatron.build_model(spec, config, ranks, trainable=False)
    weights.load_hf(model, spec, folder, ranks)
    yield spec, folder, ranks, model
    megatron.shutdown()


@pytest.fixture
def broken(loaded, tmp_path):
    """(load, tensors): change `tensors`, call `load()`."""
    spec, folder, ranks, model = loaded
    tensors = load_file(folder / "model.safetensors")

    def load() -> None:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        weights.load_hf(model, spec, tmp_path, ranks)

    return load, tensors


def test_shards_are_the_folder_in_canonical_order(loaded):
    spec, folder, ranks, model = loaded
    expected = load_file(folder / "model.safetensors")
    shards = weights.local_shards(model, spec, ranks)
    assert [shard.entry for shard in shards] == list(spec.entries())
    assert all((shard.index, shard.parts) == (0, 1) for shard in shards)
    seen = set()
    for shard in shards:
        for name, part in zip(shard.entry.hf, shard.tensor.chunk(len(shard.entry.hf)), strict=True):
            assert np.array_equal(part.numpy(), expected[name]), name
            seen.add(name)
    assert seen == set(expected)


def test_shards_are_live(loaded):
    spec, _, ranks, model = loaded
    shard = weights.local_shards(model, spec, ranks)[0]
    assert shard.tensor.data_ptr() == model[0].embedding.word_embeddings.weight.data_ptr()


def test_all_differences_are_reported_at_once(broken):
    load, tensors = broken
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.surprise"] = np.zeros(1, np.float32)
    tensors["lm_head.weight"] = np.zeros((3, 32), np.float32)
    tensors["model.layers.1.mlp.gate.weight"] = np.zeros((4, 32), np.int8)
    with pytest.raises(ModelError) as error:
        load()
    text = str(error.value)
    assert "1 tensors are missing: model.norm.weight" in text
    assert "1 tensors are unknown: model.layers.0.self_attn.surprise" in text
    assert "lm_head.weight: shape (3, 32), expected (16, 32)" in text
    assert "model.layers.1.mlp.gate.weight: type I8" in text


def test_layers_for_multi_token_prediction_are_ignored(broken):
    load, tensors = broken
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((1, 1), np.float32)
    load()


def test_a_folder_without_weights(loaded, tmp_path):
    spec, _, ranks, model = loaded
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        weights.load_hf(model, spec, tmp_path, ranks)


def test_an_index_that_names_a_missing_file(loaded, tmp_path):
    spec, _, ranks, model = loaded
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"not there: gone\.safetensors"):
        weights.load_hf(model, spec, tmp_path, ranks)


def test_a_checkpoint_in_several_files(loaded, tmp_path):
    spec, folder, ranks, model = loaded
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, tmp_path / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    weights.load_hf(model, spec, tmp_path, ranks)
    test_shards_are_the_folder_in_canonical_order(loaded)


def test_unknown_parameters_are_refused(loaded):
    spec, _, ranks, model = loaded
    model[0].decoder.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    try:
        with pytest.raises(ModelError, match=r"does not describe: decoder\.extra"):
            weights.placed(model, spec, ranks)
    finally:
        del model[0].decoder.extra


class Stage(torch.nn.Module):
    """A chunk that holds nothing but named parameters: what Transformer Engine would call them on one rank of a larger layout."""

    def __init__(self, names: dict[str, tuple[int, ...]], first_layer: int):
        super().__init__()
        for name, shape in names.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
        layers = self.decoder.layers
        for number, layer in layers._modules.items():
            layer.layer_number = first_layer + int(number) + 1
        self.decoder.layers = torch.nn.ModuleList(layers._modules.values())


def test_transformer_engine_names_under_pipeline_and_expert_parallelism(loaded):
    spec, _, ranks, _ = loaded
    names = {
        "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight": (64,),
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": (64, 32),
        "decoder.layers.0.mlp.experts.linear_fc1.weight1": (16, 32),
        "decoder.layers.0.mlp.experts.linear_fc2.weight0": (32, 8),
    }
    there = replace(ranks, tp=(1, 2), ep=(1, 2), etp=(1, 2), world=4)
    found = {item.name: item for item in weights.placed([Stage(names, first_layer=2)], spec, there)}
    assert found["decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight"].entry.hf == (
        "model.layers.2.self_attn.q_a_layernorm.weight",
    )
    down = found["decoder.layers.0.self_attention.linear_q_down_proj.weight"]
    assert (down.index, down.parts) == (0, 1), "kept whole on every rank"
    gate_up = found["decoder.layers.0.mlp.experts.linear_fc1.weight1"]
    assert gate_up.entry.hf[0] == "model.layers.2.mlp.experts.3.gate_proj.weight"
    assert (gate_up.index, gate_up.parts) == (1, 2)
    assert found["decoder.layers.0.mlp.experts.linear_fc2.weight0"].entry.expert == 2


def test_transformer_engine_names_of_grouped_attention(loaded):
    _, _, ranks, _ = loaded
    spec = qwen3.spec(tiny_qwen3_config(hidden=32, layers=3, heads=8, kv_heads=4, head_dim=4) | {"mlp_only_layers": [2]})
    names = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (32,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (32, 32),
        "decoder.layers.0.self_attention.k_layernorm.weight": (4,),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (32,),
    }
    found = weights.placed([Stage(names, first_layer=2)], spec, replace(ranks, tp=(1, 2), world=2))
    at = "model.layers.2.self_attn."
    assert [(item.entry.hf, item.index, item.parts) for item in found] == [
        (("model.layers.2.input_layernorm.weight",), 0, 1),
        ((at + "q_proj.weight", at + "k_proj.weight", at + "v_proj.weight"), 1, 2),
        ((at + "k_norm.weight",), 0, 1),
        (("model.layers.2.post_attention_layernorm.weight",), 0, 1),
    ]


def test_the_parts_of_grouped_attention_are_checked_by_their_own_shapes(loaded, tmp_path):
    _, _, ranks, model = loaded
    spec = write_tiny(tmp_path, tiny_qwen3_config(hidden=32, layers=1, experts=4, topk=2))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors differ: .*k_proj\.weight: shape \(256, 32\), expected \(128, 32\)"):
        weights.load_hf(model, spec, tmp_path, ranks)


def test_bfloat16_model_keeps_the_router_bias_in_float32(loaded):
    spec, folder, ranks, _ = loaded
    config = Config(model={"path": str(folder)}, train={"dtype": "bfloat16", "device": "cpu"})
    model = megatron.build_model(read_spec(folder), config, ranks)
    weights.load_hf(model, spec, folder, ranks)
    for shard in weights.local_shards(model, spec, ranks):
        assert shard.tensor.dtype == (torch.float32 if shard.entry.param.fp32 else torch.bfloat16), shard.entry.megatron
