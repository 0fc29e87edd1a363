"""DeepSeek-V3 and its relatives (R1, V3.1, Kimi-K2, Moonlight): MLA, a few dense layers, shared experts, grouped sigmoid routing.

Sources: the published `config.json` and tensor inventories of DeepSeek-V3, Kimi-K2 and Moonlight; arXiv 2412.19437.
"""

from collections.abc import Iterator
from typing import Any

from moerl.models import blocks, checks, mla
from moerl.models.blocks import M_MLP, MLP
from moerl.models.checks import Fields
from moerl.models.mtp import mtp_params
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("deepseek_v3", "kimi_k2")

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
    *mla.REQUIRED,
)
OPTIONAL = {
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
    **mla.OPTIONAL,
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
    yield from checks.count(fields, "moe_layer_freq", 1)
    yield from checks.count(fields, "num_nextn_predict_layers", 0, 1)
    yield from checks.routing(fields, "n_routed_experts", best=2, least=2)
    yield from mla.problems(fields, hf)


def _params(fields: Fields) -> tuple[Param, ...]:
    hidden, vocab, experts, width = (fields[n] for n in ("hidden_size", "vocab_size", "n_routed_experts", "moe_intermediate_size"))
    tied = fields["tie_word_embeddings"]
    first, second = blocks.layer_norms(hidden)
    return (
        blocks.embedding(vocab, hidden, tied=tied),
        first,
        *mla.attention(fields),
        second,
        *blocks.gated_mlp(MLP, M_MLP, hidden, fields["intermediate_size"], "dense"),
        blocks.router(experts, hidden),
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
    checks.refuse("config.json describes a deepseek_v3 model that is not supported", problems(hf))
    fields = _fields(hf)
    params, moe_layers, experts = _params(fields), blocks.dense_first(fields), fields["n_routed_experts"]
    return ModelSpec(
        family="deepseek",
        **blocks.sizes(hf, fields, experts, moe_layers),
        params=params,
        mtp_params=mtp_params(params, fields["hidden_size"]) if fields["num_nextn_predict_layers"] else (),
        megatron={
            **blocks.megatron_moe(fields, experts, moe_layers),
            **blocks.megatron_groups(fields),
            **mla.megatron(fields, hf),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    )
