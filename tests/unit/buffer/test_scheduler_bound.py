"""The scheduler's promises under any order of events: bounded lag, nothing lost, each group ends once, and no standstill.

A world of engines, rewards, a trainer and crashes makes hundreds of random moves per example; how often which move is made is drawn too,
so that slow trainers, slow engines and slow weight updates all occur. The ledger's state judges every event.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.buffer.ledger import Delivered, Event, Opened, Refused, State
from moerl.buffer.scheduler import Formed, Scheduler
from moerl.config.schema import Buffer

MOVES = 400

buffers = st.builds(
    Buffer,
    max_lag=st.integers(0, 4),
    policy=st.sampled_from(["wait", "wait", "refuse", "mask"]),
    capacity_groups=st.none() | st.integers(4, 12),
    oversample=st.integers(0, 1),
    sample_retries=st.integers(0, 2),
    dynamic_sampling=st.booleans(),
    max_resamples_per_step=st.integers(1, 3),
    group_timeout_s=st.none() | st.just(50.0),
    longest_first=st.booleans(),
)
weights = st.fixed_dictionaries(
    {
        "dispatch": st.sampled_from([1, 4]),
        "end": st.sampled_from([4, 12]),
        "fail": st.sampled_from([0, 1]),
        "engine_dies": st.sampled_from([0.0, 0.2]),
        "score": st.sampled_from([2, 6]),
        "publish": st.sampled_from([0.5, 3]),
        "ask": st.sampled_from([1, 5]),
        "time_passes": st.sampled_from([0.0, 0.5]),
        "crash": st.sampled_from([0.0, 0.02]),
    }
)


@dataclass
class Flying:
    """What the engines know of a group: the served version at the start of each running completion, and the versions of ended ones."""

    running: dict[int, int]
    ended: list[int] = field(default_factory=list)


class World:
    def __init__(self, buffer: Buffer, count: int, size: int, seed: int):
        self.buffer, self.count, self.size, self.random = buffer, count, size, Random(seed)
        self.now_s, self.ledger, self.seen = 0.0, State(), Counter()
        self.uniform_refused = 0
        self.ledger.apply(Opened(0, 0))
        self.start(0)

    def start(self, step: int) -> None:
        self.scheduler = Scheduler(
            self.buffer, prompts_per_step=self.count, group_size=self.size, record=self.record, state=self.ledger, step=step
        )
        self.flying: dict[int, Flying] = {}
        self.scoring: dict[int, int] = {}  # position -> oldest version of its tokens
        self.ready: dict[int, int] = {}
        self.waiting: dict[int, int] = {}  # position -> version at its admission
        self.uniform_refused = 0
        self.scheduler.published(step)  # a resumed run first pushes the weights of its checkpoint

    def record(self, event: Event) -> None:
        self.ledger.apply(event)
        self.seen[type(event).__name__] += 1
        if isinstance(event, Delivered):
            self.uniform_refused = 0
            assert len(event.groups) == self.count
            for group in event.groups:
                assert group.lag == event.step - self.ready.pop(group.position)
                assert self.buffer.policy == "mask" or 0 <= group.lag <= self.buffer.max_lag
                self.seen[f"lag {group.lag}"] += 1
        if isinstance(event, Refused):
            self.seen[event.reason] += 1
            self.uniform_refused += event.reason == "uniform"
            assert self.uniform_refused <= self.buffer.max_resamples_per_step

    # ---- moves

    def dispatch(self) -> None:
        for position in self.scheduler.wants():
            self.scheduler.admit(position, position % 5, self.now_s)
            self.waiting[position] = self.scheduler.version
        assert self.scheduler.wants() == []
        for _ in range(self.random.randint(0, 6)):
            if (position := self.scheduler.next_waiting()) is None:
                break
            assert self.waiting.pop(position) <= min(self.waiting.values(), default=self.scheduler.version)  # overtakes no older one
            samples = self.scheduler.dispatched(position, self.now_s)
            assert len(samples) == self.size + self.buffer.oversample
            self.flying[position] = Flying(dict.fromkeys(samples, self.scheduler.version))

    def end(self) -> None:
        if self.flying:
            position = self.random.choice([*self.flying, *sorted(self.flying)[-3:]])  # late ones often end first
            sample = self.random.choice(list(self.flying[position].running))
            version = self.random.choice([self.flying[position].running[sample]] * 3 + [self.scheduler.version])
            self.flying[position].running.pop(sample)
            self.flying[position].ended.append(version)
            self.follow(position, sample, self.scheduler.sample_done(position, sample, self.random.randint(1, 50), version))

    def fail(self) -> None:
        if self.flying:
            position = self.random.choice(list(self.flying))
            self.lose(position, self.random.choice(list(self.flying[position].running)))

    def engine_dies(self) -> None:
        for position in [position for position in self.flying if self.random.random() < 0.4]:
            for sample in list(self.flying[position].running):
                if position in self.flying:
                    self.lose(position, sample)

    def score(self) -> None:
        if self.scoring:
            position = self.random.choice(list(self.scoring))
            oldest = self.scoring.pop(position)
            if self.scheduler.scored(position, self.now_s, uniform=self.random.random() < 0.3):
                self.ready[position] = oldest

    def publish(self) -> None:
        self.scheduler.published(self.random.randint(self.scheduler.version, self.scheduler.step))

    def ask(self) -> bool:
        expected = sorted(self.ready)[: self.count]
        formed = self.scheduler.take(self.scheduler.step, self.now_s)
        if isinstance(formed, Formed):
            positions = [group.position for group in formed.groups]
            assert positions == sorted(positions)
            assert self.buffer.max_lag or positions == expected
            self.abort(formed.late)
            return True
        self.seen["due" if formed.due else "few"] += 1
        assert formed.missing > 0
        assert formed.blockers <= {*self.flying, *self.scoring, *self.waiting}
        return False

    def time_passes(self) -> None:
        self.now_s += self.random.uniform(0, 20)
        self.abort(self.scheduler.overdue(self.now_s))

    def crash(self) -> None:
        step = self.random.randint(0, self.scheduler.step)
        self.ledger.apply(Opened(step, 0))
        self.start(step)

    # ---- what follows from them

    def lose(self, position: int, sample: int) -> None:
        self.flying[position].running.pop(sample)
        self.follow(position, sample, self.scheduler.sample_failed(position, sample, "engine died", 3))

    def follow(self, position: int, sample: int, fate: str) -> None:
        flying = self.flying[position]
        if fate == "again":
            flying.running[sample] = self.scheduler.version
        elif fate == "aborting":
            self.abort([position])
        elif fate == "complete":
            assert self.buffer.min_group <= len(flying.ended) <= self.size
            self.scoring[position] = min(flying.ended)
            del self.flying[position]
        else:
            assert flying.running

    def abort(self, positions) -> None:
        for position in positions:
            self.scheduler.refuse(position, self.now_s, cut=[7] * len(self.flying.pop(position).running))

    def check(self) -> None:
        """Nothing is lost, nothing ends twice, and no more is promised than the buffer holds."""
        ends = len(self.ledger.owed) + len(self.ledger.delivered) + len(self.ledger.refused)
        assert ends == self.ledger.next_position
        assert self.ledger.owed | self.ledger.delivered.keys() | self.ledger.refused.keys() == set(range(ends))
        here = {*self.flying, *self.scoring, *self.ready, *self.waiting}
        assert self.ledger.owed - self.ledger.lapsed == here
        limit = self.count * (self.buffer.max_lag + 1)
        assert self.scheduler.outstanding() == len(here) <= min(limit, self.buffer.capacity_groups or limit)

    def finish(self) -> None:
        """Once what runs ends and the engines serve the newest weights, the trainer goes on."""
        for _ in range(3):
            step = self.scheduler.step
            self.scheduler.published(step)
            for _ in range(2000):
                if self.ask():
                    break
                for move in (self.dispatch, self.end, self.score):
                    move()
            assert self.scheduler.step == step + 1, "standstill"


def play(buffer: Buffer, count: int, size: int, seed: int, moves: dict[str, float]) -> World:
    world = World(buffer, count, size, seed)
    for name in world.random.choices(list(moves), list(moves.values()), k=MOVES):
        getattr(world, name)()
        world.check()
    world.finish()
    return world


@given(buffers, st.integers(1, 4), st.integers(2, 3), st.integers(0, 2**32), weights)
@settings(max_examples=80, deadline=None)
def test_promises_hold_whatever_happens(buffer: Buffer, count: int, size: int, seed: int, moves: dict[str, float]) -> None:
    play(buffer, count, size, seed, moves)


def test_the_world_is_a_hard_one() -> None:
    """The moves reach what the promises are about; otherwise the test above would prove little."""
    moves = {"dispatch": 4, "end": 8, "fail": 1, "engine_dies": 0.2, "score": 6, "publish": 3, "ask": 5, "time_passes": 1, "crash": 0.02}
    seen = Counter()
    for seed in range(12):
        policy = ("wait", "refuse", "mask")[seed % 3]
        buffer = Buffer(max_lag=2, policy=policy, oversample=1, sample_retries=1, dynamic_sampling=True, group_timeout_s=50.0)
        seen += play(buffer, 2, 3, seed, moves).seen
    wanted = ("due", "few", "lag 0", "lag 1", "lag 2", "lag 3", "uniform", "late", "timeout", "failed")
    assert all(seen[name] for name in wanted), seen
