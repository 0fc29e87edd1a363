"""Passes over whole microbatches, for tests: cut to this rank, run, and put together again."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from moerl.routing.replay import RouteReplay
from moerl.routing.shard import Place
from moerl.train.assemble import whole_logprobs, whole_routes
from moerl.train.batch import Microbatch, cut, equalise
from moerl.train.forward import LocalMicrobatch, compute_logprobs, forward_backward, localise
from moerl.train.megatron import Ranks


def place_of(ranks: Ranks, replay: RouteReplay | None) -> Place:
    return Place(ranks.cp, ranks.tp, () if replay is None else replay.moe_indices)


def local_rows(micro: Sequence[Microbatch], ranks: Ranks, replay: RouteReplay | None = None) -> list[LocalMicrobatch]:
    """This rank's rows; with `replay`, its routes too."""
    if ranks.pp[1] > 1 and replay is not None:
        micro = equalise(micro, ranks.sequence_multiple, replay.layout)
    return localise([cut(one, place_of(ranks, replay)) for one in micro], ranks)


def forcing(replay: RouteReplay | None, local: Sequence[LocalMicrobatch]) -> Any:
    return nullcontext() if replay is None else replay.forced([rows.routes for rows in local])


def run_logprobs(
    model: list[torch.nn.Module],
    micro: Sequence[Microbatch],
    ranks: Ranks,
    *,
    replay: RouteReplay | None = None,
    recorder: RouteReplay | None = None,
    **passes: Any,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """(logprobs float32[n], routes integer[n, moe_layer, k] if recorded) per microbatch, the same on all ranks of the replica."""
    local = local_rows(micro, ranks, replay or recorder)
    with recorder.recorded([rows.real for rows in local]) if recorder else forcing(replay, local) as own:
        found = compute_logprobs(model, local, ranks, **passes)
    logprobs = [whole[: one.size] for whole, one in zip(whole_logprobs(found, local, ranks), micro, strict=True)]
    if recorder is None:
        return [(one, None) for one in logprobs]
    cuts = [own.ids(number).numpy() for number in range(len(local))]
    routes = whole_routes(cuts, local, place_of(ranks, recorder), recorder.layout, ranks)
    return [(one, chosen[: len(one)]) for one, chosen in zip(logprobs, routes, strict=True)]


def run_backward(
    model: list[torch.nn.Module], micro: Sequence[Microbatch], ranks: Ranks, *, loss_fn: Any, replay: RouteReplay | None, **passes: Any
) -> list[dict[str, torch.Tensor]]:
    local = local_rows(micro, ranks, replay)
    with forcing(replay, local):
        return forward_backward(model, local, ranks, loss_fn=loss_fn, **passes)
