"""Hugging Face -> Megatron -> Hugging Face gives the same bits, for every family, type and kind of quantisation."""

import json

import pytest
import torch

from moerl.convert.carry import RECORD
from moerl.convert.names import Model
from moerl.convert.verify import verify
from moerl.errors import CheckpointError, ModelError
from tests.unit.convert.folders import CONFIGS, dequantised, is_linear, make, read, same, to_hf, to_megatron, write


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.bfloat16) for family in CONFIGS), ("deepseek_v3 mtp", torch.float32), ("glm4", torch.float16)]
)
def test_a_folder_comes_back_bit_for_bit(tmp_path, family, dtype):
    source = make(tmp_path / "hf", family, dtype)
    checkpoint = to_megatron(source, tmp_path / "megatron")
    found = verify(source, checkpoint)
    back = to_hf(checkpoint, tmp_path / "back")
    before, after = read(source), read(back)
    assert same(before, after)
    assert (found.rounded, found.absent) == (0, 0)
    assert found.tensors + len(copies(before, source)) == len(before)
    assert found.elements + sum(before[name].numel() for name in copies(before, source)) == sum(one.numel() for one in before.values())
    assert len(list(checkpoint.glob("*.distcp"))) > 1
    assert len(list(back.glob("*.safetensors"))) > 1
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def copies(tensors, folder):
    ahead = f"model.layers.{Model.of(json.loads((folder / 'config.json').read_text())).layers}."
    return [name for name in tensors if name in (ahead + "embed_tokens.weight", ahead + "shared_head.head.weight")]


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, "rows"])
@pytest.mark.parametrize("family", ["deepseek_v3 mtp", "qwen3", "glm4"])
def test_quantised_weights_become_their_products_rounded_once(tmp_path, family, scales):
    source = make(tmp_path / "hf", family, scales=scales)
    checkpoint = to_megatron(source, tmp_path / "megatron")
    assert verify(source, checkpoint).rounded == 0
    back = to_hf(checkpoint, tmp_path / "back")
    assert same(dequantised(read(source)), read(back))
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize("family", ["deepseek_v3 mtp", "qwen3"])
def test_fp8_is_written_in_the_blocks_of_the_config_and_read_again(tmp_path, family):
    source = make(tmp_path / "hf", family, scales=torch.float32)
    checkpoint = to_megatron(source, tmp_path / "megatron")
    back = to_hf(checkpoint, tmp_path / "back", dtype="fp8")
    before, after = read(source), read(back)
    assert before.keys() == after.keys()
    assert {name: (one.dtype, one.shape) for name, one in before.items()} == {name: (one.dtype, one.shape) for name, one in after.items()}
    assert json.loads((back / "config.json").read_text())["quantization_config"]["weight_block_size"] == [16, 16]
    found = verify(back, checkpoint)
    assert found.rounded <= sum(is_linear(name) for name in after)
    again = to_megatron(back, tmp_path / "again")
    assert verify(back, again).rounded == 0


def test_a_bf16_model_is_quantised_in_deepseeks_blocks_unless_a_value_is_not_finite(tmp_path):
    source = make(tmp_path / "hf", "deepseek_v3")
    checkpoint = to_megatron(source, tmp_path / "megatron")
    back = to_hf(checkpoint, tmp_path / "back", dtype="fp8")
    weight = read(back)["model.layers.0.self_attn.q_b_proj.weight_scale_inv"]
    assert weight.dtype == torch.float32
    assert weight.shape == (2, 1)
    assert json.loads((back / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]
    assert verify(back, checkpoint).rounded
    tensors = read(source)
    tensors["model.layers.0.self_attn.q_b_proj.weight"][3, 5] = torch.inf
    write(source, tensors)
    with pytest.raises(CheckpointError, match="linear_q_up_proj.weight: a value is not finite"):
        to_hf(to_megatron(source, tmp_path / "infinite"), tmp_path / "never", dtype="fp8")


@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_another_type_is_rounded_once_and_noted(tmp_path, dtype, wanted):
    source = make(tmp_path / "hf", "deepseek_v3", torch.float32 if dtype == "bfloat16" else torch.bfloat16)
    checkpoint = to_megatron(source, tmp_path / "megatron")
    back = to_hf(checkpoint, tmp_path / "back", dtype=dtype)
    for name, tensor in read(source).items():
        expected = tensor if name.endswith("correction_bias") else tensor.to(wanted)
        assert torch.equal(read(back)[name], expected), name
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == dtype
    assert verify(back, checkpoint).rounded


@pytest.mark.parametrize("family", ["deepseek_v3 mtp", "glm4 mtp"])
class TestMultiTokenPrediction:
    def test_what_is_dropped_is_said_in_config_and_record(self, tmp_path, family):
        source = make(tmp_path / "hf", family)
        checkpoint = to_megatron(source, tmp_path / "megatron", mtp="drop")
        assert json.loads((checkpoint / RECORD).read_text())["mtp"] == "drop"
        back = to_hf(checkpoint, tmp_path / "back")
        assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0
        kept = {name: one for name, one in read(source).items() if not name.startswith("model.layers.3.")}
        assert same(kept, read(back))
        assert verify(source, checkpoint).absent == len(read(source)) - len(kept) - 2
        with pytest.raises(CheckpointError, match="no weights for multi-token prediction.*--mtp drop"):
            to_hf(checkpoint, tmp_path / "no", config=source)
        assert same(kept, read(to_hf(checkpoint, tmp_path / "explicit", config=source, mtp="drop")))

    def test_what_is_kept_may_be_dropped_on_the_way_back(self, tmp_path, family):
        source = make(tmp_path / "hf", family)
        back = to_hf(to_megatron(source, tmp_path / "megatron"), tmp_path / "back", mtp="drop")
        assert not any(name.startswith("model.layers.3.") for name in read(back))
        assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0

    def test_a_folder_without_what_its_config_announces_is_converted_and_one_with_a_part_is_not(self, tmp_path, family):
        source = make(tmp_path / "hf", family)
        tensors = read(source)
        some = {name: one for name, one in tensors.items() if name != "model.layers.3.enorm.weight"}
        write(source, some)
        with pytest.raises(ModelError, match="1 tensors are missing: model.layers.3.enorm.weight"):
            to_megatron(source, tmp_path / "megatron")
        none = {name: one for name, one in tensors.items() if not name.startswith("model.layers.3.")}
        write(source, none)
        checkpoint = to_megatron(source, tmp_path / "megatron")
        assert json.loads((checkpoint / RECORD).read_text())["mtp"] == "absent"
        assert same(none, read(to_hf(checkpoint, tmp_path / "back")))

    def test_a_copy_with_values_of_its_own_is_refused_but_its_rounding_is_not(self, tmp_path, family):
        source = make(tmp_path / "hf", family, scales=torch.float32)
        tensors = read(source)
        head = "model.layers.3.shared_head.head.weight"
        whole = tensors[head].clone()
        tensors[head][1, 2] += 1
        write(source, tensors)
        with pytest.raises(ModelError, match=rf"convert with --mtp drop: {head} differs from lm_head.weight"):
            to_megatron(source, tmp_path / "megatron")
        scale = (whole.float().abs().max() / 448).view(1, 1)
        rows, columns = (-(-size // 16) for size in whole.shape)
        write(source, tensors | {head: (whole.float() / scale).to(torch.float8_e4m3fn), head + "_scale_inv": scale.repeat(rows, columns)})
        checkpoint = to_megatron(source, tmp_path / "rounded")
        assert torch.equal(read(to_hf(checkpoint, tmp_path / "back"))[head], whole)


def test_a_tied_heads_copy_and_rotary_tables_are_recognised(tmp_path):
    source = make(tmp_path / "hf", "qwen3 tied")
    tensors = read(source)
    head, table = "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    write(source, tensors | {head: tensors["model.embed_tokens.weight"], table: torch.ones(8)})
    checkpoint = to_megatron(source, tmp_path / "megatron")
    record = json.loads((checkpoint / RECORD).read_text())
    assert record["copies"] == {head: "model.embed_tokens.weight"}
    assert record["ignored"] == [table]
    back = read(to_hf(checkpoint, tmp_path / "back"))
    assert same(back, tensors | {head: tensors["model.embed_tokens.weight"]})
    assert verify(source, checkpoint).tensors == len(tensors)
    write(source, tensors | {head: tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(ModelError, match="which would be lost: lm_head.weight differs from model.embed_tokens.weight"):
        to_megatron(source, tmp_path / "other")
