"""Where a step's groups come from: live engines, or the rollouts of an earlier run. Rank 0 only.

    live:      prompts --engines--> checked samples --rewards--> groups --store--> rollouts/step-*.rollout
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

from moerl.cluster.engines import EnginePool
from moerl.cluster.rewards import RewardPool
from moerl.cluster.runtime import engine_gpus, ray_running
from moerl.config.schema import Config
from moerl.config.show import to_toml
from moerl.errors import MoerlError
from moerl.models import ModelSpec
from moerl.rollout import store
from moerl.rollout.sample import Group, Prompt
from moerl.rollout.server import resolve_device
from moerl.rollout.tasks import TaskData, load_task
from moerl.train.curriculum import take
from moerl.train.progress import Progress

log = logging.getLogger(__name__)


class Source(Protocol):
    def groups(self, progress: Progress) -> list[Group]:
        """Scored groups for the step after `progress`."""

    def accuracy(self) -> dict[str, float]:
        """Held-out accuracy of the weights that the engines serve; empty if that can't be measured."""

    def revive(self, error: MoerlError) -> bool:
        """Restart the engines that are dead, if that explains `error`; they then need the current weights."""


@dataclass(frozen=True)
class Live:
    """Groups from engines that serve the trainer's current weights.

    Attributes:
        folder: receives the rollouts.
        announce: shows a line to whoever watches the run.
    """

    config: Config
    task: TaskData
    pool: EnginePool
    rewards: RewardPool
    folder: Path
    announce: Callable[[str], None]

    def groups(self, progress: Progress) -> list[Group]:
        rollout, count = self.config.rollout, self.config.rollout.prompts_per_step
        prompts = take(self.task.train, position=progress.position, count=count, seed=self.config.run.seed)
        groups = self.rewards.score(self._generate(prompts, rollout.group_size, rollout.temperature, routes=True))
        if rollout.save:
            header = store.make_header(self.config.model.path, step=progress.step, version=progress.version)
            store.save_step(self.folder, progress.step, groups, header)
        return groups

    def accuracy(self) -> dict[str, float]:
        if not self.task.heldout:
            return {}
        found = {}
        for name, temperature in (("heldout_accuracy", self.config.rollout.temperature), ("heldout_greedy_accuracy", 0.0)):
            groups = self.rewards.score(self._generate(self.task.heldout, 1, temperature, routes=False))
            found[name] = sum(group.samples[0].reward >= 1.0 for group in groups) / len(groups)
        return found

    def revive(self, error: MoerlError) -> bool:
        if not self.pool.restart_dead():
            return False
        log.warning("an engine was restarted; what it was doing is done again: %s", error)
        self.announce("an engine died and was restarted; it is given the current weights, and its work is done again")
        return True

    def _generate(self, prompts: list[Prompt], size: int, temperature: float, *, routes: bool) -> list[Group]:
        limit = self.config.rollout.max_new_tokens
        return self.pool.generate(prompts, group_size=size, max_new_tokens=limit, temperature=temperature, routes=routes)


@dataclass(frozen=True)
class Recorded:
    """Groups that an earlier run saved, in the same order."""

    folder: Path
    expected: store.Header

    def groups(self, progress: Progress) -> list[Group]:
        return store.load_step(self.folder, progress.step, self.expected)[1]

    def accuracy(self) -> dict[str, float]:
        return {}

    def revive(self, error: MoerlError) -> bool:
        return False


def open_live(
    stack: ExitStack, config: Config, spec: ModelSpec, folder: Path, *, trainer_ranks: int, announce: Callable[[str], None]
) -> tuple[EnginePool, Live]:
    """Start Ray, reward workers and engines; `stack` stops them. On a local Ray, trainer ranks keep this machine's first GPUs."""
    task = load_task(config.task, config.model.path, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.run.seed)
    address = os.environ.get("RAY_ADDRESS")
    gpus: list[str] = []
    if address is None and resolve_device(config.engine.device) == "cuda":
        taken = trainer_ranks if resolve_device(config.train.device) == "cuda" else 0
        gpus = engine_gpus([str(i) for i in range(torch.cuda.device_count())], taken, config.engine.count * config.engine.tp)
    runtime = stack.enter_context(ray_running(address, gpus=gpus))
    rewards = stack.enter_context(RewardPool(config.task))
    pool = stack.enter_context(EnginePool(config, spec, runtime, log_dir=folder / "logs"))
    return pool, Live(config, task, pool, rewards, folder / "rollouts", announce)


def prepare_folder(folder: Path, config: Config, *, fresh: bool) -> None:
    """Make the run folder; a fresh run removes what an earlier one left there under the names that this one writes."""
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        for name in ("rollouts", "checkpoints", "export", "logs", "tensorboard"):
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
