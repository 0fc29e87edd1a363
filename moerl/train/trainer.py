"""One rank's trainer: model, optimizer, replay; and what one step does with its microbatches.

    microbatches --(natural pass: what would the trainer have chosen?)--> --forward and backward under replay--> optimizer

Everything here is collective over the trainer's ranks. Statistics come back the same on every rank.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import TrainError
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.routing.compare import differing, expert_load, mismatch
from moerl.routing.replay import RouteReplay
from moerl.routing.trace import Layout
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch, add_column
from moerl.train.forward import LocalMicrobatch, TokenOutputs, compute_logprobs, forward_backward
from moerl.train.objective import grpo_loss

Phase = Callable[[str], AbstractContextManager[Any]]
"""Names and times a part of the step."""


@dataclass(frozen=True)
class Trainer:
    """Attributes:
    model: this rank's chunks, trainable.
    replay: None when training runs on the model's own routes.
    recorder: reads what the model would choose; also the only way `replay` knows the routers.
    reference: frozen policy at version 0, None unless a KL to it is part of the objective.
    """

    config: Config
    spec: ModelSpec
    layout: Layout
    ranks: megatron.Ranks
    model: list[torch.nn.Module]
    optimizer: Any
    recorder: RouteReplay
    reference: list[torch.nn.Module] | None

    @property
    def replay(self) -> RouteReplay | None:
        return self.recorder if self.config.train.replay else None

    @property
    def passes(self) -> dict[str, Any]:
        """Arguments that every pass over the model shares."""
        return {"temperature": self.config.rollout.temperature, "fp32_head": self.config.train.fp32_head}

    def shards(self) -> list[Shard]:
        """The live weights that the engines must serve."""
        return weights.local_shards(self.model, self.spec, self.ranks)


def build(config: Config, spec: ModelSpec, ranks: megatron.Ranks) -> Trainer:
    """Build the model with the weights in `config.model.path`, its optimizer, and the reference if one is needed."""
    model = megatron.build_model(spec, config, ranks)
    weights.load_hf(model, spec, config.model.path, ranks)
    reference = None
    if config.objective.kl_coef > 0:
        reference = megatron.build_model(spec, config, ranks, trainable=False)
        weights.load_hf(reference, spec, config.model.path, ranks)
    layout = Layout(spec.moe_layers, spec.experts, spec.topk)
    return Trainer(config, spec, layout, ranks, model, megatron.build_optimizer(model, config), RouteReplay(model, layout), reference)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then linear decay to `lr_final_ratio` at the last step (0-based `step`)."""
    train = config.train
    if step < train.lr_warmup_steps:
        return train.lr * (step + 1) / train.lr_warmup_steps
    span = max(1, train.steps - 1 - train.lr_warmup_steps)
    done = min(1.0, (step - train.lr_warmup_steps) / span)
    return train.lr * (1.0 + done * (train.lr_final_ratio - 1.0))


def train_step(trainer: Trainer, micro: Sequence[Microbatch], step: int, phase: Phase) -> dict[str, Any]:
    """Train on the microbatches of this data-parallel rank.

    Returns:
        Metrics of the step, over all ranks.

    Raises:
        TrainError: the loss or the gradient is not finite; the optimizer was not stepped.
    """
    config, metrics = trainer.config, {}
    every = config.diagnostics.mismatch_every_steps
    if every and step % every == 0:
        with phase("natural"):
            metrics |= measure_natural(trainer, micro)
    with phase("logprobs"):
        micro = _with_old_logprobs(trainer, micro)
    lr = learning_rate(config, step)
    for epoch in range(config.objective.epochs_per_batch):
        with phase("forward_backward"):
            found = _forward_backward(trainer, micro)
        if epoch == 0:
            metrics |= found
        if not math.isfinite(found["loss"]):
            raise TrainError(f"step {step}: the loss is {found['loss']}; the step was refused, the weights are those of the last step")
        with phase("optimizer"):
            norm = megatron.optimizer_step(trainer.optimizer, lr)
    return {**metrics, "grad_norm": norm, "lr": lr, "microbatches": len(micro)}


def measure_natural(trainer: Trainer, micro: Sequence[Microbatch]) -> dict[str, float]:
    """What the same weights do on the same tokens without replay: routes that differ, and the gap that this makes."""
    answers = compute_logprobs(trainer.model, micro, trainer.ranks, recorder=trainer.recorder, **trainer.passes)
    differ, decisions, gaps = 0, 0, []
    for (logprobs, routes), one in zip(answers, micro, strict=True):
        here = differing(routes[one.real], one.routes[one.real])
        differ, decisions = differ + int(here.sum()), decisions + here.size
        keep = one.loss_mask > 0
        gaps.append((logprobs - one.columns["engine_logprobs"])[keep])
    mine = (differ, decisions, np.concatenate(gaps)) if _speaks_for_replica(trainer.ranks) else (0, 0, np.zeros(0))
    differ, decisions, gap = _sum_over_ranks(mine)
    return {"natural_flip_share": differ / max(1, decisions), **_suffixed(mismatch(gap), "natural")}


def _with_old_logprobs(trainer: Trainer, micro: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """Add the columns that the objective compares with: the policy before the first of several updates, and the reference."""
    if trainer.config.objective.epochs_per_batch > 1:
        old = compute_logprobs(trainer.model, micro, trainer.ranks, replay=trainer.replay, **trainer.passes)
        micro = add_column(micro, "old_logprobs", [logprobs for logprobs, _ in old])
    if trainer.reference is not None:
        known = compute_logprobs(trainer.reference, micro, trainer.ranks, **trainer.passes)
        micro = add_column(micro, "reference_logprobs", [logprobs for logprobs, _ in known])
    return micro


def _forward_backward(trainer: Trainer, micro: Sequence[Microbatch]) -> dict[str, Any]:
    objective, gaps = trainer.config.objective, []

    def loss_fn(outputs: TokenOutputs, rows: LocalMicrobatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, tokens, sums = grpo_loss(objective, outputs.logprobs, outputs.entropy, rows.loss_mask, rows.columns)
        keep = rows.loss_mask > 0
        gaps.append((outputs.logprobs.detach() - rows.columns["engine_logprobs"])[keep].float().cpu().numpy())
        return loss, tokens, {**sums, "loss": loss, "tokens": tokens}

    results = forward_backward(trainer.model, micro, trainer.ranks, loss_fn=loss_fn, replay=trainer.replay, **trainer.passes)
    sums = {name: sum(float(result[name]) for result in results) for name in (results[0] if results else ())}
    sums, gap = _sum_over_ranks(
        (sums, np.concatenate(gaps) if gaps else np.zeros(0)) if _holds_own_rows(trainer.ranks) else ({}, np.zeros(0))
    )
    tokens = max(1.0, sums.pop("tokens"))
    metrics: dict[str, Any] = {name: value / tokens for name, value in sums.items()}
    metrics |= {"response_tokens": int(tokens), **_suffixed(mismatch(gap), "replay" if trainer.replay else "trained")}
    return metrics | _replay_metrics(trainer, micro)


def _replay_metrics(trainer: Trainer, micro: Sequence[Microbatch]) -> dict[str, Any]:
    load = [expert_load(one.routes[one.real], trainer.layout.experts).max(initial=0.0) for one in micro if one.real.any()]
    metrics = {"expert_load_max": float(np.max(load, initial=0.0))}
    if trainer.replay is not None:
        # tensor-parallel ranks hold other rows under sequence parallelism and the same ones without: the share is right either way
        found = trainer.replay.agreement
        agreeing, total = _sum_over_ranks((found.agreeing, found.total))
        metrics["replay_agreement"] = agreeing / max(1, total)
    return metrics


def _speaks_for_replica(ranks: megatron.Ranks) -> bool:
    """One rank per data-parallel replica, for figures that all ranks of the replica hold alike."""
    return ranks.tp[0] == ranks.pp[0] == ranks.cp[0] == 0


def _holds_own_rows(ranks: megatron.Ranks) -> bool:
    """Ranks that hold outputs nobody else holds: the last stage, one of each tensor-parallel group."""
    return ranks.last_stage and ranks.tp[0] == 0


def _sum_over_ranks(mine: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add up numbers and dictionaries of numbers over all ranks, join arrays; the same result everywhere."""
    everyone: list[Any] = [mine]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return tuple(_joined(parts) for parts in zip(*everyone, strict=True))


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    if isinstance(parts[0], dict):
        names = {name: None for part in parts for name in part}
        return {name: sum(part[name] for part in parts if name in part) for name in names}
    return sum(parts)


def _suffixed(figures: dict[str, float], suffix: str) -> dict[str, float]:
    return {f"{name}_{suffix}": value for name, value in figures.items()}
