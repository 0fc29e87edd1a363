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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
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
from moerl.cluster.slots import Look, Slots
from moerl.config.schema import Config
from moerl.errors import EngineError, MoerlError, RolloutError, TaskError
from moerl.rollout.curriculum import take
from moerl.rollout.generate import Outcome, Sampling
from moerl.rollout.sample import Group, Prompt, Sample

logger = logging.getLogger(__name__)

_BREAKER = 8
"""Groups in a row whose rewards failed, after which admission stops and the run ends."""
_LOOK_S = 0.5
"""How often the engines are asked what they do, and groups are looked for that run too long."""
_LOOK_TIMEOUT_S = 10.0

Step = tuple[list[bytes], dict[str, float]]
"""What a step is made of: encoded groups, and figures of how they came about."""


class Stream:
    """Runs inside a Ray actor; all methods run in its event loop. Call `start` first, and `stop` last.

    Args:
        prompts: the training set, encoded.
    """

    def __init__(self, config: Config, prompts: bytes, sampling: Sampling):
        self._config, self._sampling = config, sampling
        self._prompts = msgspec.msgpack.decode(prompts, type=list[Prompt])
        self._width = config.rollout.group_size + config.buffer.oversample
        self._meter = Meter(config.engine.count * config.engine.max_running_requests, time.monotonic())
        self._doing: Doing = "other"
        self._rewards = RewardWorkers(config.task)
        self._engines: list[Any] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}  # group -> from its dispatch to its rewards
        self._slots = Slots(config.engine.max_running_requests)
        self._asked: dict[int, tuple[Any, str]] = {}  # group -> (engine's actor, id of the call) that it waits for
        self._given_up: set[int] = set()  # groups that the scheduler wants aborted
        self._looking: asyncio.Task[None] | None = None
        self._ready: dict[int, bytes] = {}
        self._handed: tuple[int, Step] | None = None
        self._announced, self._held, self._stopping, self._calls = 0, True, False, 0
        self._trouble: MoerlError | None = None
        self._reward_failures = 0
        self._changed = asyncio.Event()
        self._open = ExitStack()

    async def start(self, folder: str, step: int, position: int) -> None:
        """Open the ledger of the run folder and start the reward workers.

        Args:
            step: the step that is trained next, which is also the trainer's version.
            position: where in the stream of prompts a new ledger begins.

        Raises:
            TaskError: the reward function cannot be found or imported.
            LedgerError: the ledger is damaged, or does not reach up to this step.
        """
        self._open.callback(self._rewards.stop)
        self._ledger = Ledger(Path(folder) / "ledger", step=step, position=position)
        self._open.callback(self._ledger.close)
        rollout = self._config.rollout
        self._scheduler = Scheduler(
            self._config.buffer,
            prompts_per_step=rollout.prompts_per_step,
            group_size=rollout.group_size,
            record=self._see,
            state=self._ledger.state,
            step=step,
        )
        await self._rewards.start()
        self._looking = asyncio.create_task(self._look())

    # ---- what the driver says

    def use(self, engines: Sequence[Any]) -> None:
        """These engines, by number, are there now; nothing begins on them before the next publication."""
        self._engines, self._held = list(engines), True
        if isinstance(self._trouble, EngineError):
            self._trouble = None

    async def announce(self, version: int) -> None:
        """A version is about to be pushed: from now on tokens may be of it. With `drain`, returns when no request runs."""
        self._announced = max(self._announced, version)
        if self._config.sync.interrupt == "drain":
            self._held = True
            await self._until(lambda: not self._slots or self._trouble is not None)

    def published(self, version: int) -> None:
        """All engines serve `version`, completely."""
        self._announced, self._held = max(self._announced, version), False
        self._scheduler.published(version)
        self._changed.set()
        self._pump()

    def doing(self, what: Doing) -> None:
        """What the trainer does from now on, for the metrics."""
        self._doing = what
        self._meter.trainer(time.monotonic(), what)
        self._changed.set()

    async def take(self, step: int) -> Step:
        """(groups of a step, encoded and in the order of the prompts; figures since the step before), as soon as they are there.

        May be asked for a step before the trainer needs it, and again for the one that was handed out last.

        Raises:
            EngineError, TaskError, RolloutError: why they will not be.
        """
        while self._handed is None or self._handed[0] != step:
            self._changed.clear()
            if self._trouble is not None:
                raise self._trouble
            formed = self._scheduler.take(step, time.monotonic())
            if isinstance(formed, Formed):
                self._handed = step, self._hand_over(formed)
                break
            if self._doing == "wait_groups":
                self._meter.trainer(time.monotonic(), "wait_due" if formed.due else "wait_groups")
            await self._changed.wait()
        return self._handed[1]

    def _hand_over(self, formed: Formed) -> Step:
        self._give_up(formed.late)
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
        """End everything that runs. The ledger still owes it, so that a run which resumes begins it again."""
        self._stopping = True
        tasks = [*self._tasks.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.close()

    # ---- one group

    def _pump(self) -> None:
        """Admit and begin what may begin now."""
        if self._stopping or self._trouble is not None:
            return
        with self._telling():
            now = time.monotonic()
            self._give_up(self._scheduler.overdue(now))
            if not self._held and self._engines:
                for position in self._scheduler.wants():
                    self._scheduler.admit(position, self._prompt(position).id, now)
                self._dispatch(now)

    def _dispatch(self, now_s: float) -> None:
        """Give waiting groups to the engines that have the least to do, while those can run a whole group more."""
        while (position := self._scheduler.next_waiting()) is not None:
            engine = self._slots.room(len(self._engines), self._width)
            if engine is None:
                break
            samples = list(self._scheduler.dispatched(position, now_s))
            self._occupy(position, engine, len(samples))
            task = self._tasks[position] = asyncio.create_task(self._carry(position, samples, engine))
            task.add_done_callback(partial(self._ended, position))
        self._meter.paced.set(now_s, max(0, self._meter.slots - self._slots.load().total()) if position is None else 0)

    def _give_up(self, positions: Collection[int]) -> None:
        """End groups that the scheduler wants aborted: what runs returns with what it has, and what waits for an engine is cancelled."""
        self._given_up.update(positions)
        for position in positions:
            if position in self._asked:
                engine, rid = self._asked[position]
                engine.give_up.remote(rid)
            else:
                self._tasks[position].cancel()

    def _prompt(self, position: int) -> Prompt:
        (prompt,) = take(self._prompts, position=position, count=1, seed=self._config.run.seed)
        return prompt

    async def _carry(self, position: int, samples: list[int], engine: int) -> None:
        """A group from its dispatch to its rewards, whatever happens to engines on the way."""
        group, cut = await self._generate(position, samples, engine)
        if group is None:
            self._scheduler.refuse(position, time.monotonic(), cut=cut)
        else:
            await self._reward(position, group)

    def _ended(self, position: int, task: asyncio.Task[None]) -> None:
        """A group's task is over: as it should be, failed, or cancelled because the scheduler wanted the group aborted."""
        del self._tasks[position]
        self._given_up.discard(position)
        self._release(position)
        if self._stopping:
            return
        with self._telling():
            if task.cancelled():
                self._scheduler.refuse(position, time.monotonic())
            else:
                task.result()
        self._pump()

    async def _generate(self, position: int, samples: list[int], engine: int) -> tuple[Group | None, list[int]]:
        """(the complete group, or None if it came to nothing; then, tokens of each completion that was cut)"""
        prompt, kept, fate = self._prompt(position), [], "running"
        while samples and fate == "running":
            began = self._scheduler.version
            outcome = await self._ask(position, prompt, samples, self._config.rollout.group_size - len(kept), engine)
            if position in self._given_up:
                fate = "aborting"
            samples, unneeded = [], list(outcome.cut.values())
            for sample in outcome.samples:
                length = len(sample.response_tokens)
                if fate == "running":
                    kept.append(sample)
                    fate = self._scheduler.sample_done(position, sample.index, length, self._oldest(sample, began))
                else:
                    unneeded.append(length)
            for index, (reason, tokens) in outcome.failed.items():
                logger.warning("completion %d of group %d is begun anew or left out: %s", index, position, reason)
                if fate != "running":
                    self._scheduler.wasted(position, "unproved", tokens)
                elif (fate := self._scheduler.sample_failed(position, index, "unproved", tokens)) == "again":
                    samples, fate = [*samples, index], "running"
            if fate == "aborting":
                return None, unneeded
            if unneeded:
                self._scheduler.wasted(position, "oversampled", sum(unneeded))
        samples_in_order = [msgspec.structs.replace(sample, index=number) for number, sample in enumerate(kept)]
        return Group(prompt.id, prompt.answer, samples_in_order), []

    async def _ask(self, position: int, prompt: Prompt, samples: list[int], keep: int, engine: int) -> Outcome:
        """Have an engine generate; what one that dies was doing is done again, when all engines hold a version."""
        lost = False
        while True:
            if position not in self._slots:  # its dispatch has seen to this the first time
                await self._until(lambda: not self._held and self._trouble is None)
                engine = min(engine, len(self._engines) - 1)
                self._occupy(position, engine, len(samples))
            if lost:
                self._scheduler.restarted(position, time.monotonic())
            self._calls += 1
            rid = f"g{position}.{self._calls}"
            engines, sampling = self._engines, replace(self._sampling, shares=self._scheduler.version)
            call = engines[engine].some.remote(msgspec.msgpack.encode(prompt), sampling, samples, keep, rid)
            self._asked[position] = engines[engine], rid
            try:
                return msgspec.msgpack.decode(await call, type=Outcome)
            except asyncio.CancelledError:
                ray.cancel(call)
                raise
            except RayActorError as error:
                found: MoerlError = EngineError(f"engine {engine} died: {error}")
            except RayTaskError as error:
                found = own_error(error, f"engine {engine}")
            finally:
                del self._asked[position]
                self._release(position)
            if not isinstance(found, EngineError):
                raise found
            if engines is self._engines:  # else it has been replaced before this came to light
                self._fail(found)
            if position in self._given_up:
                return Outcome([], {}, {})  # nobody knows what it had sampled
            self._scheduler.stopped(position)
            lost = True

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

    def _occupy(self, position: int, engine: int, completions: int) -> None:
        self._slots.occupy(position, engine, completions, time.monotonic())
        self._count()

    def _release(self, position: int) -> None:
        self._slots.release(position)
        self._count()
        self._changed.set()

    def _count(self) -> None:
        self._meter.running.set(time.monotonic(), min(self._meter.slots, self._slots.load().total()))

    async def _look(self) -> None:
        """Ask the engines what they do, again and again. One that doesn't answer is not reported here: the calls of its groups are."""
        while True:
            await asyncio.sleep(_LOOK_S)
            engines, settled = self._engines, self._slots.settled(time.monotonic())
            answers = [asyncio.wait_for(engine.look.remote(), _LOOK_TIMEOUT_S) for engine in engines]
            found = await asyncio.gather(*answers, return_exceptions=True)
            if engines is self._engines:
                for number, look in enumerate(found):
                    if isinstance(look, Look):
                        self._slots.looked(number, settled[number], look.running)
                        self._meter.engine(number, look.tokens, look.paused_s)
                self._count()
                self._pump()

    def _fail(self, error: Exception) -> None:
        """Nothing more begins; whoever asks for groups hears why. Engines can be replaced, so any other trouble counts more."""
        if self._trouble is None or (isinstance(self._trouble, EngineError) and not isinstance(error, EngineError)):
            self._trouble = error if isinstance(error, MoerlError) else RolloutError(f"{type(error).__name__}: {error}")
            self._held = True
        self._changed.set()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """The trainer must hear of what goes wrong inside, or it waits for nothing."""
        try:
            yield
        except Exception as error:
            logger.exception("the stream of groups ends")
            self._fail(error)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    def _see(self, event: Event) -> None:
        self._ledger.append(event)
        self._meter.see(event)
