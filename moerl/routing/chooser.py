"""What stands in a router's place of choice for the length of one pass: it forces or records, and keeps count.

Megatron asks a router's `RouterReplay` object for the top-k. During a pass a `Chooser` takes that object's place, so nothing
of a pass can outlive it, and each row can be forced or left to choose by itself. Which microbatch is running, the chooser learns
from hooks: before a layer's attention, which receives the microbatch's packed-sequence parameters in forward passes and in
recomputations of the whole layer; and when the backward pass reaches a layer's output, for recomputations that begin behind the
attention. Forward and backward keep separate numbers, because schedules may interleave the two.

Only the *choice* is forced: the gate weights are gathered from the live scores at the forced experts, so the router learns.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from moerl.errors import ReplayError
from moerl.routing.margin import Near, best_experts, flipped_mass, selection_margin

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

Seen = Literal["native", "replayed"]
"""Whose choice the balancing statistics count: the router's own, or the one that was used."""

_AUX_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")


@dataclass(frozen=True)
class Routes:
    """What one microbatch of this rank is forced onto. Rows are in router order.

    Attributes:
        ids: integer[n, layers here, k], layers ascending.
        real: bool[n], False at padding.
        forced: bool[n], False at rows that choose by themselves; None forces all, padding included.
    """

    ids: torch.Tensor
    real: torch.Tensor
    forced: torch.Tensor | None = None

    @property
    def counted(self) -> torch.Tensor:
        """bool[n]: rows that must follow their routes."""
        return self.real if self.forced is None else self.real & self.forced


@dataclass
class Pass:
    """What is known about one pass while it runs. Keys are (microbatch, MoE index).

    Attributes:
        real: bool[n] per microbatch.
        routes: per microbatch; None lets the routers choose and records it.
        forward, recomputed: uses.
        followed: per use, how many rows used exactly the experts that they were forced onto.
        chosen: int64[n, k] of passes that record.
        near: per microbatch, the rows of which a pass that records also keeps `margins` and `flipped`, float16[m]; None for none.
    """

    real: Sequence[torch.Tensor]
    routes: Sequence[Routes] | None
    bias_counts: Seen
    aux_loss: Seen
    forward: Counter[tuple[int, int]] = field(default_factory=Counter)
    recomputed: Counter[tuple[int, int]] = field(default_factory=Counter)
    followed: list[tuple[tuple[int, int], torch.Tensor]] = field(default_factory=list)
    chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    near: Sequence[Near] | None = None
    margins: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    flipped: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


def in_backward() -> bool:
    """Whether this code runs inside a backward pass: then a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Chooser:
    """The choice of one router during one pass.

    Attributes:
        index: MoE layer's position in the layout; `position`: its position among this rank's MoE layers.
        layer: its number in the model, for messages.
    """

    def __init__(self, state: Pass, router: "TopKRouter", *, index: int, position: int, layer: int):
        self.state, self.router, self.index, self.position, self.layer = state, router, index, position, layer
        self._running: dict[bool, int] = {}
        self._used: torch.Tensor | None = None
        self._native: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What Megatron asks for: (scores of the chosen experts, their ids), both [n, k], from scores [n, experts]."""
        if self.state.routes is None:
            values, self._used = default_compute_topk(scores, topk, num_groups, group_topk)
            if self.state.near is not None:
                self._note_margins(scores, num_groups, group_topk)
            return values, self._used
        routes = self.state.routes[self._microbatch()]
        if len(routes.ids) != len(scores):
            raise ReplayError(
                f"microbatch {self._microbatch()}, layer {self.layer}: the router sees {len(scores)} rows, its routes have "
                f"{len(routes.ids)}; routes and tokens were cut differently, or belong to different microbatches"
            )
        ids = routes.ids[:, self.position].long()
        self._native = None
        if routes.forced is not None or self._counts_native():
            self._native = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        if routes.forced is not None:
            ids = torch.where(routes.forced[:, None], ids, self._native)
        self._used = ids
        return scores.gather(1, ids), ids

    def before_attention(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook: the packed-sequence parameters name the microbatch."""
        self._running[in_backward()] = kwargs["packed_seq_params"].microbatch

    def after_layer(self, layer: torch.nn.Module, args: Any, output: Any) -> None:
        """Hook: when the gradient reaches this output, the layer's backward begins, for this microbatch."""
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and not in_backward():
            microbatch = self._microbatch()
            hidden.register_hook(lambda _: self._running.__setitem__(True, microbatch))

    def after_router(self, router: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Hook: count the use, compare the returned routing map (bool[n, experts]) with what was asked for, mend the statistics."""
        state, key, routing_map = self.state, (self._microbatch(), self.index), output[1]
        (state.recomputed if in_backward() else state.forward)[key] += 1
        if state.routes is None:
            state.chosen.setdefault(key, self._used)
            if state.near is not None:
                near = state.near[key[0]]
                state.flipped[key] = flipped_mass(output[0].detach()[near.rows], near.engine[:, self.position]).half()
        else:
            routes = state.routes[key[0]]
            exact = routing_map.gather(1, routes.ids[:, self.position].long()).all(dim=1) & (routing_map.sum(dim=1) == router.topk)
            state.followed.append((key, (exact & routes.counted).sum()))
        if router.enable_expert_bias and not router.frozen_expert_bias and torch.is_grad_enabled():
            self._count_for_bias(router, routing_map, state.real[key[0]])
        self._used = self._native = None

    def balance_on(self, router: "TopKRouter") -> None:
        """Let auxiliary losses of `router` see real rows only, and the experts that `Pass.aux_loss` says; `release` undoes it."""
        for name in _AUX_LOSSES if router.is_aux_loss_enabled() else ():
            setattr(router, name, self._balanced(getattr(router, name)))

    @staticmethod
    def release(router: "TopKRouter") -> None:
        """Give `router` its own auxiliary losses back."""
        for name in _AUX_LOSSES:
            router.__dict__.pop(name, None)

    def _balanced(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def apply(probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **_: Any) -> torch.Tensor:
            real = self.state.real[self._microbatch()][:, None]
            if self.state.aux_loss == "replayed":
                routing_map = torch.zeros_like(routing_map).scatter(1, self._used, True)
            return loss(probs, scores.masked_fill(~real, 0.0), routing_map & real, *rest, with_padding_mask=True)

        return apply

    def _count_for_bias(self, router: "TopKRouter", routing_map: torch.Tensor, real: torch.Tensor) -> None:
        """Megatron has just counted every row of the map that was used; make that the real rows of the map that should count."""
        with torch.no_grad():
            native = self.state.bias_counts == "native" and self._native is not None  # a pass that records uses its own choice
            wanted = torch.zeros_like(routing_map).scatter(1, self._native, True) if native else routing_map
            router.local_tokens_per_expert += (wanted & real[:, None]).sum(dim=0) - routing_map.sum(dim=0)

    def _note_margins(self, scores: torch.Tensor, num_groups: int | None, group_topk: int | None) -> None:
        rows, key = self.state.near[self._microbatch()].rows, (self._microbatch(), self.index)
        self.state.margins[key] = selection_margin(
            scores.detach()[rows], self._used[rows], num_groups, group_topk, best_experts(self.router.score_function)
        ).half()

    def _counts_native(self) -> bool:
        router = self.router
        counting = router.enable_expert_bias and not router.frozen_expert_bias and torch.is_grad_enabled()
        return counting and self.state.bias_counts == "native"

    def _microbatch(self) -> int:
        return self._running[in_backward()]
