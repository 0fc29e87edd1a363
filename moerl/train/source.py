"""Where a step's groups come from: live engines, or the rollouts of an earlier run. Rank 0 only.

    live:      prompts --engines--> checked samples --rewards--> ready groups --take--> a step --store--> rollouts/step-*.rollout
    recorded:  rollouts/step-*.rollout --> groups

Both answer the same two questions: the groups of a step, and the held-out accuracy of a version.
"""

import json
import logging
import os
import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moerl.cluster.engines import EnginePool, trace_codec
from moerl.cluster.runtime import engine_gpus, ray_running
from moerl.cluster.streamed import Streamed
from moerl.config.schema import Config
from moerl.config.show import to_toml
from moerl.errors import MoerlError
from moerl.models import ModelSpec
from moerl.rollout import store
from moerl.rollout.generate import Sampling
from moerl.rollout.sample import Group
from moerl.rollout.server import resolve_device
from moerl.rollout.tasks import TaskData, load_task
from moerl.routing.layout import Layout
from moerl.train.progress import Progress

log = logging.getLogger(__name__)


class Source(Protocol):
    def groups(self, progress: Progress) -> tuple[list[Group], dict[str, float]]:
        """(scored groups for the step after `progress`, figures of how they came about)."""

    def accuracy(self) -> dict[str, float]:
        """Held-out accuracy of the weights that the engines serve; empty if that can't be measured."""

    def announce(self, version: int) -> None:
        """The engines are about to be given `version`."""

    def published(self, version: int) -> None:
        """All engines hold `version`."""

    def revive(self, error: MoerlError) -> bool:
        """Restart the engines that are dead, if that explains `error`; they then need the current weights."""


@dataclass(frozen=True)
class Live:
    """Groups from engines, generated while the trainer trains.

    Attributes:
        folder: receives the rollouts.
        message: shows a line to whoever watches the run.
    """

    config: Config
    task: TaskData
    pool: EnginePool
    stream: Streamed
    folder: Path
    message: Callable[[str], None]

    def groups(self, progress: Progress) -> tuple[list[Group], dict[str, float]]:
        groups, figures = self.stream.take(progress.step, last=progress.step + 1 >= self.config.train.steps)
        if self.config.rollout.save:
            header = store.make_header(self.config.model.path, step=progress.step, version=progress.version)
            store.save_step(self.folder, progress.step, groups, header)
        return groups, figures

    def accuracy(self) -> dict[str, float]:
        if not self.task.heldout:
            return {}
        found = {}
        for name, temperature in (("heldout_accuracy", self.config.rollout.temperature), ("heldout_greedy_accuracy", 0.0)):
            limit = self.config.rollout.max_new_tokens
            groups = self.pool.generate(self.task.heldout, group_size=1, max_new_tokens=limit, temperature=temperature, routes=False)
            found[name] = sum(group.samples[0].reward >= 1.0 for group in self.stream.score(groups)) / len(groups)
        return found

    def announce(self, version: int) -> None:
        self.stream.announce(version)

    def published(self, version: int) -> None:
        self.stream.published(version)

    def revive(self, error: MoerlError) -> bool:
        if not self.pool.restart_dead():
            return False
        self.stream.use(self.pool.actors)
        log.warning("an engine was restarted; what it was doing is done again: %s", error)
        self.message("an engine died and was restarted; it is given the current weights, and its work is done again")
        return True


@dataclass(frozen=True)
class Recorded:
    """Groups that an earlier run saved, in the same order."""

    folder: Path
    expected: store.Header

    def groups(self, progress: Progress) -> tuple[list[Group], dict[str, float]]:
        return store.load_step(self.folder, progress.step, self.expected)[1], {}

    def accuracy(self) -> dict[str, float]:
        return {}

    def announce(self, version: int) -> None:
        return

    def published(self, version: int) -> None:
        return

    def revive(self, error: MoerlError) -> bool:
        return False


def open_live(
    stack: ExitStack, config: Config, spec: ModelSpec, folder: Path, *, trainer_ranks: int, at: Progress, message: Callable[[str], None]
) -> tuple[EnginePool, Live]:
    """Start Ray, reward workers and engines; `stack` stops them. On a local Ray, trainer ranks keep this machine's first GPUs."""
    task = load_task(config.task, config.model.path, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.run.seed)
    address = os.environ.get("RAY_ADDRESS")
    gpus: list[str] = []
    if address is None and resolve_device(config.engine.device) == "cuda":
        taken = trainer_ranks if resolve_device(config.train.device) == "cuda" else 0
        gpus = engine_gpus([str(i) for i in range(torch.cuda.device_count())], taken, config.engine.count * config.engine.tp)
    runtime = stack.enter_context(ray_running(address, gpus=gpus))
    stream = stack.enter_context(Streamed(config, task.train, sampling(config, spec), folder, step=at.step, position=at.position))
    pool = stack.enter_context(EnginePool(config, spec, runtime, log_dir=folder / "logs"))
    stream.use(pool.actors)
    return pool, Live(config, task, pool, stream, folder / "rollouts", message)


def sampling(config: Config, spec: ModelSpec) -> Sampling:
    """What is asked of the completions that are trained."""
    rollout, layout = config.rollout, Layout(spec.moe_layers, spec.experts, spec.topk)
    return Sampling(
        rollout.max_new_tokens,
        rollout.temperature,
        True,
        layout,
        spec.layers,
        retracted=config.sync.interrupt == "retract",
        codec=trace_codec(config, spec),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        vocab=spec.vocab_size,
    )


def prepare_folder(folder: Path, config: Config, *, fresh: bool) -> None:
    """Make the run folder; a fresh run removes what an earlier one left there under the names that this one writes."""
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        for name in ("rollouts", "mismatch", "checkpoints", "export", "ledger", "logs", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("metrics.jsonl", "summary.json"):
            (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2))
    (folder / "config.toml").write_text(to_toml(config, comments=False))


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """What the samples of one step look like."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    rewards = [[sample.reward for sample in group.samples] for group in groups]
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        "reward": sum(map(sum, rewards)) / len(samples),
        "reward_std": statistics.pstdev(reward for group in rewards for reward in group),
        "solved_share": sum(sample.reward >= 1.0 for sample in samples) / len(samples),
        "uniform_groups_share": sum(len(set(group)) == 1 for group in rewards) / len(groups),
        "response_length": sum(lengths) / len(samples),
        "truncated_share": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "samples": len(samples),
    }
