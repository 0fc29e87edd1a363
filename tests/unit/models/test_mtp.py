"""Multi-token prediction: our table against Megatron's module and transformers', by name and by what both compute from one folder."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_glm4_config, write_tiny
from moerl.models import Entry, ModelSpec
from moerl.models.shard import windows
from moerl.train import megatron

SIZES = {"hidden": 64, "layers": 2, "experts": 8, "topk": 4, "expert_width": 32, "initializer_range": 0.1, "mtp": True}
MODELS = {
    "deepseek_v3": tiny_config(**SIZES, groups=4, group_topk=2),
    "glm4": tiny_glm4_config(**SIZES, heads=6, kv_heads=2, head_dim=16),
}
LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def ranks():
    config = Config(model={"path": "unused"}, train={"dtype": "float32", "device": "cpu"})
    yield megatron.initialise(config.parallel, config.train, seed=1)
    megatron.shutdown()


@pytest.fixture(params=MODELS)
def made(request, ranks, tmp_path):
    """(specification, folder, Megatron's model with its layer for multi-token prediction)"""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moerl.train.layers import block_spec

    spec = write_tiny(tmp_path, MODELS[request.param], seed=4)
    config = Config(model={"path": str(tmp_path)}, train={"dtype": "float32", "device": "cpu"})
    asked = replace(spec, megatron=spec.megatron | {"mtp_num_layers": 1})
    settings = megatron.transformer_config(asked, config, ranks)
    block = block_spec(settings, None)
    model = GPTModel(
        config=settings,
        transformer_layer_spec=block,
        mtp_block_spec=get_gpt_mtp_block_spec(settings, block, use_transformer_engine=False),
        vocab_size=spec.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        **spec.megatron_model,
    )
    return spec, tmp_path, model.eval()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")}
    return dict(model.named_parameters()) | biases


def fill(entry: Entry, target: torch.Tensor, stored: dict[str, np.ndarray]) -> None:
    for window in windows(entry.param, 0, 1):
        target[window.in_shard] = torch.from_numpy(stored[entry.hf[window.part]][window.in_hf])


def unsettled(folder: Path) -> dict[str, np.ndarray]:
    """The folder's tensors, with norms and biases that matter."""
    rng = np.random.default_rng(0)
    return {
        name: tensor + (0.1 * rng.standard_normal(tensor.shape)).astype(np.float32) if tensor.ndim == 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def test_megatron_has_the_parameters_of_the_table(made) -> None:
    spec, _, model = made
    found = {name: tuple(tensor.shape) for name, tensor in tensors(model).items()}
    ahead = {name for name in found if name.startswith("mtp.")}
    assert ahead == {entry.megatron for entry in spec.mtp_entries()}
    assert set(found) - ahead == {entry.megatron for entry in spec.entries()}, "copies of the embedding and the head are shared"
    for entry in spec.mtp_entries():
        rows = sum(entry.param.part_shape(part)[0] for part in range(len(entry.hf)))
        assert found[entry.megatron] == (rows, *entry.param.shape[1:]), entry.megatron


@torch.no_grad()
def test_megatron_computes_what_transformers_does(made) -> None:
    """From the embeddings and hidden states of 11 tokens to the final norm: whatever the order of `eh_proj`'s columns, it is one."""
    from moerl.train.packing import pack

    spec, folder, model = made
    stored, held, length = unsettled(folder), tensors(model), 11
    for entry in spec.mtp_entries():
        fill(entry, held[entry.megatron].detach(), stored)
    hidden, embedded = torch.randn(2, length, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    packing = pack(np.array([0, length]), rank=0, size=1, microbatch=0, device=torch.device("cpu"))
    angles = None if spec.latent_attention else model.rotary_pos_emb(length)
    inputs = {"hidden_states": hidden[:, None], "decoder_input": embedded[:, None], "attention_mask": None}
    found = model.mtp.layers[0]._proj_and_transformer_layer(**inputs, rotary_pos_emb=angles, packed_seq_params=packing)
    torch.testing.assert_close(found[:, 0], by_transformers(spec, folder, stored, hidden, embedded), atol=1e-5, rtol=1e-5)


def by_transformers(
    spec: ModelSpec, folder: Path, stored: dict[str, np.ndarray], hidden: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    layer = MtpModel(target, 1).layers[0].eval()
    own = {name.removeprefix(LAYER): torch.from_numpy(tensor) for name, tensor in stored.items() if name.startswith(LAYER)}
    inside = {name: own.pop(name) for name in list(own) if name.startswith(("self_attn.", "mlp.", "input_", "post_attention_"))}
    assert set(own) == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "embed_tokens.weight",
        "shared_head.head.weight",
    }
    experts = {name: inside.pop(name) for name in list(inside) if re.match(r"mlp\.experts\.\d", name)}

    def stacked(part: str) -> torch.Tensor:
        return torch.stack([experts[f"mlp.experts.{expert}.{part}_proj.weight"] for expert in range(spec.experts)])

    inside |= {"mlp.experts.gate_up_proj": torch.cat([stacked("gate"), stacked("up")], 1), "mlp.experts.down_proj": stacked("down")}
    layer.mtp_block.load_state_dict(inside)
    layer.enorm.weight.copy_(own["enorm.weight"])
    layer.hnorm.weight.copy_(own["hnorm.weight"])
    layer.eh_proj.weight.copy_(own["eh_proj.weight"])
    layer.post_norm.weight.copy_(own["shared_head.norm.weight"])
    positions = torch.arange(len(hidden))[None]
    mask = torch.full((len(hidden), len(hidden)), torch.finfo(torch.float32).min).triu(1)[None, None]
    tables = target.model.rotary_emb(embedded[None], position_ids=positions)
    return layer(
        embedded[None], hidden[None], position_embeddings=tables, attention_mask=mask, position_ids=positions, past_key_values=None
    )[0]
