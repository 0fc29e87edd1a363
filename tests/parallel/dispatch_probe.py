"""What a model's token dispatchers really receive, independent of what replay believes it forced.

Ranks see microbatches in order in each model chunk, forward as well as backward, whatever the pipeline's schedule; so the n-th call
of a layer in forward passes, and the n-th in recomputations, belong to microbatch n.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moerl.routing.chooser import in_backward
from moerl.routing.replay import moe_layers


@dataclass
class LayerCalls:
    """What one MoE layer's dispatcher and experts on this rank were handed, call by call.

    Attributes:
        forward, recomputed: routing maps bool[n, experts] given to the dispatcher.
        received: rows that reached each expert, by (global expert, whether in a recomputation), over all calls.
    """

    forward: list[torch.Tensor] = field(default_factory=list)
    recomputed: list[torch.Tensor] = field(default_factory=list)
    received: Counter[tuple[int, bool]] = field(default_factory=Counter)


@dataclass
class Dispatched:
    """Of all MoE layers on this rank: layer number in the model -> its calls, ascending."""

    layers: dict[int, LayerCalls]

    def cuts(self, *, recomputed: bool, rows: Sequence[int], topk: int) -> list[np.ndarray]:
        """int64[n, layers here, k] per microbatch, experts ascending.

        Args:
            rows: n of each microbatch.

        Raises:
            AssertionError: a dispatcher was not called once per microbatch, or a row did not go to `topk` experts.
        """
        calls = [layer.recomputed if recomputed else layer.forward for layer in self.layers.values()]
        if wrong := [len(one) for one in calls if len(one) != len(rows)]:
            raise AssertionError(f"dispatchers were called {wrong} times for {len(rows)} microbatches (recomputed: {recomputed})")
        made = [[_chosen(routing_map, topk) for routing_map in one] for one in calls]
        return [
            np.stack([layer[number] for layer in made], axis=1) if made else np.zeros((count, 0, topk), np.int64)
            for number, count in enumerate(rows)
        ]

    @property
    def recomputes(self) -> bool:
        return any(layer.recomputed for layer in self.layers.values())


def _chosen(routing_map: torch.Tensor, topk: int) -> np.ndarray:
    per_row = routing_map.sum(dim=1)
    if (per_row != topk).any():
        raise AssertionError(f"every row must go to {topk} experts, found rows that go to {per_row.unique().tolist()}")
    return routing_map.nonzero()[:, 1].view(-1, topk).numpy()


@contextlib.contextmanager
def watched(model: Sequence[torch.nn.Module]) -> Iterator[Dispatched]:
    """Within, every call of the dispatchers and experts of `model` is noted."""
    with contextlib.ExitStack() as stack:
        layers = {}
        for layer, _ in moe_layers(model):
            calls, moe = LayerCalls(), layer.mlp
            moe.token_dispatcher.dispatch_preprocess = _noting(calls, moe.token_dispatcher.dispatch_preprocess)
            stack.callback(delattr, moe.token_dispatcher, "dispatch_preprocess")
            stack.callback(moe.experts.register_forward_pre_hook(_counting(calls, moe.local_expert_indices)).remove)
            layers[layer.layer_number - 1] = calls
        yield Dispatched(layers)


def _noting(calls: LayerCalls, dispatch: Any) -> Any:
    def noting(hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        (calls.recomputed if in_backward() else calls.forward).append(routing_map.clone())
        return dispatch(hidden_states, routing_map, probs)

    return noting


def _counting(calls: LayerCalls, experts: Sequence[int]) -> Any:
    def counting(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        for expert, rows in zip(experts, args[1].tolist(), strict=True):
            calls.received[expert, in_backward()] += rows

    return counting
