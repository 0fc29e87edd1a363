"""Forces a Megatron model onto recorded experts, and reads the experts it would choose itself.

Each router owns one of Megatron's `RouterReplay` objects. They are found by walking the model, layer by layer; Megatron's
process-wide list is never read, because it also holds routers of other and of rebuilt models. The routes of a microbatch
travel with the microbatch: a hook before each transformer layer reads the microbatch's number from the packed-sequence
parameters that Megatron passes to the layer, and sets that layer's target. So pipeline order doesn't matter, and a
recomputation in the backward pass, which gets the same parameters, gets the same routes.

    with replay.forced(routes):  one forward pass over all microbatches (and its backward)    -> replay.agreement
    with replay.recorded() as natural:  one forward pass                                      -> natural.routes(microbatch)

Only the *choice* is forced: Megatron gathers the gate weights from the live scores at the forced experts, so the router
learns as without replay.

Invariants: hooks, targets and actions exist only within `with`; every microbatch's routes are used exactly once per forward
pass of each MoE layer and at most once per recomputation, which is counted and checked when the pass ends; what counts is the
routing map that the router really returned.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from moerl.errors import ReplayError
from moerl.routing.trace import Layout, describe

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_layer import TransformerLayer


def routers(model: torch.nn.Module) -> "list[TopKRouter]":
    """The top-k routers inside `model`, in layer order."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def replay_problems(config: Any) -> list[str]:
    """Settings of a TransformerConfig under which Megatron would ignore or bend forced routes, one sentence each."""
    recompute = config.recompute_modules if config.recompute_granularity == "selective" else []
    balancing = config.moe_router_load_balancing_type
    rules = (
        (not config.moe_enable_routing_replay, "moe_enable_routing_replay must be true"),
        (config.moe_router_fusion, "moe_router_fusion must be false: the fused router returns before replay"),
        (
            balancing in ("sinkhorn", "quantile_balancing"),
            f"moe_router_load_balancing_type {balancing!r} chooses experts without asking replay; use 'none' or an auxiliary loss",
        ),
        (config.moe_expert_capacity_factor is not None, "moe_expert_capacity_factor must be unset: tokens would be dropped after replay"),
        (
            config.moe_token_dispatcher_type not in ("alltoall", "allgather"),
            f"moe_token_dispatcher_type {config.moe_token_dispatcher_type!r} rebuilds expert ids from probabilities; use 'alltoall'",
        ),
        (config.moe_router_force_load_balancing, "moe_router_force_load_balancing must be false: it replaces the scores by random ones"),
        (config.moe_router_force_biased is not None, "moe_router_force_biased must be unset: it replaces the scores"),
        ("moe" in recompute, "recompute_modules must not contain 'moe': that recomputation can't see which microbatch it is for"),
        (config.cuda_graph_impl != "none", f"cuda_graph_impl {config.cuda_graph_impl!r} skips the hooks that set targets; use 'none'"),
        (config.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm must be false: it bypasses the layer's forward"),
        (bool(config.mtp_num_layers), "mtp_num_layers must be unset: engines record no routes for multi-token-prediction layers"),
        (config.transformer_impl == "inference_optimized", "transformer_impl 'inference_optimized' has another router"),
    )
    return [f"megatron.{text}" for wrong, text in rules if wrong]


@dataclass(frozen=True)
class Agreement:
    """(token, layer) decisions over real rows of one forward pass on this rank.

    Attributes:
        agreeing: decisions in which the router's returned map held exactly the forced experts.
        total: all of them.
    """

    agreeing: int
    total: int


@dataclass
class _Pass:
    """What is known about one pass while it runs. Keys are (microbatch, MoE index)."""

    microbatches: int
    routes: Sequence[torch.Tensor] | None = None
    real: Sequence[torch.Tensor] = ()
    counts: Sequence[int] = ()
    forward: Counter[tuple[int, int]] = field(default_factory=Counter)
    recomputed: Counter[tuple[int, int]] = field(default_factory=Counter)
    agreeing: list[torch.Tensor] = field(default_factory=list)
    total: int = 0
    natural: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class Natural:
    """The experts chosen in a recorded pass, on this rank."""

    def __init__(self, state: _Pass, indices: tuple[int, ...]):
        self._state, self._indices = state, indices

    def routes(self, microbatch: int) -> torch.Tensor:
        """int64[n, layers here, k] in router order, layers ascending."""
        return torch.stack([self._state.natural[microbatch, index] for index in self._indices], dim=1)


class RouteReplay:
    """Replay for one model on this rank.

    Attributes:
        moe_indices: which of the layout's MoE layers (positions in `layout.layers`) this rank holds, ascending.
        agreement: of the last forced pass.
    """

    def __init__(self, model: Sequence[torch.nn.Module], layout: Layout):
        """
        Args:
            model: all chunks of this rank, wrapped or not.
            layout: of the whole model.

        Raises:
            ReplayError: settings that defeat replay (all of them), or routers that don't fit the layout.
        """
        from megatron.core.transformer.transformer_layer import TransformerLayer

        self.layout = layout
        self.agreement: Agreement | None = None
        self._layers: dict[int, tuple[TransformerLayer, TopKRouter]] = {}
        for layer in (module for chunk in model for module in chunk.modules() if isinstance(module, TransformerLayer)):
            for router in routers(layer):
                self._add(layer, router)
        self._layers = dict(sorted(self._layers.items()))
        self.moe_indices = tuple(self._layers)

    def _add(self, layer: "TransformerLayer", router: "TopKRouter") -> None:
        if problems := replay_problems(router.config):
            raise ReplayError("these settings would make Megatron ignore or bend the recorded routes:\n  - " + "\n  - ".join(problems))
        number = layer.layer_number - 1
        if number not in self.layout.layers:
            raise ReplayError(f"layer {number} of the model has a router, but the routes are for {describe(self.layout)}")
        if (router.num_experts, router.topk) != (self.layout.experts, self.layout.topk):
            found = f"top-{router.topk} of {router.num_experts} experts"
            raise ReplayError(f"layer {number} routes to {found}, but the routes are for {describe(self.layout)}")
        self._layers[self.layout.layers.index(number)] = (layer, router)

    @contextlib.contextmanager
    def forced(self, routes: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, every forward pass of the model takes its experts from `routes`.

        Args:
            routes: per microbatch int64[n, layers here, k]: this rank's rows in router order, layers as in `moe_indices`.
            real: per microbatch bool[n]: rows that count towards agreement (not padding).

        Raises:
            ReplayError: on leaving, if some routes were not used exactly once.
        """
        state = _Pass(len(routes), routes, real, [int(rows.sum()) for rows in real])
        with self._hooked(state, "REPLAY_FORWARD"):
            yield
        agreeing = int(torch.stack(state.agreeing).sum()) if state.agreeing else 0
        self.agreement = Agreement(agreeing, state.total)
        self._check_uses(state)

    @contextlib.contextmanager
    def recorded(self, microbatches: int) -> Iterator[Natural]:
        """Within, one forward pass chooses by itself and leaves its choice in the yielded object."""
        state = _Pass(microbatches)
        with self._hooked(state, "RECORD"):
            yield Natural(state, self.moe_indices)
        self._check_uses(state)

    @contextlib.contextmanager
    def _hooked(self, state: _Pass, action: str) -> Iterator[None]:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        handles = []
        try:
            for position, (index, (layer, router)) in enumerate(self._layers.items()):
                if router.router_replay.router_replay_action is not None:
                    raise ReplayError("a replayed or recorded pass is already running on this model")
                before, after = _hooks(state, index, position, router)
                handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(router.register_forward_hook(after))
            for _, router in self._layers.values():
                router.router_replay.set_router_replay_action(RouterReplayAction[action])
            yield
        finally:
            for handle in handles:
                handle.remove()
            for _, router in self._layers.values():
                router.router_replay.clear_router_replay_action()
                router.router_replay.clear_indices()

    def _check_uses(self, state: _Pass) -> None:
        wrong = []
        for microbatch in range(state.microbatches):
            for index in self.moe_indices:
                forward, recomputed = state.forward[microbatch, index], state.recomputed[microbatch, index]
                if forward != 1 or recomputed > 1:
                    wrong.append(
                        f"microbatch {microbatch}, layer {self.layout.layers[index]}: {forward} forward uses, {recomputed} in recomputation"
                    )
        if wrong:
            shown = "\n  - ".join(wrong[:8]) + (f"\n  - … {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise ReplayError(f"routes must be used exactly once per forward pass (and once if recomputed); they were not:\n  - {shown}")


def _hooks(state: _Pass, index: int, position: int, router: "TopKRouter") -> tuple[Any, Any]:
    """(before the layer, after its router) for the MoE layer `index`, the `position`-th on this rank."""
    current: list[int] = []

    def before(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        microbatch = kwargs["packed_seq_params"].microbatch
        current[:] = [microbatch]
        if state.routes is not None:
            router.router_replay.target_topk_idx = state.routes[microbatch][:, position]

    def after(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        microbatch = current[0]
        # A graph task is running exactly when this forward is a recomputation inside the backward pass.
        if torch._C._current_graph_task_id() != -1:
            state.recomputed[microbatch, index] += 1
            return
        state.forward[microbatch, index] += 1
        if state.routes is None:
            state.natural[microbatch, index] = router.router_replay.get_recorded_indices()
            return
        real, routing_map = state.real[microbatch], output[1]
        held = routing_map.gather(1, state.routes[microbatch][:, position]).all(dim=1) & (routing_map.sum(dim=1) == router.topk)
        state.agreeing.append((held & real).sum())
        state.total += state.counts[microbatch]

    return before, after
