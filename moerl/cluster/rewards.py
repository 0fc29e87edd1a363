"""Reward functions in actors of their own: a hanging one costs a process, not the run.

    groups --prompt, answer, texts--> RewardActor --rewards--> groups with `Sample.reward` filled

Each group is one unit of work with a deadline of `task.reward_timeout_s`, so that the error can name the prompt. Traces and
logprobs stay where they are.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayTaskError

from moerl.config.schema import Task
from moerl.errors import MoerlError, TaskError
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


class RewardPool:
    """`task.reward_workers` actors; use as a context manager.

    Raises:
        TaskError: on entering: the reward function cannot be found or imported.
    """

    def __init__(self, task: Task):
        self._task = task
        self._actors: list[Any] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._task.reward_workers):
                self._actors.append(self._spawn())
            self._load(self._actors)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups, in the same order, with rewards.

        Raises:
            TaskError: the function raised, died, or did not answer for one group within `task.reward_timeout_s`; names the
                prompt. A worker that hangs is replaced, so the pool stays usable.
        """
        waiting = list(reversed(range(len(groups))))
        busy: dict[Any, tuple[int, int, float]] = {}
        rewards: list[list[float]] = [[] for _ in groups]
        idle = list(range(len(self._actors)))
        try:
            while waiting or busy:
                while waiting and idle:
                    worker, number = idle.pop(), waiting.pop()
                    reference = self._actors[worker].score.remote(_record(groups[number]))
                    busy[reference] = worker, number, time.monotonic() + self._task.reward_timeout_s
                earliest = min(deadline for _, _, deadline in busy.values())
                done, _ = ray.wait(list(busy), num_returns=1, timeout=max(0.0, earliest - time.monotonic()))
                if not done:
                    raise self._late([number for _, number, deadline in busy.values() if deadline <= earliest], groups)
                worker, number, _ = busy.pop(done[0])
                idle.append(worker)
                rewards[number] = self._result(done[0], groups[number])
        except BaseException:
            self._replace([worker for worker, _, _ in busy.values()])
            raise
        return [_scored(group, values) for group, values in zip(groups, rewards, strict=True)]

    def stop(self) -> None:
        """End all workers. Safe to call twice."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _spawn(self) -> Any:
        return ray.remote(num_cpus=0, max_restarts=0)(RewardActor).remote(self._task.reward)

    def _load(self, actors: Sequence[Any]) -> None:
        references = [actor.load.remote() for actor in actors]
        _, late = ray.wait(references, num_returns=len(references), timeout=_START_TIMEOUT_S)
        if late:
            raise TaskError(
                f"loading the reward {self._task.reward!r} took longer than {_START_TIMEOUT_S:g} s; does its module do work at import?"
            )
        for reference in references:
            self._get(reference, f"reward {self._task.reward!r} could not be loaded")

    def _result(self, reference: Any, group: Group) -> list[float]:
        return self._get(reference, f"reward {self._task.reward!r} failed for prompt {group.prompt_id} (answer {group.answer!r})")

    def _get(self, reference: Any, what: str) -> Any:
        try:
            return ray.get(reference, timeout=1.0)
        except RayActorError as error:
            raise TaskError(f"{what}: its process died: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, MoerlError):
                raise error.cause from error
            raise TaskError(f"{what}: {error.cause}") from error

    def _late(self, numbers: Sequence[int], groups: Sequence[Group]) -> TaskError:
        prompts = ", ".join(f"{groups[number].prompt_id} (answer {groups[number].answer!r})" for number in numbers)
        return TaskError(
            f"reward {self._task.reward!r} did not answer within {self._task.reward_timeout_s:g} s for prompt {prompts}; its process was "
            "killed. Fix the function, or raise task.reward_timeout_s"
        )

    def _replace(self, workers: Sequence[int]) -> None:
        """Kill workers that are in the middle of something, and start others in their place."""
        for worker in workers:
            ray.kill(self._actors[worker])
            self._actors[worker] = self._spawn()
        self._load([self._actors[worker] for worker in workers])


class RewardWorkers:
    """`task.reward_workers` actors for an event loop: a group at a time each, with a deadline, and again where that fails.

    Where it fails `task.reward_retries` times more, that group has no rewards; the workers stay usable.
    """

    def __init__(self, task: Task):
        self._task = task
        self._idle: asyncio.Queue[Any] = asyncio.Queue()
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
            TaskError: the function raised, died, or did not answer in time, at every attempt; names the prompt.
        """
        record, failure = _record(group), None
        what = f"reward {self._task.reward!r} failed for prompt {group.prompt_id} (answer {group.answer!r})"
        for _ in range(1 + self._task.reward_retries):
            worker = await self._idle.get()
            try:
                rewards = await asyncio.wait_for(worker.score.remote(record), self._task.reward_timeout_s)
            except (TimeoutError, RayActorError) as error:
                late = isinstance(error, TimeoutError)
                why = (
                    f"no answer within {self._task.reward_timeout_s:g} s (task.reward_timeout_s)" if late else f"its process died: {error}"
                )
                failure = TaskError(f"{what}: {why}")
                self._all.remove(worker)
                ray.kill(worker)
                worker = await self._spawn()
            except RayTaskError as error:
                failure = error.cause if isinstance(error.cause, MoerlError) else TaskError(f"{what}: {error.cause}")
            except asyncio.CancelledError:
                self._idle.put_nowait(worker)
                raise
            else:
                self._idle.put_nowait(worker)
                return _scored(group, rewards)
            self._idle.put_nowait(worker)
        raise failure

    def stop(self) -> None:
        """End all workers. Safe to call twice."""
        for worker in self._all:
            ray.kill(worker)
        self._all = []

    async def _spawn(self) -> Any:
        worker = ray.remote(num_cpus=0, max_restarts=0)(RewardActor).remote(self._task.reward)
        self._all.append(worker)
        try:
            await asyncio.wait_for(worker.load.remote(), _START_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, MoerlError):
                raise error.cause from error
            raise TaskError(f"reward {self._task.reward!r} could not be loaded: {error.cause}") from error
        return worker


def _record(group: Group) -> bytes:
    """What a reward may look at: traces and logprobs would only make the record large."""
    return msgspec.msgpack.encode(replace(group, samples=[replace(sample, trace=b"", logprobs=b"") for sample in group.samples]))


def _scored(group: Group, rewards: Sequence[float]) -> Group:
    return replace(group, samples=[replace(sample, reward=value) for sample, value in zip(group.samples, rewards, strict=True)])
