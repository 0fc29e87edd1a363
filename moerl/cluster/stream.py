"""The stream of groups between engines and trainer: a Ray actor that keeps the engines busy while the trainer trains.

    prompts --admit--> engines --completions--> rewards --scored--> ready groups --take--> trainer
       ^ as the scheduler wants them (buffer/scheduler.py decides; this file only carries out)        | published(version)
       +----------------------------------------------------------------------------------------------+

Everything happens in one event loop. Every group is one task, from its dispatch to its rewards. Invariants: the scheduler hears of
everything before anything acts on it, and the ledger of everything before the scheduler; what an engine that died was doing is done
again once all engines hold a version; a sample with a token of a version that was never announced is an error, never trained on.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from moerl.buffer.ledger import Event, Ledger
from moerl.buffer.metrics import Doing, Meter
from moerl.buffer.scheduler import Formed, Scheduler
from moerl.cluster.calls import own_error
from moerl.cluster.rewards import RewardWorkers
from moerl.config.schema import Config
from moerl.errors import EngineError, MoerlError, RolloutError, TaskError
from moerl.rollout.curriculum import take
from moerl.rollout.generate import Outcome, Sampling
from moerl.rollout.sample import Group, Prompt, Sample

logger = logging.getLogger(__name__)

_BREAKER = 8
"""Groups in a row whose rewards failed, after which admission stops and the run ends."""


class Stream:
    """Runs inside a Ray actor; all methods run in its event loop.

    Args:
        prompts: the training set, encoded.
        engines: actors, by number.
        step: the step that is trained next, which is also the trainer's version.
        position: where in the stream of prompts a new ledger begins.
    """

    def __init__(self, config: Config, prompts: bytes, sampling: Sampling, folder: str, step: int, position: int):
        rollout, buffer = config.rollout, config.buffer
        self._config, self._sampling = config, sampling
        self._prompts = msgspec.msgpack.decode(prompts, type=list[Prompt])
        self._ledger = Ledger(Path(folder) / "ledger", step=step, position=position)
        self._scheduler = Scheduler(
            buffer,
            prompts_per_step=rollout.prompts_per_step,
            group_size=rollout.group_size,
            record=self._see,
            state=self._ledger.state,
            step=step,
        )
        self._width = rollout.group_size + buffer.oversample
        self._meter = Meter(config.engine.count * config.engine.max_running_requests, time.monotonic())
        self._rewards = RewardWorkers(config.task)
        self._engines: list[Any] = []
        self._load: Counter[int] = Counter()  # completions that run, by engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, bytes] = {}
        self._announced, self._held, self._calls = 0, True, 0
        self._trouble: MoerlError | None = None
        self._reward_failures = 0
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the reward workers.

        Raises:
            TaskError: the reward function cannot be found or imported.
        """
        await self._rewards.start()

    # ---- what the driver says

    def use(self, engines: Sequence[Any]) -> None:
        """These engines are there now; nothing begins on them before the next publication."""
        self._engines, self._held, self._trouble = list(engines), True, None
        self._load.clear()

    async def announce(self, version: int) -> None:
        """A version is about to be pushed: from now on tokens may be of it. With `drain`, returns when no request runs."""
        self._announced = max(self._announced, version)
        if self._config.sync.interrupt == "drain":
            self._held = True
            await self._until(lambda: not self._tasks or self._trouble is not None)

    def published(self, version: int) -> None:
        """All engines serve `version`, completely."""
        self._announced, self._held = max(self._announced, version), False
        self._scheduler.published(version)
        self._pump()

    def doing(self, what: Doing) -> None:
        """What the trainer does from now on, for the metrics."""
        self._meter.trainer(time.monotonic(), what)

    async def take(self, step: int) -> tuple[list[bytes], dict[str, float]]:
        """(groups of a step, encoded and in the order of the prompts; figures since the step before), as soon as they are there.

        Raises:
            EngineError, TaskError, RolloutError: why they will not be.
        """
        while True:
            self._changed.clear()
            if self._trouble is not None:
                raise self._trouble
            formed = self._scheduler.take(step, time.monotonic())
            if isinstance(formed, Formed):
                break
            logger.info("%s", formed.text)
            self._meter.trainer(time.monotonic(), "wait_due" if formed.due else "wait_groups")
            await self._changed.wait()
        for position in formed.late:
            self._tasks[position].cancel()
        groups = [self._ready.pop(group.position) for group in formed.groups]
        self._meter.ready.set(time.monotonic(), len(self._ready))
        self._pump()
        return groups, {**self._meter.report(time.monotonic()), "buffer/capped": float(formed.capped)}

    async def score(self, groups: bytes) -> bytes:
        """Groups with rewards, both encoded; for evaluation.

        Raises:
            TaskError: the reward failed for one of them.
        """
        found = await asyncio.gather(*map(self._rewards.score, msgspec.msgpack.decode(groups, type=list[Group])))
        return msgspec.msgpack.encode(found)

    def waits_for(self) -> str:
        """What the stream is busy with, in words."""
        levels = ", ".join(f"{count} {stage}" for stage, count in self._scheduler.levels().items() if count)
        return f"groups: {levels or 'none'}; engines serve version {self._scheduler.version}"

    async def stop(self) -> None:
        """End everything that runs."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._rewards.stop()
        self._ledger.close()

    # ---- one group

    def _pump(self) -> None:
        """Admit and begin what may begin now."""
        if self._held or self._trouble is not None or not self._engines:
            return
        now = time.monotonic()
        for position in self._scheduler.overdue(now):
            self._tasks[position].cancel()
        for position in self._scheduler.wants():
            self._scheduler.admit(position, self._prompt(position).id, now)
        while (position := self._scheduler.next_waiting()) is not None and (engine := self._free()) is not None:
            samples = self._scheduler.dispatched(position, now)
            self._tasks[position] = asyncio.create_task(self._carry(position, list(samples), engine))
        self._meter.paced.set(now, max(0, self._meter.slots - self._load.total()) if self._scheduler.next_waiting() is None else 0)

    def _free(self) -> int | None:
        """The engine with the least to do, if it can run a whole group more."""
        engine = min(range(len(self._engines)), key=lambda number: self._load[number])
        limit = max(self._config.engine.max_running_requests, self._width)
        return engine if self._load[engine] + self._width <= limit else None

    def _prompt(self, position: int) -> Prompt:
        (prompt,) = take(self._prompts, position=position, count=1, seed=self._config.run.seed)
        return prompt

    async def _carry(self, position: int, samples: list[int], engine: int) -> None:
        """A group from its dispatch to its rewards, whatever happens to engines on the way."""
        cut: list[int] = []
        try:
            group = await self._generate(position, samples, engine, cut)
            if group is not None:
                await self._reward(position, group)
        except asyncio.CancelledError:
            self._scheduler.refuse(position, time.monotonic(), cut=cut)
        except Exception as error:  # noqa: BLE001 - the trainer must hear of it, or it waits for nothing
            self._fail(error if isinstance(error, MoerlError) else RolloutError(f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(position, None)
            self._changed.set()
            self._pump()

    async def _generate(self, position: int, samples: list[int], engine: int, cut: list[int]) -> Group | None:
        """The complete group; None if it came to nothing."""
        prompt, kept = self._prompt(position), []
        keep, fate = self._config.rollout.group_size, "running"
        while samples and fate != "complete":
            began = self._scheduler.version
            outcome = await self._ask(position, prompt, samples, keep - len(kept), engine)
            samples = []
            for sample in outcome.samples:
                kept.append(sample)
                cut.append(len(sample.response_tokens))
                fate = self._scheduler.sample_done(position, sample.index, len(sample.response_tokens), self._oldest(sample, began))
                if fate != "running":
                    break
            for index, (reason, tokens) in outcome.failed.items():
                if fate == "running" and (fate := self._scheduler.sample_failed(position, index, "unproved", tokens)) == "again":
                    samples, fate = [*samples, index], "running"
                logger.warning("a completion of group %d is begun anew or left out: %s", position, reason)
            if tokens := sum(outcome.cut.values()):
                self._scheduler.wasted(position, "oversampled", tokens)
        if fate == "aborting":
            self._scheduler.refuse(position, time.monotonic(), cut=cut)
            return None
        return Group(prompt.id, prompt.answer, [msgspec.structs.replace(sample, index=number) for number, sample in enumerate(kept)])

    async def _ask(self, position: int, prompt: Prompt, samples: list[int], keep: int, engine: int) -> Outcome:
        """Have an engine generate; what one that dies was doing is done again, when all engines hold a version."""
        while True:
            self._calls += 1
            actor, sampling = self._engines[engine], replace(self._sampling, shares=self._scheduler.version)
            call = actor.some.remote(msgspec.msgpack.encode(prompt), sampling, samples, keep, f"g{position}.{self._calls}")
            self._running(engine, len(samples))
            try:
                return msgspec.msgpack.decode(await call, type=Outcome)
            except asyncio.CancelledError:
                ray.cancel(call)
                raise
            except (RayActorError, RayTaskError) as error:
                found = (
                    own_error(error, f"engine {engine}")
                    if isinstance(error, RayTaskError)
                    else EngineError(f"engine {engine} died: {error}")
                )
                if not isinstance(found, EngineError):
                    raise found from error
                self._fail(found)
            finally:
                self._running(engine, -len(samples))
            await self._until(lambda: not self._held and self._trouble is None)
            engine = engine if engine < len(self._engines) else 0

    async def _reward(self, position: int, group: Group) -> None:
        try:
            group = await self._rewards.score(group)
            self._reward_failures = 0
        except TaskError as error:
            self._reward_failures += 1
            logger.warning("group %d is refused: %s", position, error)
            self._scheduler.refuse(position, time.monotonic(), "reward")
            if self._reward_failures >= _BREAKER:
                raise TaskError(
                    f"the rewards of {_BREAKER} groups in a row failed, so nothing more is generated; the last one: {error}"
                ) from error
            return
        rewards = {sample.reward for sample in group.samples}
        if self._scheduler.scored(position, time.monotonic(), uniform=len(rewards) == 1):
            self._ready[position] = msgspec.msgpack.encode(group)
            self._meter.ready.set(time.monotonic(), len(self._ready))

    def _oldest(self, sample: Sample, began: int) -> int:
        """The version of the sample's oldest token.

        Raises:
            RolloutError: a token of a version that no engine can have served meanwhile.
        """
        versions = [version for version, _, _ in sample.versions]
        if min(versions) < began or max(versions) > self._announced:
            raise RolloutError(
                f"sample {sample.index} of prompt {sample.prompt_id} on engine {sample.engine} has tokens of versions {versions}, but it "
                f"began at version {began} and version {self._announced} is the newest that was announced; is that engine of another run?"
            )
        return min(versions)

    def _running(self, engine: int, change: int) -> None:
        self._load[engine] += change
        self._meter.running.set(time.monotonic(), self._load.total())

    def _fail(self, error: MoerlError) -> None:
        """Nothing more begins; whoever asks for groups hears why."""
        if self._trouble is None:
            self._trouble, self._held = error, True
        self._changed.set()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    def _see(self, event: Event) -> None:
        self._ledger.append(event)
        self._meter.see(event)
