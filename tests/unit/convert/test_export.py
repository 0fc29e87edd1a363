import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from moerl.convert.export import write_folder
from moerl.convert.tiny import tiny_config, write_tiny


def test_a_sharded_folder_holds_every_tensor_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source, tiny_config(layers=3, experts=4, topk=2, groups=2, group_topk=1))
    tensors = {name: value.to(torch.bfloat16) for name, value in load_file(source / "model.safetensors").items()}
    target = write_folder(tmp_path / "out", source, tensors.items(), dtype=torch.bfloat16, shard_bytes=200_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    back = {name: value for path in files for name, value in load_file(path).items()}
    assert all(torch.equal(back[name], value) for name, value in tensors.items())
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (target / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".writing*"))


def test_an_existing_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source, tiny_config(layers=3, experts=4, topk=2, groups=2, group_topk=1))
    target = tmp_path / "out"
    target.mkdir()
    (target / "stale").write_text("old")
    write_folder(target, source, [("a", torch.zeros(2))], dtype=torch.float32)
    assert not (target / "stale").exists()
    assert list(load_file(target / "model.safetensors")) == ["a"]
