"""GLM-4.5 and GLM-4.5-Air: grouped-query attention with biases, rotary half heads, dense first layers, shared experts, sigmoid routing.

Queries and keys are normalised in the larger model only (`use_qk_norm`). Engines keep the router in float32.

Sources: the published `config.json` of GLM-4.5 and the tensor inventory of GLM-4.5-FP8; arXiv 2508.06471.
"""

from collections.abc import Iterator
from typing import Any

from moerl.models import blocks, checks, gqa
from moerl.models.blocks import M_MLP, MLP
from moerl.models.checks import Fields
from moerl.models.mtp import mtp_params
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("glm4_moe",)

REQUIRED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "rms_norm_eps",
    *gqa.REQUIRED,
)
OPTIONAL = {
    "head_dim": None,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Fields that a config may leave out, and what that means."""

_SPELLINGS = {**checks.SPELLINGS, "num_local_experts": "n_routed_experts"}


def _fields(hf: dict[str, Any]) -> Fields:
    return checks.complete(hf, REQUIRED, OPTIONAL, _SPELLINGS)


def problems(hf: dict[str, Any]) -> Iterator[str]:
    """Everything in a `config.json` that this file does not describe."""
    fields = _fields(hf)
    yield from checks.missing(fields, REQUIRED, MODEL_TYPES[0])
    yield from checks.foreign(hf)
    yield from checks.expected(fields, "hidden_act", ("silu",))
    yield from checks.expected(fields, "scoring_func", ("sigmoid",))
    yield from checks.expected(fields, "topk_method", ("noaux_tc",), "experts are chosen by scores with a correction bias")
    yield from checks.expected(fields, "norm_topk_prob", (True,), "Megatron always normalises sigmoid scores")
    yield from checks.expected(fields, "moe_layer_freq", (1,), "transformers and engines know no other")
    yield from checks.count(fields, "num_nextn_predict_layers", 0, 1)
    yield from checks.routing(fields, "n_routed_experts", best=2, least=2)
    yield from gqa.problems(fields, hf)
    if not fields["head_dim"]:
        yield from checks.divides(fields, "num_attention_heads", "hidden_size")
    if not 0 < fields["partial_rotary_factor"] <= 1:
        yield f"partial_rotary_factor is {fields['partial_rotary_factor']}, expected more than 0 and at most 1"


def _params(fields: Fields) -> tuple[Param, ...]:
    hidden, vocab, experts, width = (fields[n] for n in ("hidden_size", "vocab_size", "n_routed_experts", "moe_intermediate_size"))
    tied = fields["tie_word_embeddings"]
    first, second = blocks.layer_norms(hidden, fused_into="linear_qkv")
    return (
        blocks.embedding(vocab, hidden, tied=tied),
        first,
        *gqa.attention(fields, bias=fields["attention_bias"], norms=fields["use_qk_norm"]),
        second,
        *blocks.gated_mlp(MLP, M_MLP, hidden, fields["intermediate_size"], "dense"),
        blocks.router(experts, hidden, fp32=True),
        blocks.router_bias(experts),
        *blocks.shared_experts(hidden, fields["n_shared_experts"] * width),
        *blocks.routed_experts(hidden, width),
        *blocks.head(vocab, hidden, tied=tied),
    )


def spec(hf: dict[str, Any]) -> ModelSpec:
    """Build the specification from a parsed `config.json` (already known to be of one of `MODEL_TYPES`).

    Raises:
        ModelError: naming every field whose value is not supported.
    """
    checks.refuse("config.json describes a glm4_moe model that is not supported", problems(hf))
    fields = _fields(hf)
    params, moe_layers, experts = _params(fields), blocks.dense_first(fields), fields["n_routed_experts"]
    return ModelSpec(
        family="glm4",
        **blocks.sizes(hf, fields, experts, moe_layers),
        params=params,
        mtp_params=mtp_params(params, fields["hidden_size"]) if fields["num_nextn_predict_layers"] else (),
        megatron={
            **blocks.megatron_moe(fields, experts, moe_layers),
            **blocks.megatron_groups(fields),
            **gqa.megatron(fields),
            "add_qkv_bias": fields["attention_bias"],
            "qk_layernorm": fields["use_qk_norm"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        megatron_model={**gqa.megatron_model(hf), "rotary_percent": float(fields["partial_rotary_factor"])},
    )
