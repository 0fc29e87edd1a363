"""A cluster under a virtual clock, driven by the very `Scheduler` that drives the real one: how busy would engines and trainer be?

    Cluster --simulate--> Outcome        (heap of events: one per completion, none per token)

Model: an engine decodes all its running completions in step, one token each per `decode_base_s + decode_per_running_s × running`
seconds. A group's prompt is read once, which holds its engine up. One request carries one group, so a group runs on one engine, and waits
there for slots. The trainer forms a step, trains it, and hands the new weights over; both sides stand still for `sync_pause_s`, and
the trainer until every engine serves the new version. Then `interrupt`: "in_place" goes on with what is running, "resume" reads prompts
and what was generated again, "drain" lets an engine finish what it has before it is paused. Rewards cost nothing.

The bound is the time that the slower side needs for the groups that were trained, if nothing ever kept it waiting:
generation with all slots of all engines busy at all times, at the speed of full engines (the highest there is), prompts
included; or training of all steps. Sync pauses, waits, waste, and the ramp at the beginning and the end count against the share.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moerl.buffer.ledger import Delivered, Event
from moerl.buffer.metrics import Meter
from moerl.buffer.scheduler import Formed, Scheduler
from moerl.config.schema import Buffer
from moerl.errors import ConfigError

Z_95 = 1.6448536269514722
_TINY = 1e-300  # anything above 0
_HOPELESS = 100  # times a step's groups that ran too long, with no step in between, after which none will ever be formed
_EPSILON = 1e-9  # of a token: what floating point may leave of a completion that has ended


@dataclass(frozen=True)
class Cluster:
    """What is simulated. Times in seconds, lengths in tokens.

    Attributes:
        slots: completions that an engine runs at once.
        steps: training steps to simulate.
        prompts: distinct prompts; each comes back every epoch.
        length_median, length_p95: of the log-normal distribution of completion lengths, before max_new_tokens cuts it.
        predictable: share of the log length's variance that is the prompt's, and so is known once it was seen.
        recorded: in place of the distribution, lengths of recorded groups, one sequence per prompt.
        prompt_s_per_token: an engine's time to read one prompt token.
        train_s_per_token: the trainer's time per token of prompt and completion.
        uniform_share: groups whose rewards are all the same.
    """

    engines: int = 8
    slots: int = 64
    prompts_per_step: int = 64
    group_size: int = 16
    max_new_tokens: int = 16384
    buffer: Buffer = field(default_factory=Buffer)
    steps: int = 100
    prompts: int = 4096
    length_median: float = 1000.0
    length_p95: float = 8000.0
    predictable: float = 0.5
    recorded: Sequence[Sequence[int]] = ()
    prompt_tokens: int = 200
    prompt_s_per_token: float = 1e-4
    decode_base_s: float = 0.015
    decode_per_running_s: float = 1e-4
    train_s_per_token: float = 5e-5
    train_fixed_s: float = 2.0
    sync_pause_s: float = 2.0
    interrupt: Literal["in_place", "resume", "drain"] = "in_place"
    uniform_share: float = 0.0
    seed: int = 1

    def __post_init__(self):
        positive = ("engines", "slots", "prompts_per_step", "group_size", "max_new_tokens", "steps", "prompts", "decode_base_s")
        times = ("prompt_s_per_token", "decode_per_running_s", "train_s_per_token", "train_fixed_s", "sync_pause_s")
        bounds = dict.fromkeys(positive, (_TINY, math.inf))
        bounds |= dict.fromkeys(("prompt_tokens", *times), (0, math.inf)) | {"predictable": (0, 1), "uniform_share": (0, 1)}
        problems = [
            f"{name} must be {'above 0' if low else 'at least 0' if high > 1 else 'from 0 to 1'}, got {getattr(self, name)}"
            for name, (low, high) in bounds.items()
            if not low <= getattr(self, name) <= high
        ]
        if not 0 < self.length_median <= self.length_p95:
            problems.append(f"length_p95 {self.length_p95} must be at least length_median {self.length_median}, and that above 0")
        if self.interrupt not in ("in_place", "resume", "drain"):
            problems.append(f"interrupt is in_place, resume or drain, got {self.interrupt!r}")
        if problems:
            raise ConfigError([f"simulation: {problem}" for problem in problems])


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        elapsed_s: from the first request to the end of the last step.
        generation_s, training_s: what each side needs for the trained groups if nothing keeps it waiting (see the module).
        tokens: response tokens that were trained.
        figures: of the whole run, as the real loop would log them.
    """

    elapsed_s: float
    generation_s: float
    training_s: float
    tokens: int
    steps: int
    figures: dict[str, float]

    @property
    def bound_s(self) -> float:
        return max(self.generation_s, self.training_s)

    @property
    def share(self) -> float:
        """Of the bound: 1 is a cluster whose slower side never waits."""
        return self.bound_s / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s


def simulate(cluster: Cluster) -> Outcome:
    """Run the cluster for its steps; the same input gives the same output.

    Raises:
        ConfigError: groups run longer than `buffer.group_timeout_s` again and again, so that no step is formed.
    """
    return _Simulation(cluster).run()


class _Lengths:
    """Completion lengths and the fate of a group, as a function of its position alone, so that policies are compared on the same work."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        spread = math.log(cluster.length_p95 / cluster.length_median) / Z_95
        self._own = spread * math.sqrt(1 - cluster.predictable)
        shift = np.random.default_rng([cluster.seed, 0]).standard_normal(cluster.prompts)
        self._medians = math.log(cluster.length_median) + spread * math.sqrt(cluster.predictable) * shift
        self._recorded = [np.asarray(lengths) for lengths in cluster.recorded]
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def prompt(self, position: int) -> int:
        epoch, offset = divmod(position, self.cluster.prompts)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.cluster.seed, 1, epoch]).permutation(self.cluster.prompts)
        return int(self._order[offset])

    def draw(self, position: int, prompt: int, count: int) -> tuple[list[int], bool]:
        """(lengths of `count` completions, whether their rewards are all the same)"""
        random = np.random.default_rng([self.cluster.seed, 2, position])
        uniform = bool(random.random() < self.cluster.uniform_share)
        if self._recorded:
            lengths = random.choice(self._recorded[prompt % len(self._recorded)], count)
        else:
            lengths = np.exp(self._medians[prompt] + self._own * random.standard_normal(count))
        return np.clip(np.rint(lengths), 1, self.cluster.max_new_tokens).astype(int).tolist(), uniform


class _Engine:
    """One engine. `decoded` counts the tokens that a completion running since the beginning would have."""

    __slots__ = ("base_s", "decoded", "draining", "now_s", "per_running_s", "queue", "running", "slots", "stalled_s", "stamp", "version")

    def __init__(self, cluster: Cluster):
        self.slots, self.base_s, self.per_running_s = cluster.slots, cluster.decode_base_s, cluster.decode_per_running_s
        self.running: list[tuple[float, int, int, int]] = []  # heap of (decoded when it ends, position, completion, length)
        self.queue: deque[tuple[int, int, int]] = deque()  # (position, completion, length)
        self.decoded = self.now_s = self.stalled_s = 0.0
        self.stamp = 0  # of the event that was scheduled last; others are void
        self.draining = False

    @property
    def hungry(self) -> bool:
        return not self.queue and len(self.running) < self.slots and not self.draining

    def advance(self, now_s: float) -> None:
        if self.running and now_s > self.stalled_s:
            token_s = self.base_s + self.per_running_s * len(self.running)
            self.decoded += (now_s - max(self.now_s, self.stalled_s)) / token_s
        self.now_s = now_s

    def stall(self, seconds: float) -> None:
        self.stalled_s = max(self.stalled_s, self.now_s) + seconds

    def next_end_s(self) -> float:
        token_s = self.base_s + self.per_running_s * len(self.running)
        return max(self.now_s, self.stalled_s) + max(0.0, self.running[0][0] - self.decoded) * token_s

    def held_tokens(self) -> float:
        """Response tokens so far of all that is running."""
        return sum(length - (end - self.decoded) for end, _, _, length in self.running)

    def fill(self) -> int:
        """Start what is queued; how many."""
        started = 0
        while self.queue and len(self.running) < self.slots:
            position, sample, length = self.queue.popleft()
            heapq.heappush(self.running, (self.decoded + length, position, sample, length))
            started += 1
        return started

    def cut(self, position: int) -> list[int]:
        """Abort a group: tokens of each of its completions that were running."""
        found = [entry for entry in self.running if entry[1] == position]
        self.running = [entry for entry in self.running if entry[1] != position]
        heapq.heapify(self.running)
        self.queue = deque(entry for entry in self.queue if entry[0] != position)
        return [int(length - (end - self.decoded)) for end, _, _, length in found]


class _Simulation:
    def __init__(self, cluster: Cluster):
        self.cluster, self.lengths = cluster, _Lengths(cluster)
        self.meter = Meter(cluster.engines * cluster.slots)
        self.scheduler = Scheduler(
            cluster.buffer, prompts_per_step=cluster.prompts_per_step, group_size=cluster.group_size, record=self._record
        )
        self.engines = [_Engine(cluster) for _ in range(cluster.engines)]
        self.where: dict[int, _Engine] = {}  # running group -> its engine
        self.began: dict[int, tuple[int, bool]] = {}  # running group -> (version, uniform)
        self.events: list[tuple[float, int, str, _Engine | None, int]] = []
        self.sequence = 0
        self.now_s = self.training_s = 0.0
        self.version = self.trained = self.tokens = self.groups = self.timeouts = 0
        self.idle, self.blockers = True, frozenset[int]()
        self.syncing = 0  # engines that do not serve the new version yet

    def _record(self, event: Event) -> None:
        self.meter.see(event)
        if isinstance(event, Delivered):
            self.tokens += sum(sum(group.lengths) for group in event.groups)
            self.groups += len(event.groups)

    def run(self) -> Outcome:
        self._publish()
        while self.trained < self.cluster.steps:
            self.now_s, _, kind, engine, stamp = heapq.heappop(self.events)
            if kind == "end":
                if engine.stamp == stamp:
                    self._ended(engine)
            elif kind == "overdue":
                self._overdue()
            elif kind == "trained":
                self._trained_step()
            else:
                self._synced(engine)
        return self._outcome()

    def _outcome(self) -> Outcome:
        cluster = self.cluster
        token_s = (cluster.decode_base_s + cluster.decode_per_running_s * cluster.slots) / (cluster.slots * cluster.engines)
        prompts_s = self.groups * cluster.prompt_tokens * cluster.prompt_s_per_token / cluster.engines
        return Outcome(
            elapsed_s=self.now_s,
            generation_s=self.tokens * token_s + prompts_s,
            training_s=self.training_s,
            tokens=self.tokens,
            steps=self.trained,
            figures=self.meter.report(self.now_s),
        )

    def _at(self, time_s: float, kind: str, engine: _Engine | None = None, stamp: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time_s, self.sequence, kind, engine, stamp))

    # ---- engines

    def _feed(self, engines: Sequence[_Engine]) -> None:
        """Admit what may be, and start groups on engines with free slots, the emptiest first."""
        for position in self.scheduler.wants():
            self.scheduler.admit(position, self.lengths.prompt(position), self.now_s)
        hungry = [(len(engine.running), index, engine) for index, engine in enumerate(engines) if engine.hungry]
        heapq.heapify(hungry)
        touched = {}
        while hungry and (position := self.scheduler.next_waiting()) is not None:
            _, index, engine = heapq.heappop(hungry)
            self._start(position, engine)
            touched[index] = engine
            if engine.hungry:
                heapq.heappush(hungry, (len(engine.running), index, engine))
        for engine in touched.values():
            self._schedule(engine)
        free = self.meter.slots - self.meter.running.value
        self.meter.paced.set(self.now_s, free if self.scheduler.next_waiting() is None else 0.0)

    def _start(self, position: int, engine: _Engine) -> None:
        samples = self.scheduler.dispatched(position, self.now_s)
        lengths, uniform = self.lengths.draw(position, self.lengths.prompt(position), len(samples))
        self.where[position], self.began[position] = engine, (self.version, uniform)
        engine.advance(self.now_s)
        engine.stall(self.cluster.prompt_tokens * self.cluster.prompt_s_per_token)
        engine.queue.extend((position, sample, length) for sample, length in zip(samples, lengths, strict=True))
        self.meter.running.add(self.now_s, engine.fill())
        if self.cluster.buffer.group_timeout_s is not None:
            self._at(self.now_s + self.cluster.buffer.group_timeout_s + _EPSILON, "overdue")

    def _schedule(self, engine: _Engine) -> None:
        if engine.running:
            engine.stamp += 1
            self._at(engine.next_end_s(), "end", engine, engine.stamp)

    def _ended(self, engine: _Engine) -> None:
        """Completions of an engine have ended."""
        engine.advance(self.now_s)
        limit = engine.decoded + _EPSILON * max(1.0, engine.decoded)
        ready, change = [], 0
        while engine.running and engine.running[0][0] <= limit:
            _, position, sample, length = heapq.heappop(engine.running)
            change -= 1
            if self.scheduler.sample_done(position, sample, length, self.began[position][0]) == "complete":
                ready.append(position)
                if self.cluster.buffer.oversample:
                    tokens = engine.cut(position)
                    change -= len(tokens)
                    self.scheduler.wasted(position, "oversampled", sum(tokens))
        self.meter.running.add(self.now_s, change + engine.fill())
        if engine.draining and not engine.running:
            self._pause(engine)
        self._schedule(engine)
        refused = False
        for position in ready:
            del self.where[position]
            refused |= not self.scheduler.scored(position, self.now_s, uniform=self.began.pop(position)[1])
        if ready:
            self._groups_ended(frozenset(ready))
        if refused:
            self._feed(self.engines)
        elif engine.hungry:
            self._feed([engine])

    def _overdue(self) -> None:
        positions = self.scheduler.overdue(self.now_s)
        self.timeouts += len(positions)
        if self.timeouts > _HOPELESS * self.cluster.prompts_per_step:
            limit = f"buffer.group_timeout_s {self.cluster.buffer.group_timeout_s:g} is too short"
            raise ConfigError([f"{limit}: {self.timeouts} groups ran longer, with no step in between"])
        self._cut(positions)

    def _cut(self, positions: Sequence[int]) -> None:
        for position in positions:
            engine = self.where.pop(position)
            engine.advance(self.now_s)
            tokens = engine.cut(position)
            self.began.pop(position)
            self.meter.running.add(self.now_s, engine.fill() - len(tokens))
            self.scheduler.refuse(position, self.now_s, cut=tokens)
            if engine.draining and not engine.running:
                self._pause(engine)
            self._schedule(engine)
        if positions:
            self._groups_ended(frozenset(positions))
            self._feed(self.engines)

    # ---- trainer

    def _groups_ended(self, positions: frozenset[int]) -> None:
        ready = self.scheduler.levels()["ready"]
        self.meter.ready.set(self.now_s, ready)
        if self.idle and ready >= self.cluster.prompts_per_step and (not self.blockers or not self.blockers.isdisjoint(positions)):
            self._try_step()

    def _try_step(self) -> None:
        formed = self.scheduler.take(self.trained, self.now_s)
        if not isinstance(formed, Formed):
            self.idle, self.blockers = True, formed.blockers if formed.due else frozenset()
            self.meter.trainer(self.now_s, "wait_due" if formed.due else "wait_groups")
            return
        self.idle, self.blockers, self.timeouts = False, frozenset(), 0
        tokens = sum(sum(group.lengths) + len(group.lengths) * self.cluster.prompt_tokens for group in formed.groups)
        seconds = self.cluster.train_fixed_s + tokens * self.cluster.train_s_per_token
        self.training_s += seconds
        self.meter.trainer(self.now_s, "train")
        self.meter.ready.set(self.now_s, self.scheduler.levels()["ready"])
        self._at(self.now_s + seconds, "trained")
        self._cut(formed.late)

    def _trained_step(self) -> None:
        self.trained += 1
        if self.trained == self.cluster.steps:
            return
        self.meter.trainer(self.now_s, "sync")
        self.syncing = len(self.engines)
        for engine in self.engines:
            engine.draining = self.cluster.interrupt == "drain"
            if not engine.draining or not engine.running:
                self._pause(engine)

    def _pause(self, engine: _Engine) -> None:
        """The new weights go to an engine."""
        engine.draining = False
        engine.advance(self.now_s)
        if self.cluster.interrupt == "resume":
            again = engine.held_tokens() + len({entry[1] for entry in engine.running}) * self.cluster.prompt_tokens
            engine.stall(again * self.cluster.prompt_s_per_token)
        engine.stall(self.cluster.sync_pause_s)
        self._schedule(engine)
        self._at(self.now_s + self.cluster.sync_pause_s, "synced", engine)

    def _synced(self, engine: _Engine) -> None:
        self.syncing -= 1
        if not self.syncing:
            self._publish()

    def _publish(self) -> None:
        self.version = self.trained
        self.scheduler.published(self.version)
        self._feed(self.engines)
        self._try_step()
