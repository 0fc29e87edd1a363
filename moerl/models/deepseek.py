"""DeepSeek-V2/V3 and its relatives (Moonlight, Kimi-K2): MLA, a few dense layers, shared experts, grouped routing.

Sources: the published `config.json` and tensor inventories of DeepSeek-V3, Kimi-K2 and Moonlight; arXiv 2412.19437.
"""

from typing import Any

from moerl.models import blocks
from moerl.models.blocks import ATTN, M_ATTN, M_MLP, MLP
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("deepseek_v3", "kimi_k2")


def _attention(hf: dict[str, Any]) -> tuple[Param, ...]:
    hidden, heads, rope, lora = hf["hidden_size"], hf["num_attention_heads"], hf["qk_rope_head_dim"], hf["kv_lora_rank"]
    nope, value, q_lora = hf["qk_nope_head_dim"], hf["v_head_dim"], hf.get("q_lora_rank")
    fused = ATTN + "fused_qkv_a_proj_with_mqa.weight"
    if q_lora:
        query = (
            Param(
                M_ATTN + "linear_q_down_proj.weight",
                (ATTN + "q_a_proj.weight",),
                (q_lora, hidden),
                0,
                engine=fused,
                engine_replicated=True,
            ),
            Param(
                M_ATTN + "q_layernorm.weight",
                (ATTN + "q_a_layernorm.weight",),
                (q_lora,),
                engine=ATTN + "q_a_layernorm.weight",
                aliases=(M_ATTN + "linear_q_up_proj.layer_norm_weight",),
            ),
            Param(
                M_ATTN + "linear_q_up_proj.weight",
                (ATTN + "q_b_proj.weight",),
                (heads * (nope + rope), q_lora),
                0,
                engine=ATTN + "q_b_proj.weight",
            ),
        )
    else:
        fused = ATTN + "kv_a_proj_with_mqa.weight"
        name = ATTN + "q_proj.weight"
        query = (Param(M_ATTN + "linear_q_proj.weight", (name,), (heads * (nope + rope), hidden), 0, engine=name),)
    return (
        *query,
        Param(
            M_ATTN + "linear_kv_down_proj.weight",
            (ATTN + "kv_a_proj_with_mqa.weight",),
            (lora + rope, hidden),
            0,
            engine=fused,
            engine_replicated=True,
        ),
        Param(
            M_ATTN + "kv_layernorm.weight",
            (ATTN + "kv_a_layernorm.weight",),
            (lora,),
            engine=ATTN + "kv_a_layernorm.weight",
            aliases=(M_ATTN + "linear_kv_up_proj.layer_norm_weight",),
        ),
        Param(
            M_ATTN + "linear_kv_up_proj.weight",
            (ATTN + "kv_b_proj.weight",),
            (heads * (nope + value), lora),
            0,
            engine=ATTN + "kv_b_proj.weight",
        ),
        Param(
            M_ATTN + "linear_proj.weight",
            (ATTN + "o_proj.weight",),
            (hidden, heads * value),
            1,
            engine=ATTN + "o_proj.weight",
        ),
    )


def _params(hf: dict[str, Any], shared: int, bias: bool, tied: bool) -> tuple[Param, ...]:
    hidden, vocab, width = hf["hidden_size"], hf["vocab_size"], hf["moe_intermediate_size"]
    first, second = blocks.layer_norms(hidden)
    params = [
        blocks.embedding(vocab, hidden, tied=tied),
        first,
        *_attention(hf),
        second,
        *blocks.gated_mlp(MLP, M_MLP, hidden, hf["intermediate_size"], "dense"),
        blocks.router(hf["n_routed_experts"], hidden),
    ]
    if bias:
        name = MLP + "gate.e_score_correction_bias"
        params.append(Param(M_MLP + "router.expert_bias", (name,), (hf["n_routed_experts"],), layers="moe", engine=name, fp32=True))
    if shared:
        params += blocks.gated_mlp(MLP + "shared_experts.", M_MLP + "shared_experts.", hidden, shared * width, "moe")
    return (*params, *blocks.routed_experts(hidden, width), *blocks.head(vocab, hidden, tied=tied))


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Megatron's rotary settings."""
    theta, kind, rope = blocks.rope_settings(hf)
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": theta}
    return {
        "rope_type": "yarn",
        "rotary_base": theta,
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast", 32)),
        "beta_slow": float(rope.get("beta_slow", 1)),
        "mscale": float(rope.get("mscale", 1.0)),
        "mscale_all_dim": float(rope.get("mscale_all_dim", 0.0)),
    }


def spec(hf: dict[str, Any]) -> ModelSpec:
    """Build the specification from a parsed `config.json` (already known to be of one of `MODEL_TYPES`)."""
    layers, dense, freq = hf["num_hidden_layers"], hf["first_k_dense_replace"], hf.get("moe_layer_freq", 1)
    moe_layers = tuple(i for i in range(layers) if i >= dense and i % freq == 0)
    shared = hf.get("n_shared_experts") or 0
    bias = hf.get("topk_method", "noaux_tc") == "noaux_tc"
    tied = bool(hf.get("tie_word_embeddings", False))
    groups = hf.get("n_group") or 1
    megatron = {
        "num_layers": layers,
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(i in set(moe_layers)) for i in range(layers)],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": hf.get("topk_group") if groups > 1 else None,
        "moe_router_score_function": hf.get("scoring_func", "sigmoid"),
        "moe_router_enable_expert_bias": bias,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
        "moe_shared_expert_intermediate_size": shared * hf["moe_intermediate_size"] if shared else None,
        **_rope(hf),
    }
    return ModelSpec(
        family="deepseek",
        hf_config=hf,
        layers=layers,
        moe_layers=moe_layers,
        experts=hf["n_routed_experts"],
        topk=hf["num_experts_per_tok"],
        hidden_size=hf["hidden_size"],
        vocab_size=hf["vocab_size"],
        tied_embeddings=tied,
        params=_params(hf, shared, bias, tied),
        megatron=megatron,
    )
