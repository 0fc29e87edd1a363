"""DeepSeek-V2 and V2-Lite: MLA, a few dense layers, shared experts, softmax routing without a correction bias.

Lite has neither compressed queries nor groups of experts. Where there are groups, they compete by their best expert.

Sources: the published `config.json` and tensor inventory of DeepSeek-V2-Lite; arXiv 2405.04434.
"""

from collections.abc import Iterator
from typing import Any

from moerl.models import blocks, checks, mla
from moerl.models.blocks import M_MLP, MLP
from moerl.models.checks import Fields
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("deepseek_v2",)

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
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": False,
    **mla.OPTIONAL,
}
"""Fields that a config may leave out, and what that means."""

_SPELLINGS = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}


def _fields(hf: dict[str, Any]) -> Fields:
    return checks.complete(hf, REQUIRED, OPTIONAL, _SPELLINGS)


def problems(hf: dict[str, Any]) -> Iterator[str]:
    """Everything in a `config.json` that this file does not describe."""
    fields = _fields(hf)
    yield from checks.missing(fields, REQUIRED, MODEL_TYPES[0])
    yield from checks.foreign(hf)
    yield from checks.expected(fields, "hidden_act", ("silu",))
    yield from checks.expected(fields, "mlp_bias", (False,))
    yield from checks.expected(fields, "scoring_func", ("softmax",))
    yield from checks.expected(fields, "topk_method", ("greedy", "group_limited_greedy"))
    if fields["topk_method"] == "greedy":
        yield from checks.expected(fields, "n_group", (1,), "topk_method 'greedy' knows no groups, but engines would use them")
    yield from checks.expected(fields, "norm_topk_prob", (False,), "what it means next to routed_scaling_factor differs between programs")
    yield from checks.count(fields, "moe_layer_freq", 1)
    yield from checks.routing(fields, "n_routed_experts", best=1, least=1)
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
        *blocks.shared_experts(hidden, fields["n_shared_experts"] * width),
        *blocks.routed_experts(hidden, width),
        *blocks.head(vocab, hidden, tied=tied),
    )


def spec(hf: dict[str, Any]) -> ModelSpec:
    """Build the specification from a parsed `config.json` (already known to be of one of `MODEL_TYPES`).

    Raises:
        ModelError: naming every field whose value is not supported.
    """
    checks.refuse("config.json describes a deepseek_v2 model that is not supported", problems(hf))
    fields = _fields(hf)
    moe_layers, experts = blocks.dense_first(fields), fields["n_routed_experts"]
    return ModelSpec(
        family="deepseek_v2",
        **blocks.sizes(hf, fields, experts, moe_layers),
        params=_params(fields),
        megatron={
            **blocks.megatron_moe(fields, experts, moe_layers),
            **blocks.megatron_groups(fields),
            **mla.megatron(fields, hf),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": False,
        },
    )
