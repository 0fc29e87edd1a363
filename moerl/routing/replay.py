"""Forces a Megatron model onto recorded experts, and reads the experts it would choose itself.

Routers are found by walking the model, layer by layer; Megatron's process-wide list is never read, because it also holds routers
of other and of rebuilt models. Routers of multi-token-prediction layers, for which engines record nothing, choose by themselves.

    with replay.forced(routes):  one forward pass over all microbatches (and its backward)    -> replay.agreement
    with replay.recorded(real) as own:  one forward pass over all microbatches                -> own.ids(microbatch)

Each router's choice is made by a `chooser.Chooser` for the length of the pass, whatever the pipeline's order.

Invariants: hooks and choosers exist only within `with`; every microbatch's routes are used exactly once per forward pass of each
MoE layer, and once per recomputation where there is one; every forced row used exactly its experts, by the routing map that the
router really returned. All of it is checked when the pass ends, before an optimizer can step.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moerl.config.guards import replay_problems
from moerl.errors import ReplayError
from moerl.routing.chooser import Chooser, Pass, Routes, Seen
from moerl.routing.layout import Layout, describe
from moerl.routing.margin import Near

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = ["Agreement", "Near", "Own", "RouteReplay", "Routes", "moe_indices", "routers"]


def routers(model: torch.nn.Module) -> "list[TopKRouter]":
    """The top-k routers inside `model`, in layer order."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def moe_layers(model: Sequence[torch.nn.Module]) -> "list[tuple[TransformerLayer, TopKRouter]]":
    """The decoder's MoE layers on this rank and their routers, by layer number; those of multi-token prediction are left out."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    modules = [module for chunk in model for module in chunk.modules()]
    ahead = {id(inner) for module in modules if isinstance(module, MultiTokenPredictionLayer) for inner in module.modules()}
    layers = [module for module in modules if isinstance(module, TransformerLayer) and id(module) not in ahead]
    return sorted(((layer, router) for layer in layers for router in routers(layer)), key=lambda pair: pair[0].layer_number)


def moe_indices(model: Sequence[torch.nn.Module], layout: Layout) -> tuple[int, ...]:
    """Which of the layout's MoE layers (positions in `layout.layers`) this rank holds, ascending."""
    return tuple(layout.layers.index(layer.layer_number - 1) for layer, _ in moe_layers(model))


@dataclass(frozen=True)
class Agreement:
    """(token, layer) decisions over the forced real rows of one forward pass on this rank.

    Attributes:
        agreeing: decisions in which the router's returned map held exactly the forced experts.
        total: all of them.
    """

    agreeing: int
    total: int


class Own:
    """The experts chosen in a recorded pass, on this rank."""

    def __init__(self, state: Pass, indices: tuple[int, ...], layout: Layout):
        self._state, self._indices = state, indices
        self._shape, self._dtype = layout.topk, torch.uint8 if layout.dtype.itemsize == 1 else torch.uint16

    def ids(self, microbatch: int) -> torch.Tensor:
        """uint8|uint16[n, layers here, k] in router order, layers ascending."""
        chosen = [self._state.chosen[microbatch, index] for index in self._indices]
        if not chosen:
            real = self._state.real[microbatch]
            return torch.empty((len(real), 0, self._shape), dtype=self._dtype, device=real.device)
        return torch.stack(chosen, dim=1).to(self._dtype)

    def margins(self, microbatch: int) -> torch.Tensor:
        """float16[m, layers here] of the rows in `near`: k-th minus (k+1)-th best selection score (`margin.selection_margin`)."""
        return self._near(self._state.margins, microbatch)

    def flipped_mass(self, microbatch: int) -> torch.Tensor:
        """float16[m, layers here] of the rows in `near`: share of the gate weights of experts that the engine did not choose."""
        return self._near(self._state.flipped, microbatch)

    def _near(self, found: dict[tuple[int, int], torch.Tensor], microbatch: int) -> torch.Tensor:
        rows = self._state.near[microbatch].rows
        columns = [found[microbatch, index] for index in self._indices]
        return torch.stack(columns, dim=1) if columns else torch.empty((len(rows), 0), dtype=torch.float16, device=rows.device)

    def routes(self) -> list[Routes]:
        """What was chosen, ready to be replayed: every row, padding included."""
        return [Routes(self.ids(number), real) for number, real in enumerate(self._state.real)]


class RouteReplay:
    """Replay for one model on this rank.

    Attributes:
        moe_indices: which of the layout's MoE layers (positions in `layout.layers`) this rank holds, ascending.
        agreement: of the last forced pass.
    """

    def __init__(self, model: Sequence[torch.nn.Module], layout: Layout, *, bias_counts: Seen = "native", aux_loss: Seen = "native"):
        """
        Args:
            model: all chunks of this rank, wrapped or not.
            layout: of the whole model.
            bias_counts: whose experts the update of the correction bias counts.
            aux_loss: whose experts auxiliary balancing losses see.

        Raises:
            ReplayError: settings that defeat replay (all of them), or routers that don't fit the layout.
        """
        self.layout, self.bias_counts, self.aux_loss = layout, bias_counts, aux_loss
        self.agreement: Agreement | None = None
        self._layers: dict[int, tuple[TransformerLayer, TopKRouter]] = {}
        for layer, router in moe_layers(model):
            self._check(layer.layer_number - 1, router)
            self._layers[layout.layers.index(layer.layer_number - 1)] = (layer, router)
        self.moe_indices = tuple(self._layers)

    def _check(self, number: int, router: "TopKRouter") -> None:
        if problems := replay_problems(vars(router.config)):
            listed = "\n  - megatron.".join(("", *problems))
            raise ReplayError(f"these settings would make Megatron ignore or bend the recorded routes:{listed}")
        if number not in self.layout.layers:
            raise ReplayError(f"layer {number} of the model has a router, but the routes are for {describe(self.layout)}")
        if (router.num_experts, router.topk) != (self.layout.experts, self.layout.topk):
            found = f"top-{router.topk} of {router.num_experts} experts"
            raise ReplayError(f"layer {number} routes to {found}, but the routes are for {describe(self.layout)}")

    @contextlib.contextmanager
    def forced(self, routes: Sequence[Routes]) -> Iterator[None]:
        """Within, every forward pass of the model takes its experts from `routes`, one entry per microbatch.

        Raises:
            ReplayError: on leaving, if some routes were not used exactly once, or a row did not follow them.
        """
        state = Pass([one.real for one in routes], routes, self.bias_counts, self.aux_loss)
        with self._hooked(state):
            yield
        self._check_uses(state)
        self.agreement = self._check_followed(state)

    @contextlib.contextmanager
    def recorded(self, real: Sequence[torch.Tensor], near: Sequence[Near] | None = None) -> Iterator[Own]:
        """Within, one forward pass chooses by itself and leaves its choice in the yielded object.

        Args:
            real: per microbatch bool[n] in router order, False at padding.
            near: per microbatch, the rows of which margins are kept too; None for none.
        """
        state = Pass(real, None, self.bias_counts, self.aux_loss, near=near)
        with self._hooked(state):
            yield Own(state, self.moe_indices, self.layout)
        self._check_uses(state)

    @contextlib.contextmanager
    def _hooked(self, state: Pass) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for position, (index, (layer, router)) in enumerate(self._layers.items()):
                if isinstance(router.router_replay, Chooser):
                    raise ReplayError("a replayed or recorded pass is already running on this model")
                chooser = Chooser(state, router, index=index, position=position, layer=self.layout.layers[index])
                handles = [
                    layer.self_attention.register_forward_pre_hook(chooser.before_attention, with_kwargs=True),
                    router.register_forward_hook(chooser.after_router),
                ]
                if getattr(layer.mlp, "moe_layer_recompute", False):
                    handles.append(layer.register_forward_hook(chooser.after_layer))
                for handle in handles:
                    stack.callback(handle.remove)
                stack.callback(setattr, router, "router_replay", router.router_replay)
                router.router_replay = chooser
                stack.callback(chooser.release, router)
                chooser.balance_on(router)
            yield

    def _check_uses(self, state: Pass) -> None:
        wrong = []
        for index in self.moe_indices:
            again = max(state.recomputed[microbatch, index] for microbatch in range(len(state.real)))
            for microbatch in range(len(state.real)):
                forward, recomputed = state.forward[microbatch, index], state.recomputed[microbatch, index]
                if forward != 1 or recomputed != min(again, 1):
                    wrong.append(
                        f"microbatch {microbatch}, layer {self.layout.layers[index]}: {forward} forward uses, {recomputed} in recomputation"
                    )
        if wrong:
            raise ReplayError(f"routes must be used exactly once per forward pass (and once if recomputed); they were not:{_listed(wrong)}")

    def _check_followed(self, state: Pass) -> Agreement:
        """One comparison for the whole pass, so that devices are waited for once."""
        counted = {number: routes.counted.sum() for number, routes in enumerate(state.routes)} if self.moe_indices else {}
        if not state.followed:
            return Agreement(0, 0)
        figures = torch.stack([*counted.values(), *(rows for _, rows in state.followed)]).tolist()
        expected, followed = figures[: len(counted)], figures[len(counted) :]
        uses: Counter[tuple[int, int]] = Counter()
        wrong, agreeing, total = [], 0, 0
        for (key, _), rows in zip(state.followed, followed, strict=True):
            uses[key] += 1
            microbatch, index = key
            if uses[key] == 1:
                agreeing, total = agreeing + rows, total + expected[microbatch]
            if rows != expected[microbatch]:
                when = "" if uses[key] == 1 else " in recomputation"
                where = f"microbatch {microbatch}, layer {self.layout.layers[index]}"
                wrong.append(f"{where}: {expected[microbatch] - rows} of {expected[microbatch]} rows used other experts{when}")
        if wrong:
            raise ReplayError(f"rows did not follow their routes; nothing may be trained on this pass:{_listed(wrong)}")
        return Agreement(agreeing, total)


def _listed(lines: list[str], shown: int = 8) -> str:
    more = [f"… {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n  - ".join(("", *lines[:shown], *more))
