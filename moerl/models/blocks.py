"""What model families have in common: embeddings, gated MLPs, routed experts, and how a config spells its rotary settings.

A family file puts its `Param`s together from these and from its own attention.
"""

from typing import Any

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


def router(experts: int, hidden: int) -> Param:
    """The router's scores."""
    return Param(M_MLP + "router.weight", (MLP + "gate.weight",), (experts, hidden), layers="moe", engine=MLP + "gate.weight")


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


def rope_settings(hf: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """(base, kind, all else) of the rotary embedding; from `rope_scaling`, or the `rope_parameters` that transformers >= 5 writes."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = hf["rope_theta"] if "rope_theta" in hf else rope.get("rope_theta", 10000.0)
    return float(theta), rope.get("rope_type") or rope.get("type") or "default", rope
