"""Hugging Face folders for the tests of conversions: every family, with weights of all kinds of bits, plain and quantised."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moerl.convert import hf_to_megatron, megatron_to_hf
from moerl.convert.limits import Limits
from moerl.convert.survey import survey
from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.models import read_spec
from moerl.numerics.fp8 import quantise_blocks

BLOCK = (16, 16)
_SIZES: dict[str, Any] = {"hidden": 48, "layers": 3, "experts": 4, "expert_width": 24}
_GROUPED: dict[str, Any] = _SIZES | {"topk": 2, "heads": 6, "kv_heads": 2, "head_dim": 16}
CONFIGS = {
    "deepseek_v3": tiny_config(**_SIZES, topk=2, groups=2, group_topk=1) | {"vocab_size": 17},
    "deepseek_v3 mtp": tiny_config(**_SIZES, topk=2, groups=2, group_topk=1) | {"num_nextn_predict_layers": 1},
    "deepseek_v3 plain queries": tiny_config(**_SIZES, topk=2, groups=2, group_topk=1) | {"q_lora_rank": None},
    "deepseek_v2": tiny_deepseek_v2_config(**_SIZES, topk=2, groups=2, group_topk=1),
    "deepseek_v2 lite": tiny_deepseek_v2_config(**_SIZES, topk=2, groups=1, group_topk=1),
    "qwen3": tiny_qwen3_config(**_GROUPED),
    "qwen3 tied": tiny_qwen3_config(**_GROUPED) | {"tie_word_embeddings": True, "mlp_only_layers": [1]},
    "glm4": tiny_glm4_config(**_GROUPED),
    "glm4 air": tiny_glm4_config(**_GROUPED, qk_norm=False),
    "glm4 mtp": tiny_glm4_config(**_GROUPED) | {"num_nextn_predict_layers": 1},
}
SMALL = Limits(workers=2, chunk_elements=3000, file_bytes=100_000)
"""Several chunks for a tensor, and many files, even of a tiny model."""


def make(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, *, scales: torch.dtype | str | None = None) -> Path:
    """A folder with tokenizer and config.

    Args:
        scales: quantise all linear weights: by blocks, with scales of this type; "rows": by rows, as GLM's.
    """
    config = CONFIGS[family]
    if scales is not None:
        weights = {"weight_block_size": list(BLOCK), "quant_method": "fp8"} if scales != "rows" else {"quant_method": "compressed-tensors"}
        config = config | {"quantization_config": weights}
    write_tiny(folder, config | {"torch_dtype": str(dtype).removeprefix("torch.")}, seed=3)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    # Norms and biases too get values of their own, or a mix-up would go unnoticed; all but copies.
    spec = read_spec(folder)
    copies = spec.mtp_copies()
    for name, tensor in tensors.items():
        tensors[name] = torch.randn(tensor.shape, generator=generator).to(torch.float32 if name.endswith("correction_bias") else dtype)
    for name, of in copies.items():
        if name in tensors:
            tensors[name] = tensors[of].clone()
    if scales is not None:
        tensors = dict(_quantised(tensors, scales))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write(folder, tensors)
    return folder


def write(folder: Path, tensors: Mapping[str, torch.Tensor], parts: int = 3) -> None:
    """Replace the folder's weights, spread over some files with an index."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    names = sorted(tensors)
    placed = {name: f"model-{number % parts + 1:05d}-of-{parts:05d}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(placed.values())):
        save_file({name: tensors[name].contiguous() for name in names if placed[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def to_megatron(folder: Path, out: Path, *, mtp: str = "keep", sizes: Limits = SMALL) -> Path:
    hf_to_megatron.convert(survey(folder, mtp), out, sizes)
    return out


def to_hf(
    checkpoint: Path, out: Path, *, config: Path | None = None, dtype: str = "keep", mtp: str = "keep", sizes: Limits = SMALL
) -> Path:
    megatron_to_hf.convert(megatron_to_hf.plan(checkpoint, config, dtype=dtype, mtp=mtp, sizes=lambda _: sizes), out)
    return out


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].shape == right[name].shape and _bits(left[name]).equal(_bits(right[name]))
        for name in left
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def is_linear(name: str) -> bool:
    return "_proj" in name and name.endswith(".weight") and "eh_proj" not in name


def _quantised(tensors: Mapping[str, torch.Tensor], scales: torch.dtype | str):
    for name, tensor in tensors.items():
        if not is_linear(name):
            yield name, tensor
        elif scales == "rows":
            scale = (tensor.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
            yield name, (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            yield name + "_scale", scale
        else:
            values, scale = quantise_blocks(tensor, BLOCK)
            yield name, values
            yield name + "_scale_inv", scale.to(scales)


def dequantised(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantised weights stand for: element times scale in float32, rounded once."""
    found = {}
    for name, tensor in tensors.items():
        if name + "_scale_inv" in tensors:
            scale = tensors[name + "_scale_inv"].float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            found[name] = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).to(torch.bfloat16)
        elif name + "_scale" in tensors:
            found[name] = (tensor.float() * tensors[name + "_scale"].float()).to(torch.bfloat16)
        elif not name.endswith(("_scale_inv", "_scale")):
            found[name] = tensor
    return found
