"""How far engine and trainer are apart where nothing is stale, in a run with a lag: the weights that sampled are put back to measure.

    step v, before its update:   keep the weights of version v
    steps v ... v + max_lag:     collect the completions that version v sampled from start to end
    step v + max_lag:            put v back, measure them with and without replay, put the live weights back; then begin again

With `buffer.max_lag` = 0 the weights that are trained are those that sampled, so that the figures of every step say how far two
computations of the same weights are apart. With a lag those figures contain the updates in between as well. These here do not, whatever
the lag: they come from trained completions, under the weights that sampled each token of them.

Invariants: the weights are the same after a measurement, bit for bit; one version is kept at a time, in memory of the CPU. Collective
over the trainer's ranks, except that completions are known to rank 0 only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.rollout.sample import Group, Sample
from moerl.train.batch import Part
from moerl.train.capture import Recorder
from moerl.train.forward import localise
from moerl.train.megatron import unwrap
from moerl.train.trainer import Trainer, forced_pass, measure

_LEAST = 2
"""Completions without which nothing is measured: advantages, which packing computes too, need more than one."""


@dataclass(frozen=True)
class Kept:
    """Attributes:
    weights: this rank's parameters and buffers of `version`, in the order of `_tensors`.
    samples: trained completions that `version` sampled, on rank 0.
    engine_bias: float32[layer, experts] the correction biases that the engines held as `version`, on rank 0, for a capture; None without.
    """

    version: int
    weights: list[torch.Tensor]
    samples: list[Sample] = field(default_factory=list)
    engine_bias: np.ndarray | None = None


def follow(kept: Kept | None, trainer: Trainer, groups: Sequence[Group] | None, step: int) -> Kept | None:
    """To be called with the groups of every step before its update: begins to keep a version, and collects what it sampled.

    Args:
        kept: what the step before returned, without what was measured.
    """
    every = trainer.config.diagnostics.mismatch_every_steps
    if kept is None and every and trainer.config.buffer.max_lag and step % every == 0:
        kept = Kept(step, _copies(trainer.model))
    if kept is not None and groups is not None:
        kept.samples.extend(sample for group in groups for sample in group.samples if {run[0] for run in sample.versions} == {kept.version})
    return kept


def due(kept: Kept | None, config: Config, step: int) -> bool:
    """Whether no later step trains completions of the kept version."""
    return kept is not None and step >= kept.version + config.buffer.max_lag


def figures(
    kept: Kept,
    trainer: Trainer,
    share: Callable[[list[Group] | None], list[Part]],
    captures: Callable[[list[Part]], Recorder] | None = None,
) -> dict[str, float]:
    """The gap between engine and trainer on the collected completions, under the weights that sampled them.

    Args:
        share: packs rank 0's groups and hands every rank its parts.
        captures: called with these parts while the kept weights are back; what it returns is told of both passes.

    Returns:
        `fresh/kl_natural`, `fresh/kl_replay` and so on, as the metrics of a step without a lag are named; `fresh/tokens`: how many response
        tokens they are of; `fresh/version`. Empty where that version sampled next to nothing that was trained.
    """
    found = [len(kept.samples) >= _LEAST]
    dist.broadcast_object_list(found, src=0)
    if not found[0]:
        return {}
    parts = share([Group(-1, "", kept.samples)] if kept.samples else None)
    local, result = localise(parts, trainer.ranks), {}
    replay = trainer.config.replay
    with _put_back(trainer.model, kept.weights):
        recorder = None if captures is None else captures(parts)
        for routes in ("off", *(["rollout"] if replay.actor == "rollout" else [])):
            config = trainer.config.model_copy(update={"replay": replay.model_copy(update={"evaluation": routes})})
            result |= measure(replace(trainer, config=config), local, recorder)
        if recorder is not None and not recorder.has("replay"):
            forced_pass(trainer, local, recorder)
    named = {f"fresh/{name.replace('_forced', '_replay')}": value for name, value in result.items()}
    tokens = sum(len(sample.response_tokens) for sample in kept.samples)
    return {**named, "fresh/tokens": tokens, "fresh/version": kept.version}


def _tensors(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in model:
        inner = unwrap(chunk)  # the wrapper's own `buffers` are those of gradients
        yield from inner.parameters()
        yield from inner.buffers()


def _copies(model: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in _tensors(model)]


@contextmanager
def _put_back(model: Sequence[torch.nn.Module], weights: Sequence[torch.Tensor]) -> Iterator[None]:
    live = _copies(model)
    _write(model, weights)
    try:
        yield
    finally:
        _write(model, live)


@torch.no_grad()
def _write(model: Sequence[torch.nn.Module], weights: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(_tensors(model), weights, strict=True):
        tensor.copy_(value)
