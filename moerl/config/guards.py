"""Megatron options under which replayed routes would be ignored or bent, with what to do instead. One table for both who ask.

The rules over settings look at what `[megatron]` gives, before anything starts; replay looks at the finished TransformerConfig.
"""

from collections.abc import Callable, Mapping
from typing import Any

_UNREPLAYED = ("sinkhorn", "quantile_balancing")


def _balances_without_asking(value: Any) -> bool:
    return any(name in _UNREPLAYED for name in (value if isinstance(value, (list, tuple)) else [value]))


GUARDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moe_enable_routing_replay": (lambda value: not value, "must be true: routers have no replay without it"),
    "moe_router_fusion": (bool, "must be false: the fused router returns before routes are replayed"),
    "moe_router_load_balancing_type": (
        _balances_without_asking,
        "must not be sinkhorn or quantile_balancing, which choose experts without asking replay; use 'none' or an auxiliary loss",
    ),
    "moe_expert_capacity_factor": (lambda value: value is not None, "must be unset: a capacity drops experts after they were replayed"),
    "moe_token_dispatcher_type": (
        lambda value: value not in ("alltoall", "allgather"),
        "must be 'alltoall' or 'allgather': other dispatchers rebuild expert ids from probabilities",
    ),
    "moe_router_force_load_balancing": (bool, "must be false: it replaces the scores by random ones"),
    "moe_router_force_biased": (lambda value: value is not None, "must be unset: it replaces the scores"),
    "moe_input_jitter_eps": (lambda value: value is not None, "must be unset: recomputation would see other scores than the forward pass"),
    "cuda_graph_impl": (lambda value: value not in (None, "none"), "must be 'none': a captured graph skips the hooks that set routes"),
    "transformer_impl": (lambda value: value == "inference_optimized", "must not be 'inference_optimized': it has another router"),
}
"""Option -> (whether a value defeats replay, what must hold and why)."""


MTP_GUARDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "overlap_moe_expert_parallel_comm": (
        bool,
        "must be false: its schedule would run the layer as one more of the decoder's, and let its loss into those",
    ),
}
"""Option -> (whether a value defeats a layer for multi-token prediction of the trainer's, what must hold and why)."""


def mtp_problems(options: Mapping[str, Any]) -> list[str]:
    """`option: sentence` for each of `options` with which the trainer's layer for multi-token prediction doesn't go together."""
    return [f"{name} {why}" for name, (defeats, why) in MTP_GUARDS.items() if name in options and defeats(options[name])]


def replay_problems(options: Mapping[str, Any]) -> list[str]:
    """`option: sentence` for each of `options` that would make Megatron ignore or bend forced routes."""
    return [f"{name} {why}" for name, (defeats, why) in GUARDS.items() if name in options and defeats(options[name])]
