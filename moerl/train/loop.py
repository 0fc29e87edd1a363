"""The main loop: take sampled and scored groups, pack, train with replay, push the weights, log.

    engines --groups--> rank 0 --microbatches--> all ranks: train_step under replay --shards--> engines (next version)

Runs on every trainer rank; rank 0 also drives the engines, which go on generating meanwhile. Step `s` trains the weights of version `s`
on groups of which no token is more than `buffer.max_lag` versions older, and makes version `s + 1`, which every engine then holds.
With `max_lag = 0` a step's groups are sampled by the very weights that it trains, and engines and trainer take turns.
"""

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import EngineError, ReshardError
from moerl.models import ModelSpec
from moerl.rollout.sample import Group
from moerl.train import checkpoint
from moerl.train.batch import Part, cut, equalise, pack
from moerl.train.launch import Options
from moerl.train.objective import group_advantages
from moerl.train.run import Run, open_run
from moerl.train.samples import punish_overlong, sequences
from moerl.train.source import Source, rollout_metrics
from moerl.train.trainer import train_step


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
    with run.phase("pack"):
        parts, fates = share(run, groups)
    metrics = train_step(run.trainer, parts, step, run.phase)
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


def share(run: Run, groups: list[Group] | None) -> tuple[list[Part], dict[str, float]]:
    """Pack on rank 0; every rank receives its rows and layers of the microbatches of its data-parallel replica, and only those.

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
        parts = [[cut(one, place) for one in replicas[replica]] for replica, place in run.places]
    mine: list[list[Part]] = [[]]
    dist.scatter_object_list(mine, parts, src=0)
    return mine[0], fates


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
