"""Multi-latent attention (MLA), as all DeepSeek families have it: weights, Megatron's options, and what is not supported.

Queries are compressed where `q_lora_rank` is set; keys and values always are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models import blocks, checks
from moerl.models.blocks import ATTN, M_ATTN
from moerl.models.checks import Fields
from moerl.models.spec import Param

REQUIRED = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL = {"q_lora_rank": None, "attention_bias": False, "rope_interleave": True}


def problems(fields: Fields, hf: Mapping[str, Any]) -> Iterator[str]:
    """What is not supported."""
    yield from checks.expected(fields, "attention_bias", (False,), "projections of MLA with a bias are not supported")
    yield from checks.expected(fields, "rope_interleave", (True,), "rotary pairs are neighbours")
    yield from checks.count(fields, "q_lora_rank", 1)
    yield from checks.rope(hf, ("default", "yarn"))


def attention(fields: Fields) -> tuple[Param, ...]:
    """All weights of one layer's attention."""
    hidden, heads, rope, lora = (fields[name] for name in ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
    nope, value, compressed = fields["qk_nope_head_dim"], fields["v_head_dim"], fields["q_lora_rank"] is not None
    down = ATTN + ("fused_qkv_a_proj_with_mqa.weight" if compressed else "kv_a_proj_with_mqa.weight")
    norm, up, out = ATTN + "kv_a_layernorm.weight", ATTN + "kv_b_proj.weight", ATTN + "o_proj.weight"
    kv_down = (ATTN + "kv_a_proj_with_mqa.weight",)
    return (
        *_queries(hidden, heads * (nope + rope), fields["q_lora_rank"], down),
        Param(M_ATTN + "linear_kv_down_proj.weight", kv_down, (lora + rope, hidden), 0, engine=down, engine_replicated=True),
        Param(M_ATTN + "kv_layernorm.weight", (norm,), (lora,), engine=norm, aliases=(M_ATTN + "linear_kv_up_proj.layer_norm_weight",)),
        Param(M_ATTN + "linear_kv_up_proj.weight", (up,), (heads * (nope + value), lora), 0, engine=up),
        Param(M_ATTN + "linear_proj.weight", (out,), (hidden, heads * value), 1, engine=out),
    )


def _queries(hidden: int, width: int, lora: int | None, fused: str) -> tuple[Param, ...]:
    if lora is None:
        name = ATTN + "q_proj.weight"
        return (Param(M_ATTN + "linear_q_proj.weight", (name,), (width, hidden), 0, engine=name),)
    norm, up = ATTN + "q_a_layernorm.weight", ATTN + "q_b_proj.weight"
    return (
        Param(M_ATTN + "linear_q_down_proj.weight", (ATTN + "q_a_proj.weight",), (lora, hidden), 0, engine=fused, engine_replicated=True),
        Param(M_ATTN + "q_layernorm.weight", (norm,), (lora,), engine=norm, aliases=(M_ATTN + "linear_q_up_proj.layer_norm_weight",)),
        Param(M_ATTN + "linear_q_up_proj.weight", (up,), (width, lora), 0, engine=up),
    )


def megatron(fields: Fields, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's options for attention and its rotary embedding."""
    return {
        "num_attention_heads": fields["num_attention_heads"],
        "q_lora_rank": fields["q_lora_rank"],
        "kv_lora_rank": fields["kv_lora_rank"],
        "qk_head_dim": fields["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": fields["qk_rope_head_dim"],
        "v_head_dim": fields["v_head_dim"],
        **_rope(hf),
    }


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    theta, kind, rope = blocks.rope_settings(hf)
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": theta}
    given = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0} | {k: v for k, v in rope.items() if v is not None}
    return {
        "rope_type": "yarn",
        "rotary_base": theta,
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": int(given["original_max_position_embeddings"]),
        **{name: float(given[name]) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
