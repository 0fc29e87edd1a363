"""Where a step's groups come from: live engines, or the rollouts of an earlier run. Rank 0 only.

    live:      prompts --engines--> checked samples --rewards--> groups --store--> rollouts/step-*.rollout
    recorded:  rollouts/step-*.rollout --> groups

Both answer the same two questions: the groups of a step, and the held-out accuracy of a version.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moerl.cluster.engines import EnginePool
from moerl.cluster.rewards import RewardPool
from moerl.config.schema import Config
from moerl.errors import EngineError, TrainError
from moerl.rollout import store
from moerl.rollout.sample import Group, Prompt
from moerl.rollout.tasks import TaskData
from moerl.train.curriculum import take
from moerl.train.progress import Progress

log = logging.getLogger(__name__)


class Source(Protocol):
    def groups(self, progress: Progress) -> list[Group] | None:
        """Scored groups for the step after `progress`; None if an engine was replaced and must be given the weights first."""

    def accuracy(self, version: int) -> dict[str, float]:
        """Held-out accuracy of the weights that the engines serve; empty if that can't be measured."""


@dataclass(frozen=True)
class Live:
    """Groups from engines that serve the trainer's current weights."""

    config: Config
    task: TaskData
    pool: EnginePool
    rewards: RewardPool
    folder: Path
    header: store.Header

    def groups(self, progress: Progress) -> list[Group] | None:
        rollout, count = self.config.rollout, self.config.rollout.prompts_per_step
        prompts = take(self.task.train, position=progress.position, count=count, seed=self.config.run.seed)
        try:
            groups = self._generate(prompts, rollout.group_size, rollout.temperature, progress.version, routes=True)
        except EngineError as error:
            if not self.pool.restart_dead():
                raise
            log.warning("an engine was restarted; its work is generated again: %s", error)
            return None
        groups = self.rewards.score(groups)
        if rollout.save:
            store.save_step(self.folder, progress.step, groups, self.header, version=progress.version)
        return groups

    def accuracy(self, version: int) -> dict[str, float]:
        if not self.task.heldout:
            return {}
        found = {}
        for name, temperature in (("heldout_accuracy", self.config.rollout.temperature), ("heldout_greedy_accuracy", 0.0)):
            groups = self.rewards.score(self._generate(self.task.heldout, 1, temperature, version, routes=False))
            found[name] = sum(group.samples[0].reward >= 1.0 for group in groups) / len(groups)
        return found

    def _generate(self, prompts: list[Prompt], size: int, temperature: float, version: int, *, routes: bool) -> list[Group]:
        return self.pool.generate(
            prompts,
            group_size=size,
            max_new_tokens=self.config.rollout.max_new_tokens,
            temperature=temperature,
            routes=routes,
            version=version,
        )


@dataclass(frozen=True)
class Recorded:
    """Groups that an earlier run saved, in the same order."""

    folder: Path
    header: store.Header

    def groups(self, progress: Progress) -> list[Group]:
        if progress.step not in store.list_steps(self.folder):
            raise TrainError(f"{self.folder} holds no rollouts of step {progress.step}; lower train.steps, or record more")
        return store.load_step(self.folder, progress.step, self.header)

    def accuracy(self, version: int) -> dict[str, float]:
        return {}
