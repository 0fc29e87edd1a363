"""Qwen3-MoE: grouped-query attention with normalised queries and keys, softmax routing, no shared experts.

Sources: the published `config.json` and tensor inventory of Qwen3-30B-A3B and the `config.json` of Qwen3-235B-A22B; arXiv 2505.09388.
"""

from collections.abc import Iterator
from typing import Any

from moerl.errors import ModelError
from moerl.models import blocks
from moerl.models.blocks import ATTN, M_ATTN, M_MLP, MLP
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("qwen3_moe",)


def _attention(hidden: int, heads: int, kv_heads: int, head: int) -> tuple[Param, ...]:
    parts = ((heads * head, hidden), (kv_heads * head, hidden), (kv_heads * head, hidden))
    return (
        Param(
            M_ATTN + "linear_qkv.weight",
            tuple(f"{ATTN}{part}_proj.weight" for part in "qkv"),
            parts[0],
            0,
            engine=ATTN + "qkv_proj.weight",
            part_shapes=parts,
            head_rows=head,
        ),
        Param(M_ATTN + "q_layernorm.weight", (ATTN + "q_norm.weight",), (head,), engine=ATTN + "q_norm.weight"),
        Param(M_ATTN + "k_layernorm.weight", (ATTN + "k_norm.weight",), (head,), engine=ATTN + "k_norm.weight"),
        Param(M_ATTN + "linear_proj.weight", (ATTN + "o_proj.weight",), (hidden, heads * head), 1, engine=ATTN + "o_proj.weight"),
    )


def _params(hf: dict[str, Any], experts: int, kv_heads: int, head: int, *, tied: bool) -> tuple[Param, ...]:
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    first, second = blocks.layer_norms(hidden, fused_into="linear_qkv")
    return (
        blocks.embedding(vocab, hidden, tied=tied),
        first,
        *_attention(hidden, hf["num_attention_heads"], kv_heads, head),
        second,
        *blocks.gated_mlp(MLP, M_MLP, hidden, hf["intermediate_size"], "dense"),
        blocks.router(experts, hidden),
        *blocks.routed_experts(hidden, hf["moe_intermediate_size"]),
        *blocks.head(vocab, hidden, tied=tied),
    )


def _unsupported(hf: dict[str, Any]) -> Iterator[str]:
    """Fields whose values this family file does not describe."""
    if hf.get("attention_bias"):
        yield "attention_bias is true, expected false: projections with a bias are not supported"
    if hf.get("use_sliding_window"):
        yield "use_sliding_window is true, expected false: attention over a sliding window is not supported"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {hf['hidden_act']!r}, expected 'silu'"
    kind = blocks.rope_settings(hf)[1]
    if kind != "default":
        field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
        yield f"{field} asks for {kind!r}, expected none or 'default': scaled rotary embeddings are not supported"
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    if heads % kv_heads:
        yield f"num_attention_heads is {heads}, expected a multiple of num_key_value_heads, which is {kv_heads}"
    if hf.get("decoder_sparse_step", 1) < 1:
        yield f"decoder_sparse_step is {hf['decoder_sparse_step']}, expected at least 1"


def _moe_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    dense, step = set(hf.get("mlp_only_layers") or ()), hf.get("decoder_sparse_step", 1)
    return tuple(layer for layer in range(hf["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0)


def spec(hf: dict[str, Any]) -> ModelSpec:
    """Build the specification from a parsed `config.json` (already known to be of one of `MODEL_TYPES`).

    Raises:
        ModelError: naming every field whose value is not supported.
    """
    if wrong := list(_unsupported(hf)):
        raise ModelError("config.json describes a qwen3_moe model that is not supported:\n" + "\n".join(f"  - {line}" for line in wrong))
    layers, moe_layers = hf["num_hidden_layers"], _moe_layers(hf)
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    head = hf.get("head_dim") or hf["hidden_size"] // heads
    experts = hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]  # the latter is what transformers >= 5 writes
    tied = bool(hf.get("tie_word_embeddings", False))
    megatron = {
        "num_layers": layers,
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": head,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(layer in moe_layers) for layer in range(layers)],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts alone is softmax over all of them, normalised afterwards.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_enable_expert_bias": False,
    }
    return ModelSpec(
        family="qwen3",
        hf_config=hf,
        layers=layers,
        moe_layers=moe_layers,
        experts=experts,
        topk=hf["num_experts_per_tok"],
        hidden_size=hf["hidden_size"],
        vocab_size=hf["vocab_size"],
        tied_embeddings=tied,
        params=_params(hf, experts, kv_heads, head, tied=tied),
        megatron=megatron,
        megatron_model={"rotary_base": blocks.rope_settings(hf)[0]},
    )
