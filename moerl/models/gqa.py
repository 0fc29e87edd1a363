"""Grouped-query attention (GQA): weights and Megatron's options. Several query heads share one key-value head.

Queries, keys and values are one parameter in Megatron (interleaved per key-value head) and one in engines (one below the other).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models import blocks, checks
from moerl.models.blocks import ATTN, M_ATTN
from moerl.models.checks import Fields
from moerl.models.spec import Param

REQUIRED = ("num_attention_heads", "num_key_value_heads")


def problems(fields: Fields, hf: Mapping[str, Any]) -> Iterator[str]:
    """What is not supported."""
    yield from checks.divides(fields, "num_key_value_heads", "num_attention_heads")
    yield from checks.rope(hf, ("default",))


def head_size(fields: Fields) -> int:
    """Elements of one head: `head_dim`, or what is left for one where it is absent."""
    return fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]


def attention(fields: Fields, *, bias: bool, norms: bool) -> tuple[Param, ...]:
    """All weights of one layer's attention.

    Args:
        bias: queries, keys and values have one.
        norms: queries and keys are normalised, head by head.
    """
    hidden, head = fields["hidden_size"], head_size(fields)
    rows = tuple(head * fields[name] for name in ("num_attention_heads", "num_key_value_heads", "num_key_value_heads"))
    found = [_fused("weight", tuple((each, hidden) for each in rows), head)]
    if bias:
        found.append(_fused("bias", tuple((each,) for each in rows), head))
    if norms:
        for part in "qk":
            name = f"{ATTN}{part}_norm.weight"
            found.append(Param(f"{M_ATTN}{part}_layernorm.weight", (name,), (head,), engine=name))
    out = ATTN + "o_proj.weight"
    return (*found, Param(M_ATTN + "linear_proj.weight", (out,), (hidden, rows[0]), 1, engine=out))


def _fused(what: str, shapes: tuple[tuple[int, ...], ...], head: int) -> Param:
    """The weight or the bias of queries, keys and values."""
    names = tuple(f"{ATTN}{part}_proj.{what}" for part in "qkv")
    engine = f"{ATTN}qkv_proj.{what}"
    return Param(f"{M_ATTN}linear_qkv.{what}", names, shapes[0], 0, engine=engine, part_shapes=shapes, head_rows=head)


def megatron(fields: Fields) -> dict[str, Any]:
    """Megatron's options for attention."""
    return {
        "num_attention_heads": fields["num_attention_heads"],
        "num_query_groups": fields["num_key_value_heads"],
        "kv_channels": head_size(fields),
    }


def megatron_model(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron's model takes for the rotary embedding."""
    return {"rotary_base": blocks.rope_settings(hf)[0]}
