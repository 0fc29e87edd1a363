"""What model families have in common: embeddings, gated MLPs, routed and shared experts, which layers have them, rotary settings.

A family file puts its `Param`s together from these and from its attention (`mla`, `gqa`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moerl.models.checks import Fields
from moerl.models.spec import LayerKind, Param

ATTN = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."
M_ATTN = "decoder.layers.{layer}.self_attention."
M_MLP = "decoder.layers.{layer}.mlp."

_EXPERT = MLP + "experts.{expert}."
_M_EXPERT = M_MLP + "experts.local_experts.{expert}."
_M_GROUPED = M_MLP + "experts."


def embedding(vocab: int, hidden: int, *, tied: bool) -> Param:
    """The embedding; where the output layer is tied to it, the last pipeline stage holds a copy under that layer's name."""
    name = "model.embed_tokens.weight"
    aliases = ("output_layer.weight",) if tied else ()
    return Param("embedding.word_embeddings.weight", (name,), (vocab, hidden), 0, "once", engine=name, aliases=aliases)


def head(vocab: int, hidden: int, *, tied: bool) -> tuple[Param, ...]:
    """The final norm, and an output layer of its own unless it is tied to the embedding."""
    norm = Param("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), None, "once", engine="model.norm.weight")
    if tied:
        return (norm,)
    return (norm, Param("output_layer.weight", ("lm_head.weight",), (vocab, hidden), 0, "once", engine="lm_head.weight"))


def layer_norms(hidden: int, *, fused_into: str = "") -> tuple[Param, Param]:
    """The norms before attention and before the MLP.

    Args:
        fused_into: the attention's first linear, if Transformer Engine makes the norm part of it.
    """
    first, second = (f"model.layers.{{layer}}.{name}_layernorm.weight" for name in ("input", "post_attention"))
    aliases = (f"{M_ATTN}{fused_into}.layer_norm_weight",) if fused_into else ()
    return (
        Param("decoder.layers.{layer}.input_layernorm.weight", (first,), (hidden,), engine=first, aliases=aliases),
        Param(
            "decoder.layers.{layer}.pre_mlp_layernorm.weight",
            (second,),
            (hidden,),
            engine=second,
            aliases=(M_MLP + "linear_fc1.layer_norm_weight",),
        ),
    )


def router(experts: int, hidden: int, *, fp32: bool = False) -> Param:
    """The router's scores.

    Args:
        fp32: engines keep them in float32.
    """
    name = MLP + "gate.weight"
    return Param(M_MLP + "router.weight", (name,), (experts, hidden), layers="moe", engine=name, fp32=fp32)


def router_bias(experts: int) -> Param:
    """The correction that is added to the scores for the choice of experts only."""
    name = MLP + "gate.e_score_correction_bias"
    return Param(M_MLP + "router.expert_bias", (name,), (experts,), layers="moe", engine=name, fp32=True)


def shared_experts(hidden: int, width: int) -> tuple[Param, ...]:
    """The experts that every token uses: one gated MLP of all their widths together; none where that is 0."""
    return gated_mlp(MLP + "shared_experts.", M_MLP + "shared_experts.", hidden, width, "moe") if width else ()


def gated_mlp(prefix_hf: str, prefix_megatron: str, hidden: int, width: int, layers: LayerKind) -> tuple[Param, ...]:
    """A gated MLP: gate and up stacked in `linear_fc1`, down in `linear_fc2`."""
    up = (prefix_hf + "gate_proj.weight", prefix_hf + "up_proj.weight")
    down = prefix_hf + "down_proj.weight"
    return (
        Param(prefix_megatron + "linear_fc1.weight", up, (width, hidden), 0, layers, engine=prefix_hf + "gate_up_proj.weight"),
        Param(prefix_megatron + "linear_fc2.weight", (down,), (hidden, width), 1, layers, engine=down),
    )


def routed_experts(hidden: int, width: int) -> tuple[Param, ...]:
    """The routed experts: gated MLPs, one per expert, which engines stack."""
    return (
        Param(
            _M_EXPERT + "linear_fc1.weight",
            (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
            (width, hidden),
            tp_axis=0,
            layers="moe",
            expert=True,
            engine=MLP + "experts.w13_weight",
            aliases=(_M_GROUPED + "linear_fc1.weight{expert}",),
        ),
        Param(
            _M_EXPERT + "linear_fc2.weight",
            (_EXPERT + "down_proj.weight",),
            (hidden, width),
            tp_axis=1,
            layers="moe",
            expert=True,
            engine=MLP + "experts.w2_weight",
            aliases=(_M_GROUPED + "linear_fc2.weight{expert}",),
        ),
    )


def dense_first(fields: Fields) -> tuple[int, ...]:
    """MoE layers of a model whose first layers are dense: from `first_k_dense_replace` on, those that `moe_layer_freq` divides."""
    first, step = fields["first_k_dense_replace"], fields["moe_layer_freq"]
    return tuple(layer for layer in range(fields["num_hidden_layers"]) if layer >= first and layer % step == 0)


def sizes(hf: dict[str, Any], fields: Fields, experts: int, moe_layers: tuple[int, ...]) -> dict[str, Any]:
    """What `ModelSpec` wants to know of every model."""
    return {
        "hf_config": hf,
        "layers": fields["num_hidden_layers"],
        "moe_layers": moe_layers,
        "experts": experts,
        "topk": fields["num_experts_per_tok"],
        "hidden_size": fields["hidden_size"],
        "vocab_size": fields["vocab_size"],
        "tied_embeddings": fields["tie_word_embeddings"],
    }


def megatron_moe(fields: Fields, experts: int, moe_layers: Sequence[int]) -> dict[str, Any]:
    """Megatron's options that every family has: sizes, and which layers route to how many of how many experts."""
    chosen = set(moe_layers)
    return {
        "num_layers": fields["num_hidden_layers"],
        "hidden_size": fields["hidden_size"],
        "ffn_hidden_size": fields["intermediate_size"],
        "layernorm_epsilon": fields["rms_norm_eps"],
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": fields["moe_intermediate_size"],
        "moe_layer_freq": [int(layer in chosen) for layer in range(fields["num_hidden_layers"])],
        "moe_router_topk": fields["num_experts_per_tok"],
    }


def megatron_groups(fields: Fields) -> dict[str, Any]:
    """Megatron's options for shared experts, and for a choice that is scaled and limited to the best groups of experts."""
    groups, shared = fields["n_group"], fields["n_shared_experts"] * fields["moe_intermediate_size"]
    return {
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": fields["topk_group"] if groups > 1 else None,
        "moe_router_topk_scaling_factor": float(fields["routed_scaling_factor"]),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def rope_settings(hf: Mapping[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """(base, kind, all else) of the rotary embedding; from `rope_scaling`, or the `rope_parameters` that transformers >= 5 writes."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = hf["rope_theta"] if "rope_theta" in hf else rope.get("rope_theta", 10000.0)
    return float(theta), rope.get("rope_type") or rope.get("type") or "default", rope
