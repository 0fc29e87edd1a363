"""Qwen3-MoE: grouped-query attention with normalised queries and keys, softmax routing, no shared experts.

Sources: the published `config.json` and tensor inventory of Qwen3-30B-A3B and the `config.json` of Qwen3-235B-A22B; arXiv 2505.09388.
"""

from collections.abc import Iterator
from typing import Any

from moerl.models import blocks, checks, gqa
from moerl.models.blocks import M_MLP, MLP
from moerl.models.checks import Fields
from moerl.models.spec import ModelSpec, Param

MODEL_TYPES = ("qwen3_moe",)

REQUIRED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "rms_norm_eps",
    *gqa.REQUIRED,
)
OPTIONAL = {
    "head_dim": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Fields that a config may leave out, and what that means."""


def _fields(hf: dict[str, Any]) -> Fields:
    return checks.complete(hf, REQUIRED, OPTIONAL, {"num_local_experts": "num_experts"})


def problems(hf: dict[str, Any]) -> Iterator[str]:
    """Everything in a `config.json` that this file does not describe."""
    fields = _fields(hf)
    yield from checks.missing(fields, REQUIRED, MODEL_TYPES[0])
    yield from checks.foreign(hf)
    yield from checks.expected(fields, "hidden_act", ("silu",))
    yield from checks.expected(fields, "attention_bias", (False,), "projections with a bias are not supported")
    yield from checks.expected(fields, "use_sliding_window", (False,), "attention over a sliding window is not supported")
    yield from checks.expected(fields, "partial_rotary_factor", (1.0,), "heads are rotated as a whole")
    yield from checks.count(fields, "decoder_sparse_step", 1)
    yield from checks.count(fields, "num_experts_per_tok", 1, fields["num_experts"])
    yield from gqa.problems(fields, hf)
    if not fields["head_dim"]:
        yield from checks.divides(fields, "num_attention_heads", "hidden_size")


def _params(fields: Fields) -> tuple[Param, ...]:
    hidden, vocab, tied = fields["hidden_size"], fields["vocab_size"], fields["tie_word_embeddings"]
    first, second = blocks.layer_norms(hidden, fused_into="linear_qkv")
    return (
        blocks.embedding(vocab, hidden, tied=tied),
        first,
        *gqa.attention(fields, bias=False, norms=True),
        second,
        *blocks.gated_mlp(MLP, M_MLP, hidden, fields["intermediate_size"], "dense"),
        blocks.router(fields["num_experts"], hidden),
        *blocks.routed_experts(hidden, fields["moe_intermediate_size"]),
        *blocks.head(vocab, hidden, tied=tied),
    )


def _moe_layers(fields: Fields) -> tuple[int, ...]:
    dense, step = set(fields["mlp_only_layers"]), fields["decoder_sparse_step"]
    return tuple(layer for layer in range(fields["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0)


def spec(hf: dict[str, Any]) -> ModelSpec:
    """Build the specification from a parsed `config.json` (already known to be of one of `MODEL_TYPES`).

    Raises:
        ModelError: naming every field whose value is not supported.
    """
    checks.refuse("config.json describes a qwen3_moe model that is not supported", problems(hf))
    fields = _fields(hf)
    moe_layers, experts = _moe_layers(fields), fields["num_experts"]
    return ModelSpec(
        family="qwen3",
        **blocks.sizes(hf, fields, experts, moe_layers),
        params=_params(fields),
        megatron={
            **blocks.megatron_moe(fields, experts, moe_layers),
            **gqa.megatron(fields),
            "moe_router_score_function": "softmax",
            # Softmax over the chosen experts alone is softmax over all of them, normalised afterwards.
            "moe_router_pre_softmax": not fields["norm_topk_prob"],
            "moe_router_enable_expert_bias": False,
        },
        megatron_model=gqa.megatron_model(hf),
    )
