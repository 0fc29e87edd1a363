"""The DeepSeek family file: names, shapes and layers, and what is refused."""

import json
from pathlib import Path

import pytest

from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ModelError
from moerl.models import read_spec


def folder(path: Path, **changes: object) -> Path:
    config = {**tiny_config(layers=3, experts=4, topk=2, groups=2, group_topk=1), **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return path


def test_entries_are_the_tensors_of_the_checkpoint(tmp_path: Path) -> None:
    from safetensors import safe_open

    spec = write_tiny(tmp_path, tiny_config(layers=3, experts=4, topk=2, groups=2, group_topk=1))
    names = [name for entry in spec.entries() for name in entry.hf]
    assert len(names) == len(set(names))
    with safe_open(tmp_path / "model.safetensors", "np") as stored:
        assert set(stored.keys()) == set(names)
        shapes = {name: entry.param.shape for entry in spec.entries() for name in entry.hf}
        assert {name: tuple(stored.get_slice(name).get_shape()) for name in names} == shapes


def test_transformers_agrees_on_names_and_shapes(tmp_path: Path) -> None:
    import torch
    import transformers

    spec = write_tiny(tmp_path, tiny_config(layers=3, experts=4, topk=2, groups=2, group_topk=1))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) > 0
    assert spec.moe_layers == (1, 2)


def test_moe_layers_skip_the_dense_ones(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path)).moe_layers == (1, 2)
    assert read_spec(folder(tmp_path, first_k_dense_replace=0)).moe_layers == (0, 1, 2)


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    old = read_spec(folder(tmp_path)).megatron
    rope = {**tiny_config()["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    new = read_spec(folder(tmp_path, rope_scaling="absent", rope_theta="absent", rope_parameters=rope)).megatron
    assert old == new
    assert old["rope_type"] == "yarn"


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not exist; set model\.path"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_spec(tmp_path)


def test_a_dense_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(ModelError, match="not a mixture of experts"):
        read_spec(tmp_path)


def test_an_unsupported_family(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'phimoe'; supported: deepseek_v3, kimi_k2, qwen3_moe"):
        read_spec(folder(tmp_path, model_type="phimoe"))


def test_an_incomplete_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="kv_lora_rank"):
        read_spec(folder(tmp_path, kv_lora_rank="absent"))
