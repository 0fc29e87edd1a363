"""From a row of a Megatron checkpoint's tensor to a row of a Hugging Face tensor, by a table of its own, for verification.

    ("decoder.layers.3.self_attention.linear_qkv.weight", rows 0:512) --runs--> q_proj rows 0:256, k_proj rows 0:128, v_proj rows 0:128

Written apart from `moerl.models` on purpose: a mistake there, in a conversion that is built on it, is not repeated here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ATTENTION = {
    "linear_proj": ("o_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
}
_NORMS = {  # where Megatron's layers and Transformer Engine's have them
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_AHEAD = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
_MLPS = {"mlp.": "mlp.", "mlp.shared_experts.": "mlp.shared_experts.", "mlp.experts.experts.": "mlp.experts.{expert}."}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_LINEAR = re.compile(r"(.*?)(linear_fc[12])\.weight")


@dataclass(frozen=True)
class Model:
    """What the table needs of config.json. `heads`, `groups`: query heads and key-value heads."""

    layers: int
    heads: int
    groups: int
    latent: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Model":
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        return cls(config["num_hidden_layers"], heads, groups, bool(config.get("kv_lora_rank")))


@dataclass(frozen=True)
class Run:
    """Consecutive rows: `count` from `first` of an HF tensor are those from `at` of the Megatron tensor."""

    name: str
    first: int
    at: int
    count: int


def parts_of(key: str, expert: int | None, model: Model) -> tuple[str, ...] | None:
    """HF tensors that make up a Megatron tensor (of one expert), in order; None if the table has no such tensor."""
    if key in _OUTER:
        return (_OUTER[key],)
    if match := _MTP.fullmatch(key):
        prefix, rest = f"model.layers.{model.layers + int(match[1])}.", match[2]
        if (outer := rest.removesuffix(".weight")) in _AHEAD:
            return (f"{prefix}{_AHEAD[outer]}.weight",)
        rest = rest.removeprefix("transformer_layer.")
    elif match := _LAYER.fullmatch(key):
        prefix, rest = f"model.layers.{match[1]}.", match[2]
    else:
        return None
    inner = _inner(rest, model)
    return None if inner is None else tuple(prefix + name.format(expert=expert) for name in inner)


def _inner(rest: str, model: Model) -> tuple[str, ...] | None:
    if rest in _NORMS:
        return (_NORMS[rest],)
    if rest == "self_attention.q_layernorm.weight":
        return ("self_attn.q_a_layernorm.weight" if model.latent else "self_attn.q_norm.weight",)
    if rest.startswith("self_attention."):
        module, _, leaf = rest.removeprefix("self_attention.").partition(".")
        return tuple(f"self_attn.{name}.{leaf}" for name in _ATTENTION[module]) if module in _ATTENTION else None
    if rest in ("mlp.router.weight", "mlp.router.expert_bias"):
        return ("mlp.gate.weight" if rest.endswith("weight") else "mlp.gate.e_score_correction_bias",)
    if (match := _LINEAR.fullmatch(rest)) and match[1] in _MLPS:
        return tuple(
            _MLPS[match[1]] + f"{name}.weight" for name in (("gate_proj", "up_proj") if match[2] == "linear_fc1" else ("down_proj",))
        )
    return None


def runs(parts: tuple[str, ...], rows: int, first: int, last: int, model: Model) -> Iterator[Run]:
    """Where the rows from `first` to `last` - 1 of a Megatron tensor with `rows` rows are.

    Args:
        parts: from `parts_of`.
    """
    at = first
    while at < last:
        name, row, left = _place(parts, rows, at, model)
        count = min(left, last - at)
        yield Run(name, row, at, count)
        at += count


def _place(parts: tuple[str, ...], rows: int, at: int, model: Model) -> tuple[str, int, int]:
    """(HF tensor, its row, rows from there on that follow it in both)"""
    if len(parts) < 3:
        each = rows // len(parts)
        return parts[at // each], at % each, each - at % each
    width = rows // (model.heads + 2 * model.groups)
    queries = model.heads // model.groups * width
    group, inside = divmod(at, queries + 2 * width)
    if inside < queries:
        return parts[0], group * queries + inside, queries - inside
    part, inside = divmod(inside - queries, width)
    return parts[1 + part], group * width + inside, width - inside
