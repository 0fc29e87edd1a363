"""The layer for multi-token prediction that DeepSeek-V3 and GLM-4.5 store behind their decoder layers.

    embedding of the next token --enorm--+
                                         +--concatenated, in this order--> eh_proj --> a decoder layer with experts --> final norm
    hidden state of this token ---hnorm--+

In the checkpoint it is one more layer of `model.layers`, which holds copies of the embedding and the output layer too
(`ModelSpec.mtp_copies`). Megatron calls it `mtp.layers.0`; SGLang builds it as a draft model of its own. All three concatenate in the
same order, so `eh_proj` needs no permutation.
"""

from collections.abc import Sequence
from dataclasses import replace

from moerl.models.spec import Param

HF = "model.layers.{layer}."
MEGATRON = "mtp.layers.0."
_ENGINE = "model."


def mtp_params(params: Sequence[Param], hidden: int) -> tuple[Param, ...]:
    """Kinds of weights of the layer for multi-token prediction.

    Args:
        params: the model's, whose MoE decoder layer it repeats.
    """
    vector, final = (hidden,), "shared_head.norm.weight"
    before = [
        Param(MEGATRON + f"{norm}.weight", (HF + f"{norm}.weight",), vector, None, "mtp", engine=_ENGINE + f"{norm}.weight")
        for norm in ("enorm", "hnorm")
    ]
    project = "eh_proj.weight"
    return (
        *before,
        Param(MEGATRON + project, (HF + project,), (hidden, 2 * hidden), 0, "mtp", engine=_ENGINE + project, engine_replicated=True),
        *(_inside(param) for param in params if param.layers in ("all", "moe")),
        Param(MEGATRON + "final_layernorm.weight", (HF + final,), vector, None, "mtp", engine=_ENGINE + final),
    )


def _inside(param: Param) -> Param:
    """A decoder layer's weight, as the same weight of this layer."""

    def renamed(name: str) -> str:
        return name.replace("decoder.layers.{layer}.", MEGATRON + "mtp_model_layer.")

    return replace(
        param,
        megatron=renamed(param.megatron),
        aliases=tuple(renamed(name) for name in param.aliases),
        engine=param.engine.replace(HF, _ENGINE + "decoder."),
        layers="mtp",
    )
