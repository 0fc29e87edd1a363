"""The main loop: take sampled and scored groups, pack, train with replay, push the weights, log.

    engines --groups--> rank 0 --microbatches--> all ranks: train_step under replay --shards--> engines (next version)

Runs on every trainer rank; rank 0 also drives the engines, which go on generating meanwhile. Step `s` trains the weights of version `s`
on groups of which no token is more than `buffer.max_lag` versions older, and makes version `s + 1`, which every engine then holds.
With `max_lag = 0` a step's groups are sampled by the very weights that it trains, and engines and trainer take turns.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import EngineError, ReshardError, WaitTimeout
from moerl.models import ModelSpec
from moerl.rollout.sample import Group, Sample
from moerl.train import capture, checkpoint, fresh
from moerl.train.batch import Part, cut, equalise, pack
from moerl.train.capture import Recorder
from moerl.train.launch import Options
from moerl.train.objective import group_advantages
from moerl.train.run import Run, open_run
from moerl.train.samples import punish_overlong, sequences
from moerl.train.source import Source, rollout_metrics
from moerl.train.trainer import train_step

log = logging.getLogger(__name__)


def train(config: Config, spec: ModelSpec, options: Options) -> None:
    """Train as `config` says; collective over the ranks that torchrun started."""
    with open_run(config, spec, options) as run:
        with run.phase("sync"):
            push(run)
        if run.progress.step == 0:
            run.log(-1, evaluate(run))
        while run.progress.step < config.train.steps:
            step_once(run)
        run.finish()


def step_once(run: Run) -> None:
    """One step of training, whose weights every engine then holds."""
    config, step = run.config, run.progress.step
    with run.phase("rollout"):
        groups, figures = on_engines(run, lambda source: source.groups(run.progress)) or (None, {})
    captures = capture.due(config, step) and not config.buffer.max_lag  # else made of the weights that sampled, where those are put back
    captured = chosen(run, groups, step) if captures else None
    with run.phase("pack"):
        parts, fates = share(run, groups, captured)
    recorder = run.trainer.recorder(parts) if captures else None
    fresh_figures = measure_fresh(run, groups)
    metrics = fresh_figures | train_step(run.trainer, parts, step, run.phase, recorder)
    if recorder is not None:
        metrics |= keep(run, recorder, captured, step, engine_biases(run))
    position = run.progress.position + config.rollout.prompts_per_step
    run.progress = replace(run.progress, step=step + 1, version=step + 1, position=position)
    with run.phase("sync"):
        metrics |= push(run)
    with run.phase("checkpoint"):
        save(run)
    run.log(step, {**rollout_metrics(groups or []), **figures, **fates, **metrics, **evaluate(run)})


def on_engines[T](run: Run, work: Callable[[Source], T]) -> T | None:
    """Rank 0's `work` with the engines. Those that died meanwhile are restarted and given the current weights; then it is done again."""
    while True:
        result, revived = None, False
        if run.source:
            try:
                result = work(run.source)
            except EngineError as error:
                revived = run.source.revive(error)
                if not revived:
                    raise
        if not agreed(revived):
            return result
        push(run)


def share(run: Run, groups: list[Group] | None, captured: Mapping[int, Sample] | None = None) -> tuple[list[Part], dict[str, float]]:
    """Pack on rank 0; every rank receives its rows and layers of the microbatches of its data-parallel replica, and only those.

    Args:
        captured: number among all samples of the groups -> sample of those whose rows are to be captured; None where that isn't due.

    Returns:
        (this rank's parts, on rank 0 what became of the rewards and routes).
    """
    config, trainer, parts, fates = run.config, run.trainer, None, {}
    if groups is not None:
        masked = config.buffer.max_lag if config.buffer.policy == "mask" else None
        routing = {"needed": config.replays_rollout, "version": run.progress.version, "max_lag": masked}
        groups, shaped = punish_overlong(groups, config.rollout.max_new_tokens, config.objective.overlong_margin_tokens)
        items, fates = sequences(groups, trainer.layout, group_advantages(config.objective), config.replay, **routing)
        fates |= shaped
        multiple = trainer.ranks.sequence_multiple
        replicas = pack(
            items,
            tokens_per_microbatch=config.train.tokens_per_microbatch,
            dp=trainer.ranks.dp[1],
            multiple=multiple,
            rounds=trainer.ranks.microbatch_multiple,
            layout=trainer.layout,
        )
        if trainer.ranks.pp[1] > 1:
            replicas = [equalise(micro, multiple, trainer.layout) for micro in replicas]
        ahead = config.train.mtp == "trained"
        parts = [[cut(one, place, captured, ahead=ahead) for one in replicas[replica]] for replica, place in run.places]
    mine: list[list[Part]] = [[]]
    dist.scatter_object_list(mine, parts, src=0)
    return mine[0], fates


def chosen(run: Run, groups: list[Group] | None, version: int) -> dict[int, Sample] | None:
    """The samples of groups that are captured with the weights of `version`, on rank 0; None elsewhere."""
    if groups is None:
        return None
    with run.phase("capture"):
        return capture.choose(groups, run.config, step=version, version=version)


def keep(
    run: Run, recorder: Recorder, samples: Mapping[int, Sample] | None, version: int, engine_bias: np.ndarray | None
) -> dict[str, object]:
    """Write what the weights of `version` did, and the routers' correction biases; figures of it, on rank 0. Collective."""
    with run.phase("capture"), recorder.timed():
        sides = {"trainer_bias": recorder.bias, "engine_bias": engine_bias}
        biases = {name: side for name, side in sides.items() if side is not None}
        meta = capture.describe(run.config, run.spec, run.trainer.model, step=version, version=version, source="training")
        found = capture.write(run.folder / "mismatch", recorder, samples, meta, biases)
    return {**found, "capture_s": recorder.seconds}


def engine_biases(run: Run) -> np.ndarray | None:
    """float32[layer, experts] the correction biases that the engines hold, on rank 0; None elsewhere, and without engines or biases."""
    names = capture.bias_names(run.spec)
    if run.sync is None or run.source is None or not names:
        return None
    try:
        held = run.sync.read(names, run.config.engine.request_timeout_s)
    except (EngineError, ReshardError, WaitTimeout) as error:  # an engine that is gone is missed, and restarted, by the next push
        log.warning("step %d: the engines' correction biases are left out of the capture: %s", run.progress.step, error)
        return None
    return np.stack([np.frombuffer(held[name], "<f4") for name in names])


def measure_fresh(run: Run, groups: list[Group] | None) -> dict[str, float]:
    """Figures of the gap between engine and trainer without staleness, where the groups of this step complete what they need."""
    begun, run.kept = run.kept is not None, fresh.follow(run.kept, run.trainer, groups, run.progress.step)
    if run.kept is not None and not begun and capture.due(run.config, run.kept.version):
        run.kept = replace(run.kept, engine_bias=engine_biases(run))
    if not fresh.due(run.kept, run.config, run.progress.step):
        return {}
    version, samples = run.kept.version, None
    made: list[Recorder] = []
    captures = capture.due(run.config, version)
    if captures and groups is not None:
        samples = chosen(run, [Group(-1, "", run.kept.samples)], version)

    def record(parts: list[Part]) -> Recorder:
        made.append(run.trainer.recorder(parts))
        return made[0]

    with run.phase("fresh"):
        found = fresh.figures(run.kept, run.trainer, lambda groups: share(run, groups, samples)[0], record if captures else None)
    if made:
        found |= keep(run, made[0], samples, version, run.kept.engine_bias)
    run.kept = None
    return found


def push(run: Run) -> dict[str, object]:
    """Give every engine the current weights; the metrics say what each engine then serves, and that its checksums agree."""
    if run.sync is None:
        return {}
    if run.source:
        run.source.announce(run.progress.version)
    while True:
        try:
            report = run.sync.push(run.trainer.shards(), run.progress.version)
            break
        except ReshardError as error:  # the same on every rank
            if not agreed(run.source is not None and run.source.revive(error)):
                raise
    if run.source:
        run.source.published(run.progress.version)
    return {
        "engine_versions": report.engine_versions,
        "versions_consistent": set(report.engine_versions) == {run.progress.version},
        "weights_checksum": report.digest,
        "sync_way": report.way,
        "sync_attempts": report.attempts,
        "sync_verified": report.verified,
        "sync_bytes": report.moved.wire_nbytes,
        "sync_bytes_ratio": report.moved.wire_nbytes / report.moved.minimum_nbytes,
        "sync_buckets": report.moved.buckets,
        **({"sync_changed_share": report.moved.changed_share} if report.moved.changed_share is not None else {}),
    }


def evaluate(run: Run) -> dict[str, float]:
    """Held-out accuracy, on rank 0: before the first step, after the last, and every so many between."""
    settings, step = run.config.diagnostics, run.progress.step
    due = step in (0, run.config.train.steps) or (settings.evaluate_every_steps and step % settings.evaluate_every_steps == 0)
    if not (settings.evaluate and due):
        return {}
    with run.phase("evaluate"):
        return on_engines(run, lambda source: source.accuracy()) or {}


def save(run: Run) -> None:
    """Write a checkpoint where one is due."""
    settings, step = run.config.checkpoint, run.progress.step
    if (settings.every_steps and step % settings.every_steps == 0) or (settings.at_end and step == run.config.train.steps):
        checkpoint.save(run.folder / "checkpoints", run.progress, run.trainer.model, run.trainer.optimizer, run.config, run.spec)


def agreed(mine: bool) -> bool:
    """Rank 0's answer, on every rank."""
    answer = [mine]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]
