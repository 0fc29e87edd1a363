"""One rank's trainer: model, optimizer, replay; and what one step does with its microbatches.

    parts --to the device--> --(what would the trainer have done by itself?)--> old logprobs --> update under replay --> optimizer

Which experts each pass runs is decided here, by role, from `[replay]`; a pass's choosers are gone when it ends. Everything is
collective over the trainer's ranks. Statistics come back the same on every rank.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import TrainError
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.routing.compare import differing, expert_counts, imbalance, mismatch
from moerl.routing.layout import Layout
from moerl.routing.replay import Own, RouteReplay, Routes, moe_indices
from moerl.routing.shard import Place
from moerl.train import megatron, weights
from moerl.train.batch import Part
from moerl.train.capture import Recorder, trainer_biases
from moerl.train.forward import LocalMicrobatch, TokenOutputs, compute_logprobs, forward_backward, localise, sum_over_context
from moerl.train.objective import Sequences, averages, by_lag, grpo_loss, sequence_ids

Phase = Callable[[str], AbstractContextManager[Any]]
"""Names and times a part of the step."""


@dataclass(frozen=True)
class Trainer:
    """Attributes:
    model: this rank's chunks, trainable.
    place: which part of a microbatch it needs.
    replay: None when no pass replays or records routes.
    reference: frozen policy at version 0, None unless a KL to it is part of the objective; with its own replay.
    """

    config: Config
    spec: ModelSpec
    layout: Layout
    ranks: megatron.Ranks
    model: list[torch.nn.Module]
    optimizer: Any
    place: Place
    replay: RouteReplay | None
    reference: list[torch.nn.Module] | None
    reference_replay: RouteReplay | None

    @property
    def passes(self) -> dict[str, Any]:
        """Arguments that every pass over a model shares."""
        return {"temperature": self.config.rollout.temperature, "fp32_head": self.config.train.fp32_head}

    def recorder(self, parts: Sequence[Part]) -> Recorder:
        """For a capture of the rows that `parts` name, at the weights as they are; collective."""
        bias = trainer_biases(self.model, self.layout)
        return Recorder(parts, self.place, self.layout, holds_logprobs=_holds_own_rows(self.ranks), bias=bias)

    def shards(self) -> list[Shard]:
        """The live weights that the engines must serve."""
        return weights.local_shards(self.model, self.spec, self.ranks)


def build(config: Config, spec: ModelSpec, ranks: megatron.Ranks) -> Trainer:
    """Build the model with the weights of version 0 (`config.model`), its optimizer, and the reference if one is needed."""
    layout = Layout(spec.moe_layers, spec.experts, spec.topk)
    model = megatron.build_model(spec, config, ranks)
    _load_policy(model, config, spec, ranks, mtp=config.train.builds_mtp)
    reference, reference_replay = None, None
    if config.objective.kl_coef > 0:
        reference = megatron.build_model(spec, config, ranks, trainable=False)
        _load_policy(reference, config, spec, ranks)
        reference_replay = RouteReplay(reference, layout) if config.replay.reference != "off" else None
    replay = None
    if config.replays:
        sees = {"bias_counts": config.replay.expert_bias, "aux_loss": config.replay.aux_loss}
        replay = RouteReplay(model, layout, **{name: value for name, value in sees.items() if value != "frozen"})
    place = Place(ranks.cp, ranks.tp, moe_indices(model, layout))
    optimizer = megatron.build_optimizer(model, config)
    return Trainer(config, spec, layout, ranks, model, optimizer, place, replay, reference, reference_replay)


def _load_policy(model: list[torch.nn.Module], config: Config, spec: ModelSpec, ranks: megatron.Ranks, *, mtp: bool = False) -> None:
    """The weights of version 0.

    Args:
        mtp: the model has a layer for multi-token prediction.
    """
    if config.model.megatron_checkpoint:
        from moerl.train import checkpoint  # imports Megatron

        checkpoint.load_policy(Path(config.model.megatron_checkpoint), model, Path(config.model.path))
    else:
        weights.load_hf(model, spec, config.model.path, ranks, mtp=mtp)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then linear decay to `lr_final_ratio` at the last step (0-based `step`)."""
    train = config.train
    if step < train.lr_warmup_steps:
        return train.lr * (step + 1) / train.lr_warmup_steps
    span = max(1, train.steps - 1 - train.lr_warmup_steps)
    done = min(1.0, (step - train.lr_warmup_steps) / span)
    return train.lr * (1.0 + done * (train.lr_final_ratio - 1.0))


def train_step(trainer: Trainer, parts: Sequence[Part], step: int, phase: Phase, recorder: Recorder | None = None) -> dict[str, Any]:
    """Train on this rank's parts of the step's microbatches.

    Args:
        recorder: is told what the captured rows do at the weights about to be trained; None where no capture is due.

    Returns:
        Metrics of the step, over all ranks.

    Raises:
        TrainError: the loss or the gradient is not finite; the optimizer was not stepped.
        ReplayError: some row did not follow its routes, or routes were not used exactly once; the optimizer was not stepped.
    """
    config, metrics = trainer.config, {}
    local = localise(parts, trainer.ranks)
    every = config.diagnostics.mismatch_every_steps
    if every and step % every == 0:
        with phase("natural"):
            metrics |= measure(trainer, local, recorder)
    if recorder is not None:
        with phase("capture"), recorder.timed():
            metrics |= _missing_passes(trainer, local, recorder)
    with phase("logprobs"):
        local, proximal = _with_old_logprobs(trainer, local)
    routes = _routes(config.replay.actor, local, proximal)
    lr = learning_rate(config, step)
    for epoch in range(config.objective.epochs_per_batch):
        with phase("forward_backward"), _updating(trainer, local, routes):
            found = _forward_backward(trainer, local, recorder if epoch == 0 and config.replay.actor == "rollout" else None)
        if epoch == 0:
            metrics |= found
        if not math.isfinite(found["loss"]):
            raise TrainError(f"step {step}: the loss is {found['loss']}; the step was refused, the weights are those of the last step")
        with phase("optimizer"):
            norm = megatron.optimizer_step(trainer.optimizer, lr)
    return {**metrics, **_replay_metrics(trainer, parts, routes), "grad_norm": norm, "lr": lr, "microbatches": len(parts)}


def measure(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder | None = None) -> dict[str, float]:
    """What the weights about to be trained do on these tokens, in a pass of its own with the routes of `replay.evaluation`.

    Args:
        recorder: is told of the pass.

    Returns:
        off: the gap of the trainer's own routing (`*_natural`), and the share of recorded decisions it would have made otherwise;
        rollout: the gap that replay leaves before the update (`*_forced`).
    """
    if trainer.config.replay.evaluation == "rollout":
        return _suffixed(mismatch(_gap(trainer, local, forced_pass(trainer, local, recorder))), "forced")
    return _measure_natural(trainer, local, recorder)


def _measure_natural(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder | None) -> dict[str, float]:
    own, logprobs = natural_pass(trainer, local, recorder)
    differ, decisions = _flips(own, local)
    differ, decisions = _sum_over_ranks((differ, decisions))
    found = _suffixed(mismatch(_gap(trainer, local, logprobs)), "natural")
    return {"natural_flip_share": differ / decisions, **found} if decisions else found


def natural_pass(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder | None) -> tuple[Own, list[torch.Tensor]]:
    """What the trainer chooses by itself, and the logprobs of that pass (as `compute_logprobs` returns them)."""
    near = None if recorder is None else recorder.near(local)
    with trainer.replay.recorded([rows.real for rows in local], near) as own:
        logprobs = compute_logprobs(trainer.model, local, trainer.ranks, **trainer.passes)
    if recorder is not None:
        recorder.routed(own)
        recorder.scored("natural", logprobs)
    return own, logprobs


def forced_pass(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder | None) -> list[torch.Tensor]:
    """Logprobs on the engine's experts (as `compute_logprobs` returns them)."""
    with trainer.replay.forced(_routes("rollout", local, None)):
        logprobs = compute_logprobs(trainer.model, local, trainer.ranks, **trainer.passes)
    if recorder is not None:
        recorder.scored("replay", logprobs)
    return logprobs


def _missing_passes(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder) -> dict[str, float]:
    """The passes that a capture needs and that the step neither has made nor will make; an update under replay is one."""
    found = {} if recorder.has("natural") else _measure_natural(trainer, local, recorder)
    if not recorder.has("replay") and trainer.config.replay.actor != "rollout":
        forced_pass(trainer, local, recorder)
    return found


def _flips(own: Own, local: Sequence[LocalMicrobatch]) -> tuple[int, int]:
    """(recorded decisions of this rank's rows and layers that the model would have made otherwise, all of them)."""
    differ, decisions = 0, 0
    for number, rows in enumerate(local):
        if rows.routes is not None:
            counted = rows.routes.counted.cpu().numpy()
            here = differing(own.ids(number).cpu().numpy()[counted], rows.routes.ids.cpu().numpy()[counted])
            differ, decisions = differ + int(here.sum()), decisions + here.size
    return differ, decisions


def _gap(trainer: Trainer, local: Sequence[LocalMicrobatch], logprobs: Sequence[torch.Tensor]) -> np.ndarray:
    """float64[m] trainer minus engine logprob of all trained tokens of all ranks."""
    gaps = [_trained_gap(rows, found) for rows, found in zip(local, logprobs, strict=True)] if _holds_own_rows(trainer.ranks) else []
    return _sum_over_ranks((np.concatenate(gaps) if gaps else np.zeros(0),))[0]


def _trained_gap(rows: LocalMicrobatch, logprobs: torch.Tensor) -> np.ndarray:
    keep = rows.loss_mask > 0
    return (logprobs.detach() - rows.columns["engine_logprobs"])[keep].double().cpu().numpy()


def _routes(mode: str, local: Sequence[LocalMicrobatch], proximal: list[Routes] | None) -> list[Routes] | None:
    """What a pass in `mode` is forced onto, per microbatch; None lets it choose."""
    if mode == "off":
        return None
    if mode == "proximal":
        return proximal
    if gone := [number for number, rows in enumerate(local) if rows.routes is None]:
        raise TrainError(
            f"microbatch {gone[0]} carries no routes, but a pass replays the engine's; record them, or set the pass's mode to 'off'"
        )
    return [rows.routes for rows in local]


def _forced(replay: RouteReplay | None, routes: list[Routes] | None) -> AbstractContextManager[None]:
    return nullcontext() if replay is None or routes is None else replay.forced(routes)


def _updating(trainer: Trainer, local: Sequence[LocalMicrobatch], routes: list[Routes] | None) -> AbstractContextManager[Any]:
    """The update's pass. One that chooses by itself is watched only if balancing statistics are at stake."""
    if routes is None and trainer.config.balances:
        return trainer.replay.recorded([rows.real for rows in local])
    return _forced(trainer.replay, routes)


def _with_old_logprobs(trainer: Trainer, local: list[LocalMicrobatch]) -> tuple[list[LocalMicrobatch], list[Routes] | None]:
    """Add the columns that the objective compares with: the policy before the first of several updates, and the reference.

    Returns:
        (microbatches, the experts that the pass for the old logprobs chose, where the update replays them).
    """
    config, proximal = trainer.config, None
    if config.old_logprobs_mode is not None:
        records = config.replay.actor == "proximal"
        routes = _routes(config.old_logprobs_mode, local, None)
        with trainer.replay.recorded([rows.real for rows in local]) if records else _forced(trainer.replay, routes) as own:
            found = compute_logprobs(trainer.model, local, trainer.ranks, **trainer.passes)
        proximal = own.routes() if records else None
        local = _with_column(local, "old_logprobs", found)
    if trainer.reference is not None:
        with _forced(trainer.reference_replay, _routes(config.replay.reference, local, proximal)):
            found = compute_logprobs(trainer.reference, local, trainer.ranks, **trainer.passes)
        local = _with_column(local, "reference_logprobs", found)
    return local, proximal


def _with_column(local: list[LocalMicrobatch], name: str, columns: Sequence[torch.Tensor]) -> list[LocalMicrobatch]:
    """The loss is computed on the last stage only, and only there is anything to add."""
    return [rows.with_column(name, column) for rows, column in zip(local, columns, strict=True)] if columns else local


def _forward_backward(trainer: Trainer, local: Sequence[LocalMicrobatch], recorder: Recorder | None) -> dict[str, Any]:
    config, gaps, lags = trainer.config, [], []

    def loss_fn(outputs: TokenOutputs, rows: LocalMicrobatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        whole = {}
        if config.objective.needs_sequences:
            whole = {"sequences": _sequences(rows, trainer.ranks), "budget_tokens": config.rollout.max_new_tokens}
        loss, denominator, sums = grpo_loss(config.objective, outputs.logprobs, outputs.entropy, rows.loss_mask, rows.columns, **whole)
        gaps.append(_trained_gap(rows, outputs.logprobs))
        if recorder is not None:
            recorder.replayed(rows.packing.microbatch, outputs.logprobs)
        if config.buffer.max_lag:
            lags.append(rows.columns["lag"][rows.loss_mask > 0].cpu().numpy())
        return loss, denominator, {**sums, "loss": loss, "denominator": denominator}

    mtp_weight = config.train.mtp_loss_weight if config.train.mtp == "trained" else 0.0
    results = forward_backward(trainer.model, local, trainer.ranks, loss_fn=loss_fn, mtp_weight=mtp_weight, **trainer.passes)
    sums = {name: sum(float(result[name]) for result in results) for name in (results[0] if results else ())}
    mine = (sums, *(np.concatenate(found) if found else np.zeros(0) for found in (gaps, lags)))
    sums, gap, lag = _sum_over_ranks(mine if _holds_own_rows(trainer.ranks) else ({}, np.zeros(0), np.zeros(0)))
    ahead = {"mtp_loss": sums.pop("mtp_loss") / max(1, sums.pop("mtp_tokens"))} if mtp_weight else {}
    stale = by_lag(gap, lag) if len(lag) else {}
    replays = config.replay.actor != "off"
    tokens = max(1, int(sums["tokens"]))
    return {**averages(sums), **ahead, **stale, "response_tokens": tokens, **_suffixed(mismatch(gap), "replay" if replays else "trained")}


def _sequences(rows: LocalMicrobatch, ranks: megatron.Ranks) -> Sequences:
    """The sequences that this rank's rows are pieces of; the first context-parallel rank counts them."""
    boundaries = rows.packing.cu_seqlens_q
    ids = sequence_ids(boundaries, rows.packing.local_rows)
    return Sequences(ids, len(boundaries) - 1, counts=ranks.cp[0] == 0, reduce=sum_over_context)


def _replay_metrics(trainer: Trainer, parts: Sequence[Part], routes: list[Routes] | None) -> dict[str, float]:
    """How the experts recorded for the step are used, and how many decisions of the update followed what they were forced onto."""
    layout, metrics = trainer.layout, {}
    counts = np.zeros((len(layout.layers), layout.experts), np.int64)
    for part in parts:
        if part.routes is not None:
            known = part.router_real if part.forced is None else part.router_real & part.forced
            counts[list(trainer.place.moe_indices)] += expert_counts(part.routes[known], layout.experts)
    total = torch.from_numpy(counts).to(trainer.ranks.torch_device)
    dist.all_reduce(total)
    if bool(total.any()):
        metrics["expert_load_max"] = float(imbalance(total.cpu().numpy()).max())
    if routes is not None:
        agreeing, decisions = _sum_over_ranks((trainer.replay.agreement.agreeing, trainer.replay.agreement.total))
        metrics["replay_agreement"] = agreeing / max(1, decisions)
    return metrics


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
