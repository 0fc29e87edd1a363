"""The stream of groups over real Ray actors that only pretend to be engines: their tokens are of the version that they serve."""

import os
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from moerl.buffer.ledger import Ledger, Refused, Wasted, events, replay
from moerl.cluster.streamed import Streamed
from moerl.config.schema import Buffer, Config, Engine, Model, Parallel, Rollout, Sync, Task
from moerl.errors import EngineError, LedgerError, RolloutError, TaskError
from moerl.rollout import curriculum
from moerl.rollout.generate import Sampling
from moerl.rollout.sample import Prompt
from moerl.routing.trace import Layout

PROMPTS = [Prompt(i, "q", [1, i], "a") for i in range(64)]
PER_STEP = 4
SAMPLING = Sampling(8, 1.0, False, Layout((0,), 4, 2), 1)


def pretend_engine():
    """The class of the actors; made here, so that it travels to them by value."""
    import asyncio
    import random

    import msgspec

    from moerl.cluster.slots import Look
    from moerl.rollout.generate import Outcome
    from moerl.rollout.sample import Prompt, Sample

    class PretendEngine:
        """Attributes:
        delay_s: shortest and longest time that a call takes.
        hangs: prompts whose calls end only when they are given up, with one completion that had ended and 9 tokens of each other one.
        idle: requests fewer than asked for that it says it runs, of those whose time has come.
        asked: (prompt, completions, how many of them) of each call.
        most: completions that ran at once.
        """

        def __init__(self, number):
            self.number, self.version = number, 0
            self.reset()

        def reset(self, *, version=0, delay_s=(0.0, 0.02), hangs=(), fails=None, offset=0, garbage=False, bug=False, idle=0):
            self.version, self.delay_s, self.hangs, self.fails = version, delay_s, hangs, fails or {}
            self.offset, self.garbage, self.bug = offset, garbage, bug
            self.asked, self.running, self.most, self.given_up = [], 0, 0, {}
            self.idle, self.tokens = idle, 0

        def look(self):
            return Look(max(0, self.running - self.idle), self.tokens, 0.5 * self.version)

        async def give_up(self, rid):
            self.given_up.setdefault(rid, asyncio.Event()).set()

        def serve(self, version):
            self.version = version

        def report(self):
            return self.asked, self.running, self.most

        async def some(self, prompt, sampling, indices, keep, rid):
            prompt, began = msgspec.msgpack.decode(prompt, type=Prompt), self.version
            self.asked.append((prompt.id, list(indices), keep))
            self.running += len(indices)
            self.most = max(self.most, self.running)
            try:
                if prompt.id in self.hangs:
                    await self.given_up.setdefault(rid, asyncio.Event()).wait()
                    ended = Sample(prompt.id, indices[0], prompt.tokens, [5, 2], b"", b"", [(began, 0, 2)], "", "stop", self.number)
                    return msgspec.msgpack.encode(Outcome([ended], {}, dict.fromkeys(indices[1:], 9)))
                await asyncio.sleep(random.uniform(*self.delay_s))
            finally:
                self.running -= len(indices)
            if self.bug:
                raise KeyError("surprise")
            if self.garbage:
                return b"garbage"
            failed = self.fails.pop(prompt.id, [])
            good = [index for index in indices if index not in failed]
            runs = [(began + self.offset, 0, 1), (self.version + self.offset, 1, 2)]
            samples = [
                Sample(prompt.id, index, prompt.tokens, [5, 2], b"", b"", runs, str(prompt.id), "stop", self.number)
                for index in good[:keep]
            ]
            outcome = Outcome(samples, dict.fromkeys(failed, ("proves nothing", 7)), dict.fromkeys(good[keep:], 5))
            self.tokens += outcome.tokens
            return msgspec.msgpack.encode(outcome)

    return PretendEngine


def new_engine(number):
    return ray.remote(num_cpus=0)(pretend_engine()).remote(number)


@pytest.fixture(scope="module")
def two_engines(local_ray):
    return [new_engine(number) for number in range(2)]


@pytest.fixture
def engines(two_engines):
    ray.get([engine.reset.remote() for engine in two_engines])
    return two_engines


def settings(*, reward="length", task=None, interrupt="in_place", rollout=None, slots=64, **buffer):
    return Config(
        model=Model(path="unused"),
        task=Task(reward=f"cluster_test_rewards:{reward}", **(task or {})),
        engine=Engine(count=2, device="cpu", max_running_requests=slots),
        rollout=Rollout(**{"prompts_per_step": PER_STEP, "group_size": 2, **(rollout or {})}),
        sync=Sync(interrupt=interrupt),
        parallel=Parallel(timeout_s=90.0),
        buffer=Buffer(**buffer),
    )


@contextmanager
def streaming(folder, engines, config, *, step=0):
    """A stream whose engines serve version `step`."""
    with Streamed(config, PROMPTS, SAMPLING, folder, step=step, position=0) as stream:
        stream.use(engines)
        stream.announce(step)
        stream.published(step)
        yield stream


def sync(stream, engines, version):
    """The engines take over a version one after the other, as in a run."""
    stream.announce(version)
    for engine in engines:
        ray.get(engine.serve.remote(version))
        time.sleep(random.uniform(0, 0.02))
    stream.published(version)


def reports(engines):
    """(prompts that were asked for, completions that run, most that ran at once) of each engine."""
    return [([prompt for prompt, _, _ in asked], running, most) for asked, running, most in ray.get([e.report.remote() for e in engines])]


def begun(engines):
    return sum(len(asked) for asked, _, _ in reports(engines))


def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def prompts_at(*positions):
    return [
        curriculum.take(PROMPTS, position=position, count=1, seed=Config(model=Model(path="unused")).run.seed)[0].id
        for position in positions
    ]


def ids(groups):
    return [group.prompt_id for group in groups]


def ledger_file(folder):
    return Path(folder) / "ledger" / "groups.jsonl"


def refusals(folder):
    return {event.position: event.reason for event in events(ledger_file(folder)) if isinstance(event, Refused)}


def account(folder, steps):
    """Check the ledger against the steps (lists of groups) that were handed out; `replay` itself refuses whatever happens twice."""
    state = replay(ledger_file(folder))
    ends = [*state.delivered, *state.refused, *state.owed]
    assert sorted(ends) == list(range(state.next_position))
    for step, groups in enumerate(steps):
        assert ids(groups) == prompts_at(*sorted(position for position, trained in state.delivered.items() if trained == step))
    assert set(state.delivered.values()) == set(range(len(steps)))


def test_without_lag_a_step_is_the_next_prompts_of_the_stream_in_order_by_the_published_version(engines, tmp_path):
    steps = []
    with streaming(tmp_path, engines, settings()) as stream:
        for step in range(5):
            groups, figures = stream.take(step, last=False)
            assert ids(groups) == prompts_at(*range(step * PER_STEP, (step + 1) * PER_STEP))
            assert {run[0] for group in groups for sample in group.samples for run in sample.versions} == {step}
            assert [[sample.reward for sample in group.samples] for group in groups] == [[len(str(i))] * 2 for i in ids(groups)]
            assert figures["buffer/lag_highest"] == 0
            assert begun(engines) == (step + 1) * PER_STEP
            steps.append(groups)
            sync(stream, engines, step + 1)
    account(tmp_path, steps)


def test_a_trainer_that_trains_is_not_said_to_wait_for_the_step_that_is_asked_for_ahead(engines, tmp_path):
    with streaming(tmp_path, engines, settings()) as stream:
        stream.take(0, last=False)
        start = time.monotonic()
        time.sleep(0.5)
        sync(stream, engines, 1)
        _, figures = stream.take(1, last=True)
        assert figures["buffer/trainer_busy_share"] * (time.monotonic() - start) > 0.25
        assert figures["buffer/trainer_waits_for_groups_s"] < time.monotonic() - start - 0.4


@pytest.mark.parametrize(
    ("interrupt", "train_s", "delays"),
    [
        ("in_place", 0.0, [(0.0, 0.3), (0.0, 0.02)]),
        ("in_place", 0.15, [(0.0, 0.02), (0.0, 0.1)]),
        ("drain", 0.02, [(0.0, 0.2), (0.0, 0.02)]),
        ("abort", 0.05, [(0.0, 0.1), (0.0, 0.3)]),
        ("retract", 0.0, [(0.0, 0.05), (0.1, 0.2)]),
    ],
    ids=["fast trainer", "slow trainer", "drained", "aborted", "retracted"],
)
def test_no_lag_exceeds_the_limit_whichever_side_is_slower(engines, tmp_path, interrupt, train_s, delays):
    for engine, delay_s in zip(engines, delays, strict=True):
        ray.get(engine.reset.remote(delay_s=delay_s))
    steps, lags = [], set()
    with streaming(tmp_path, engines, settings(max_lag=2, interrupt=interrupt)) as stream:
        for step in range(14):
            groups, figures = stream.take(step, last=step == 13)
            found = {step - run[0] for group in groups for sample in group.samples for run in sample.versions}
            assert 0 <= min(found) <= max(found) <= 2
            assert figures["buffer/lag_highest"] == max(found)
            lags |= found
            steps.append(groups)
            time.sleep(train_s)
            sync(stream, engines, step + 1)
    assert max(lags) > 0
    account(tmp_path, steps)


def test_generation_runs_while_nobody_takes_on_all_engines_and_within_their_slots(engines, tmp_path):
    ray.get([engine.reset.remote(delay_s=(0.1, 0.1)) for engine in engines])
    with streaming(tmp_path, engines, settings(max_lag=2, slots=6)) as stream:
        until(lambda: begun(engines) == 3 * PER_STEP)
        (first, _, most_first), (second, _, most_second) = reports(engines)
        assert max(most_first, most_second) <= 6
        # Calls that were sent at once may begin in any order.
        assert (sorted(first[:3]), sorted(second[:3])) == (sorted(prompts_at(0, 2, 4)), sorted(prompts_at(1, 3, 5)))
        assert sorted(first + second) == sorted(prompts_at(*range(3 * PER_STEP)))
        time.sleep(0.3)
        assert begun(engines) == 3 * PER_STEP  # as far ahead as it may
        groups, _ = stream.take(0, last=True)
        assert len(groups) == PER_STEP


def test_what_an_engine_that_dies_was_doing_is_done_again_by_its_successor(engines, tmp_path):
    mortal = new_engine(1)
    ray.get(mortal.reset.remote(delay_s=(600.0, 600.0)))
    steps = []
    with streaming(tmp_path, [engines[0], mortal], settings(interrupt="drain")) as stream:
        threading.Timer(1.0, ray.kill, [mortal]).start()
        with pytest.raises(EngineError, match="engine 1 died"):
            stream.take(0, last=False)
        stream.use(engines)
        assert reports(engines)[1][0] == []
        stream.announce(0)  # with drain, this must not wait for what waits for the publication
        stream.published(0)
        for step in range(2):
            groups, _ = stream.take(step, last=False)
            assert ids(groups) == prompts_at(*range(step * PER_STEP, (step + 1) * PER_STEP))
            steps.append(groups)
            sync(stream, engines, step + 1)
    account(tmp_path, steps)
    assert not refusals(tmp_path)


def test_a_step_that_was_formed_ahead_survives_new_engines(engines, tmp_path):
    steps = []
    with streaming(tmp_path, engines, settings(max_lag=2)) as stream:
        for step in range(3):
            steps.append(stream.take(step, last=step == 2)[0])
            if step < 2:
                until(lambda step=step: step + 1 in replay(ledger_file(tmp_path)).steps)
            stream.use(engines)
            sync(stream, engines, step + 1)
    account(tmp_path, steps)


@pytest.mark.parametrize(("offset", "version"), [(1, 4), (-1, 2)])
def test_a_version_that_cannot_be_is_an_error_that_names_the_sample(engines, tmp_path, offset, version):
    ray.get([engine.reset.remote(version=3, offset=offset) for engine in engines])
    with (
        streaming(tmp_path, engines, settings(), step=3) as stream,
        pytest.raises(
            RolloutError, match=rf"sample 0 of prompt \d+ on engine \d has tokens of versions \[{version}, {version}\].*version 3"
        ),
    ):
        stream.take(3, last=True)


def test_after_a_sync_that_failed_half_way_groups_of_either_version_are_trained_within_the_limit(engines, tmp_path):
    """One engine serves the new version and the other does not, until it is pushed again."""
    ray.get([engine.reset.remote(delay_s=(0.0, 0.1)) for engine in engines])
    steps = []
    with streaming(tmp_path, engines, settings(max_lag=1)) as stream:
        for step in range(4):
            steps.append(stream.take(step, last=step == 3)[0])
            stream.announce(step + 1)
            ray.get(engines[0].serve.remote(step + 1))
            time.sleep(0.2)
            sync(stream, engines, step + 1)
    found = {step - run[0] for step, groups in enumerate(steps) for group in groups for sample in group.samples for run in sample.versions}
    assert found == {0, 1}
    account(tmp_path, steps)


def test_groups_of_equal_rewards_are_replaced_and_where_that_ends_the_step_says_so(engines, tmp_path):
    """The reward is the length of the text, which is the same for all completions of a prompt."""
    steps = []
    with streaming(tmp_path, engines, settings(dynamic_sampling=True, max_resamples_per_step=3)) as stream:
        for step in range(2):
            groups, figures = stream.take(step, last=step == 1)
            assert (figures["buffer/refused_uniform"], figures["buffer/uniform_trained"], figures["buffer/capped"]) == (3, PER_STEP, 1)
            assert figures["buffer/wasted_uniform_tokens"] == 3 * 2 * 2
            steps.append(groups)
            sync(stream, engines, step + 1)
    account(tmp_path, steps)


def test_each_engine_says_how_much_it_sampled_and_how_long_it_was_paused(engines, tmp_path):
    ray.get([engine.reset.remote(delay_s=(0.3, 0.3)) for engine in engines])
    with streaming(tmp_path, engines, settings()) as stream:
        stream.take(0, last=False)
        time.sleep(0.5)
        sync(stream, engines, 1)
        _, figures = stream.take(1, last=True)
    assert [figures[f"engine/{number}/paused_s"] for number in range(2)] == [0.5, 0.5]
    assert all(figures[f"engine/{number}/tokens_per_s"] > 0 for number in range(2))


def test_a_group_whose_reward_fails_is_refused_and_the_others_go_on(engines, tmp_path):
    steps = []
    with streaming(tmp_path, engines, settings(reward="raising")) as stream:
        for step in range(16):
            steps.append(stream.take(step, last=step == 15)[0])
            sync(stream, engines, step + 1)
    assert [prompts_at(position) for position in refusals(tmp_path)] == [[3]]
    assert set(refusals(tmp_path).values()) == {"reward"}
    account(tmp_path, steps)


def test_rewards_that_fail_for_eight_groups_in_a_row_end_the_run(engines, tmp_path):
    with (
        streaming(tmp_path, engines, settings(reward="broken", task={"reward_retries": 0})) as stream,
        pytest.raises(TaskError, match="rewards of 8 groups in a row failed.*cannot score anything"),
    ):
        stream.take(0, last=True)
    assert set(refusals(tmp_path).values()) == {"reward"}


def test_drain_waits_for_what_runs_and_lets_nothing_begin_until_the_publication(engines, tmp_path):
    ray.get([engine.reset.remote(delay_s=(0.5, 1.0)) for engine in engines])
    with streaming(tmp_path, engines, settings(max_lag=2, interrupt="drain", slots=4)) as stream:
        until(lambda: begun(engines) > 0)
        stream.announce(0)
        assert [running for _, running, _ in reports(engines)] == [0, 0]
        before = begun(engines)
        time.sleep(0.5)
        assert begun(engines) == before < 3 * PER_STEP
        stream.published(0)
        until(lambda: begun(engines) > before)


def test_stop_leaves_no_process_and_a_resumed_run_begins_again_what_ran(engines, tmp_path):
    ray.get([engine.reset.remote(hangs=prompts_at(6, 7)) for engine in engines])
    with streaming(tmp_path, engines, settings(max_lag=1, reward="process", task={"reward_workers": 2})) as stream:
        groups, _ = stream.take(0, last=True)
        processes = {int(sample.reward) for group in groups for sample in group.samples}
        processes.add(ray.get(stream._actor.__ray_call__.remote(lambda self: os.getpid())))
        until(lambda: sum(running for _, running, _ in reports(engines)) == 4)
    assert len(processes) >= 2
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    until(lambda: not any(running for _, running, _ in reports(engines)))
    assert not refusals(tmp_path)
    account(tmp_path, [groups])
    owed = replay(ledger_file(tmp_path)).owed
    assert {6, 7} <= owed <= set(range(8))

    ray.get([engine.reset.remote(version=1) for engine in engines])
    with streaming(tmp_path, engines, settings(), step=1) as stream:
        again, _ = stream.take(1, last=True)
    assert ids(again) == prompts_at(*sorted(owed))
    account(tmp_path, [groups, again])


def test_oversampled_and_failed_completions(engines, tmp_path):
    oversampled, short, again, lost, *_ = prompts_at(0, 1, 2, 3)
    fails = {short: [0], again: [0, 1], lost: [0, 1, 2, 3]}
    ray.get([engine.reset.remote(fails=dict(fails)) for engine in engines])
    config = settings(rollout={"group_size": 3}, oversample=1, sample_retries=1, min_group=3)
    with streaming(tmp_path, engines, config) as stream:
        groups, figures = stream.take(0, last=True)
    assert ids(groups) == prompts_at(0, 1, 2, 4)
    assert [[sample.index for sample in group.samples] for group in groups] == [[0, 1, 2]] * 4
    calls = [call for asked, _, _ in ray.get([engine.report.remote() for engine in engines]) for call in asked]
    assert (oversampled, [0, 1, 2, 3], 3) in calls
    assert (again, [1], 1) in calls
    assert len(calls) == 6
    assert refusals(tmp_path) == {3: "failed"}
    wasted = [(event.position, event.reason, event.tokens) for event in events(ledger_file(tmp_path)) if isinstance(event, Wasted)]
    assert sorted(w for w in wasted if w[0] != 3) == [
        (0, "oversampled", 5),
        (1, "unproved", 7),
        (2, "unproved", 7),
        (2, "unproved", 7),
        (4, "oversampled", 5),
    ]
    assert figures["buffer/refused_failed"] == 1
    account(tmp_path, [groups])


def test_a_group_that_runs_too_long_is_aborted_and_refused_though_nothing_else_happens(engines, tmp_path):
    ray.get([engine.reset.remote(hangs=prompts_at(1)) for engine in engines])
    with streaming(tmp_path, engines, settings(group_timeout_s=2.0)) as stream:
        groups, _ = stream.take(0, last=True)
        until(lambda: not any(running for _, running, _ in reports(engines)))
    assert ids(groups) == prompts_at(0, 2, 3, 4)
    assert refusals(tmp_path) == {1: "timeout"}
    (refused,) = (event for event in events(ledger_file(tmp_path)) if isinstance(event, Refused))
    assert (refused.tokens, refused.samples) == (2 + 9, 2), "of the completion that had ended, and of the one that was cut"
    account(tmp_path, [groups])


def test_a_group_that_is_late_is_given_up_with_what_it_had_sampled(engines, tmp_path):
    ray.get([engine.reset.remote(hangs=prompts_at(0)) for engine in engines])
    with streaming(tmp_path, engines, settings(max_lag=1, policy="refuse")) as stream:
        for step in range(3):
            stream.take(step, last=step == 2)
            sync(stream, engines, step + 1)
        until(lambda: refusals(tmp_path))
    assert refusals(tmp_path) == {0: "late"}
    (refused,) = (event for event in events(ledger_file(tmp_path)) if isinstance(event, Refused))
    assert (refused.tokens, refused.samples) == (2 + 9, 2)


def test_waiting_for_a_new_engine_does_not_count_as_time_of_the_group(engines, tmp_path):
    mortal = new_engine(1)
    ray.get(mortal.reset.remote(delay_s=(600.0, 600.0)))
    with streaming(tmp_path, [engines[0], mortal], settings(group_timeout_s=2.0)) as stream:
        threading.Timer(1.0, ray.kill, [mortal]).start()
        with pytest.raises(EngineError, match="engine 1 died"):
            stream.take(0, last=False)
        time.sleep(2.5)
        stream.use(engines)
        time.sleep(0.5)
        stream.published(0)
        groups, _ = stream.take(0, last=True)
    assert ids(groups) == prompts_at(*range(PER_STEP))
    assert not refusals(tmp_path)


def test_slots_of_completions_that_ended_are_given_to_other_groups_while_their_own_group_still_runs(engines, tmp_path):
    """Each engine has slots for two groups, and says that three of these four completions have ended."""
    ray.get([engine.reset.remote(hangs=prompts_at(*range(8)), idle=3) for engine in engines])
    with streaming(tmp_path, engines, settings(max_lag=2, slots=4)) as stream:
        until(lambda: begun(engines) == 4)
        until(lambda: begun(engines) > 4)
        assert max(most for _, _, most in reports(engines)) > 4
        stream.stop()


@pytest.mark.parametrize(
    ("fault", "error", "message"), [({"bug": True}, EngineError, "surprise"), ({"garbage": True}, RolloutError, "ValidationError")]
)
def test_what_nobody_expected_reaches_the_trainer(engines, tmp_path, fault, error, message):
    ray.get([engine.reset.remote(**fault) for engine in engines])
    with streaming(tmp_path, engines, settings()) as stream, pytest.raises(error, match=message):
        stream.take(0, last=True)


def test_a_ledger_that_cannot_be_written_reaches_the_trainer_also_where_nobody_waits_for_it(engines, tmp_path):
    ray.get([engine.reset.remote(delay_s=(0.5, 0.5), fails={i: [0, 1] for i in range(64)}) for engine in engines])
    with streaming(tmp_path, engines, settings(sample_retries=0)) as stream:
        ray.get(stream._actor.__ray_call__.remote(lambda self: self._ledger.close()))
        with pytest.raises(RolloutError, match="closed file"):
            stream.take(0, last=True)


def test_a_ledger_that_does_not_reach_up_to_the_step_is_reported_at_the_start(local_ray, tmp_path):
    Ledger(tmp_path / "ledger").close()
    with pytest.raises(LedgerError, match="holds no delivery of step 0"), streaming(tmp_path, [], settings(), step=3):
        pass
