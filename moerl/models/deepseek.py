"""DeepSeek-V2/V3 and its relatives (Moonlight, Kimi-K2): MLA, a few dense layers, shared experts, grouped routing.

Sources: the published `config.json` and tensor inventories of DeepSeek-V3, Kimi-K2 and Moonlight; arXiv 2412.19437.
"""

from typing import Any

from moerl.models.spec import LayerKind, ModelSpec, Param

MODEL_TYPES = ("deepseek_v3", "kimi_k2")

_ATTN = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_M_ATTN = "decoder.layers.{layer}.self_attention."
_M_MLP = "decoder.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."
_M_EXPERT = _M_MLP + "experts.local_experts.{expert}."
_M_GROUPED = _M_MLP + "experts."


def _attention(hf: dict[str, Any]) -> tuple[Param, ...]:
    hidden, heads, rope, lora = hf["hidden_size"], hf["num_attention_heads"], hf["qk_rope_head_dim"], hf["kv_lora_rank"]
    nope, value, q_lora = hf["qk_nope_head_dim"], hf["v_head_dim"], hf.get("q_lora_rank")
    fused = _ATTN + "fused_qkv_a_proj_with_mqa.weight"
    if q_lora:
        query = (
            Param(
                _M_ATTN + "linear_q_down_proj.weight",
                (_ATTN + "q_a_proj.weight",),
                (q_lora, hidden),
                0,
                engine=fused,
                engine_replicated=True,
            ),
            Param(
                _M_ATTN + "q_layernorm.weight",
                (_ATTN + "q_a_layernorm.weight",),
                (q_lora,),
                engine=_ATTN + "q_a_layernorm.weight",
                aliases=(_M_ATTN + "linear_q_up_proj.layer_norm_weight",),
            ),
            Param(
                _M_ATTN + "linear_q_up_proj.weight",
                (_ATTN + "q_b_proj.weight",),
                (heads * (nope + rope), q_lora),
                0,
                engine=_ATTN + "q_b_proj.weight",
            ),
        )
    else:
        fused = _ATTN + "kv_a_proj_with_mqa.weight"
        name = _ATTN + "q_proj.weight"
        query = (Param(_M_ATTN + "linear_q_proj.weight", (name,), (heads * (nope + rope), hidden), 0, engine=name),)
    return (
        *query,
        Param(
            _M_ATTN + "linear_kv_down_proj.weight",
            (_ATTN + "kv_a_proj_with_mqa.weight",),
            (lora + rope, hidden),
            0,
            engine=fused,
            engine_replicated=True,
        ),
        Param(
            _M_ATTN + "kv_layernorm.weight",
            (_ATTN + "kv_a_layernorm.weight",),
            (lora,),
            engine=_ATTN + "kv_a_layernorm.weight",
            aliases=(_M_ATTN + "linear_kv_up_proj.layer_norm_weight",),
        ),
        Param(
            _M_ATTN + "linear_kv_up_proj.weight",
            (_ATTN + "kv_b_proj.weight",),
            (heads * (nope + value), lora),
            0,
            engine=_ATTN + "kv_b_proj.weight",
        ),
        Param(
            _M_ATTN + "linear_proj.weight",
            (_ATTN + "o_proj.weight",),
            (hidden, heads * value),
            1,
            engine=_ATTN + "o_proj.weight",
        ),
    )


def _mlp(prefix_hf: str, prefix_megatron: str, hidden: int, width: int, layers: LayerKind) -> tuple[Param, ...]:
    """A gated MLP: gate and up stacked in `linear_fc1`, down in `linear_fc2`."""
    up = (prefix_hf + "gate_proj.weight", prefix_hf + "up_proj.weight")
    down = prefix_hf + "down_proj.weight"
    return (
        Param(prefix_megatron + "linear_fc1.weight", up, (width, hidden), 0, layers, engine=prefix_hf + "gate_up_proj.weight"),
        Param(prefix_megatron + "linear_fc2.weight", (down,), (hidden, width), 1, layers, engine=down),
    )


def _experts(hidden: int, width: int) -> tuple[Param, ...]:
    return (
        Param(
            _M_EXPERT + "linear_fc1.weight",
            (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
            (width, hidden),
            tp_axis=0,
            layers="moe",
            expert=True,
            engine=_MLP + "experts.w13_weight",
            aliases=(_M_GROUPED + "linear_fc1.weight{expert}",),
        ),
        Param(
            _M_EXPERT + "linear_fc2.weight",
            (_EXPERT + "down_proj.weight",),
            (hidden, width),
            tp_axis=1,
            layers="moe",
            expert=True,
            engine=_MLP + "experts.w2_weight",
            aliases=(_M_GROUPED + "linear_fc2.weight{expert}",),
        ),
    )


def _params(hf: dict[str, Any], shared: int, bias: bool) -> tuple[Param, ...]:
    hidden, vocab, experts, width = hf["hidden_size"], hf["vocab_size"], hf["n_routed_experts"], hf["moe_intermediate_size"]
    norm = "model.layers.{layer}.input_layernorm.weight"
    post = "model.layers.{layer}.post_attention_layernorm.weight"
    embed, gate = "model.embed_tokens.weight", _MLP + "gate.weight"
    params = [
        Param("embedding.word_embeddings.weight", (embed,), (vocab, hidden), 0, "once", engine=embed),
        Param("decoder.layers.{layer}.input_layernorm.weight", (norm,), (hidden,), engine=norm),
        *_attention(hf),
        Param(
            "decoder.layers.{layer}.pre_mlp_layernorm.weight",
            (post,),
            (hidden,),
            engine=post,
            aliases=(_M_MLP + "linear_fc1.layer_norm_weight",),
        ),
        *_mlp(_MLP, _M_MLP, hidden, hf["intermediate_size"], "dense"),
        Param(_M_MLP + "router.weight", (gate,), (experts, hidden), layers="moe", engine=gate),
    ]
    if bias:
        name = _MLP + "gate.e_score_correction_bias"
        params.append(Param(_M_MLP + "router.expert_bias", (name,), (experts,), layers="moe", engine=name, fp32=True))
    if shared:
        params += _mlp(_MLP + "shared_experts.", _M_MLP + "shared_experts.", hidden, shared * width, "moe")
    return (
        *params,
        *_experts(hidden, width),
        Param("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), None, "once", engine="model.norm.weight"),
        Param("output_layer.weight", ("lm_head.weight",), (vocab, hidden), 0, "once", engine="lm_head.weight"),
    )


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Megatron's rotary settings; accepts `rope_scaling` and the `rope_parameters` that transformers >= 5 writes."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = hf["rope_theta"] if "rope_theta" in hf else rope.get("rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": float(theta)}
    return {
        "rope_type": "yarn",
        "rotary_base": float(theta),
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
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        params=_params(hf, shared, bias),
        megatron=megatron,
    )
