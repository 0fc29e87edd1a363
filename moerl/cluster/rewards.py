"""Reward functions in actors of their own: a hanging one costs a process, not the run.

    groups --prompt, answer, texts--> RewardActor --rewards--> groups with `Sample.reward` filled

Each group is one unit of work with a deadline of `task.reward_timeout_s`, so that the error can name the prompt. Traces and
logprobs stay where they are.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayTaskError

from moerl.config.schema import Task
from moerl.errors import TaskError
from moerl.rollout.rewards import Reward, resolve_reward, score_groups
from moerl.rollout.sample import Group

_START_TIMEOUT_S = 120.0


class RewardActor:
    """Runs inside a Ray actor, one group at a time, in its main thread (reward libraries use signals)."""

    def __init__(self, name: str):
        self._name = name
        self._reward: Reward | None = None

    def load(self) -> None:
        """Import the reward function; call this first."""
        self._reward = resolve_reward(self._name)

    def score(self, group: bytes) -> list[float]:
        """Rewards of one encoded group, in sample order."""
        (scored,) = score_groups([msgspec.msgpack.decode(group, type=Group)], self._reward)
        return [sample.reward for sample in scored.samples]


class RewardWorkers:
    """`task.reward_workers` actors for an event loop: a group at a time each, with a deadline, and again where that fails.

    A worker that hangs or dies is killed, and replaced when its turn comes: there are always as many turns as workers.
    """

    def __init__(self, task: Task):
        self._task = task
        self._idle: asyncio.Queue[Any] = asyncio.Queue()  # workers, and None for one that is to be replaced
        self._all: list[Any] = []

    async def start(self) -> None:
        """Start the workers.

        Raises:
            TaskError: the reward function cannot be found or imported.
        """
        for worker in await asyncio.gather(*(self._spawn() for _ in range(self._task.reward_workers))):
            self._idle.put_nowait(worker)

    async def score(self, group: Group) -> Group:
        """The group with rewards.

        Raises:
            TaskError: the function raised, died, or did not answer in time, at the first attempt and at all `task.reward_retries`
                that followed; names the prompt.
        """
        for _ in range(self._task.reward_retries):
            with suppress(TaskError):
                return await self._attempt(group)
        return await self._attempt(group)

    def stop(self) -> None:
        """End all workers. Safe to call twice."""
        for worker in list(self._all):
            self._kill(worker)

    async def _attempt(self, group: Group) -> Group:
        worker = await self._idle.get()
        try:
            worker = worker or await self._spawn()
            rewards = await self._answer(worker, worker.score.remote(_record(group)), self._task.reward_timeout_s, "task.reward_timeout_s")
        except TaskError as error:
            what = f"reward {self._task.reward!r} failed for prompt {group.prompt_id} (answer {group.answer!r})"
            raise TaskError(f"{what}: {error}") from error
        finally:
            self._idle.put_nowait(worker if worker in self._all else None)
        return _scored(group, rewards)

    async def _spawn(self) -> Any:
        worker = ray.remote(num_cpus=0, max_restarts=0)(RewardActor).remote(self._task.reward)
        self._all.append(worker)
        try:
            await self._answer(worker, worker.load.remote(), _START_TIMEOUT_S, "of loading the reward; does its module do work at import?")
        except BaseException:
            self._kill(worker)
            raise
        return worker

    async def _answer(self, worker: Any, call: Any, limit_s: float, limit: str) -> Any:
        """What a worker answers; it is killed if it does not in time."""
        try:
            return await asyncio.wait_for(call, limit_s)
        except TimeoutError as error:
            self._kill(worker)
            raise TaskError(f"no answer within {limit_s:g} s ({limit})") from error
        except RayActorError as error:
            self._kill(worker)
            raise TaskError(f"its process died: {error}") from error
        except RayTaskError as error:
            raise TaskError(str(error.cause) if isinstance(error.cause, TaskError) else f"{error.cause!r}") from error

    def _kill(self, worker: Any) -> None:
        if worker in self._all:
            self._all.remove(worker)
            ray.kill(worker)


def _record(group: Group) -> bytes:
    """What a reward may look at: traces and logprobs would only make the record large."""
    return msgspec.msgpack.encode(replace(group, samples=[replace(sample, trace=b"", logprobs=b"") for sample in group.samples]))


def _scored(group: Group, rewards: Sequence[float]) -> Group:
    return replace(group, samples=[replace(sample, reward=value) for sample, value in zip(group.samples, rewards, strict=True)])
