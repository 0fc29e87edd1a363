"""The scheduler's decisions one by one: what forms a step, what is waited for, failures, resampling, order, and misuse."""

import pytest

from moerl.buffer.ledger import Admitted, Event, Opened, Refused, State, Wasted
from moerl.buffer.scheduler import Formed, Scheduler, Wait
from moerl.config.schema import Buffer
from moerl.errors import ConfigError, LedgerError


class Bench:
    """A scheduler with short ways to move a group along."""

    def __init__(self, *, count: int = 2, size: int = 2, state: State | None = None, step: int = 0, **settings):
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            Buffer(**settings), prompts_per_step=count, group_size=size, record=self.events.append, state=state, step=step
        )
        self.scheduler.published(step)

    def admit(self, prompt=lambda position: position) -> list[int]:
        wanted = self.scheduler.wants()
        for position in wanted:
            self.scheduler.admit(position, prompt(position), 0.0)
        return wanted

    def dispatch(self, now_s: float = 0.0) -> list[int]:
        """All that wait, in the scheduler's order."""
        order = []
        while (position := self.scheduler.next_waiting()) is not None:
            self.scheduler.dispatched(position, now_s)
            order.append(position)
        return order

    def finish(self, *positions: int, lengths=(5, 5), uniform: bool = False, version: int | None = None) -> list[bool]:
        version = self.scheduler.version if version is None else version
        fates = []
        for position in positions:
            for sample, length in enumerate(lengths):
                self.scheduler.sample_done(position, sample, length, version)
            fates.append(self.scheduler.scored(position, 1.0, uniform=uniform))
        return fates

    def take(self) -> Formed | Wait:
        return self.scheduler.take(self.scheduler.step, 2.0)

    def refused(self) -> list[Refused]:
        return [event for event in self.events if isinstance(event, Refused)]


def positions(formed: Formed | Wait) -> list[int]:
    assert isinstance(formed, Formed), formed
    return [group.position for group in formed.groups]


def test_without_lag_a_step_is_the_next_prompts_in_order() -> None:
    bench = Bench(count=3)
    for step in range(3):
        assert bench.admit() == list(range(3 * step, 3 * step + 3))
        bench.dispatch()
        bench.finish(3 * step + 2, 3 * step)
        assert isinstance(bench.take(), Wait)
        bench.finish(3 * step + 1)
        formed = bench.take()
        assert positions(formed) == list(range(3 * step, 3 * step + 3))
        assert {group.lag for group in formed.groups} == {0}
        assert bench.admit() == []  # nothing may start under weights that the next step won't train
        bench.scheduler.published(step + 1)


def test_with_lag_as_many_groups_are_admitted_as_steps_can_train_in_time() -> None:
    bench = Bench(count=2, max_lag=3)
    assert len(bench.admit()) == 8
    bench.dispatch()
    bench.finish(0, 1)
    assert positions(bench.take()) == [0, 1]
    assert bench.admit() == []  # engines still serve version 0
    bench.scheduler.published(1)
    assert len(bench.admit()) == 2


def test_quick_groups_go_ahead_of_slow_ones_only_while_these_can_still_be_in_time() -> None:
    bench = straggling()
    wait = bench.take()
    assert isinstance(wait, Wait)
    assert (wait.due, wait.missing, wait.blockers) == (True, 1, {0})
    assert wait.text == "the trainer (step 1) waits for 1 of the groups that are due: group 0 (prompt 0, running for 2 s)"
    bench.finish(0, version=0)
    assert positions(bench.take()) == [0]


def test_mask_trains_the_straggler_later_and_tells_its_lag() -> None:
    bench = straggling("mask")
    assert positions(bench.take()) == [2]
    bench.scheduler.published(2)
    bench.finish(0, version=0)
    (group,) = bench.take().groups
    assert (group.position, group.lag) == (0, 2)


def test_refuse_drops_the_straggler_with_its_length() -> None:
    bench = straggling("refuse")
    formed = bench.take()
    assert (positions(formed), formed.late) == ([2], (0,))
    assert bench.scheduler.sample_done(0, 0, 90, 0) == "aborting"  # it may end while it is being aborted
    bench.scheduler.refuse(0, 3.0, cut=[70])
    assert bench.refused() == [Refused(0, "late", 160, 2, 3.0)]


def straggling(policy: str = "wait") -> Bench:
    """max_lag 1, one group per step: step 1 is next, group 2 is ready, and group 0 of version 0 still runs."""
    bench = Bench(count=1, max_lag=1, policy=policy)
    bench.admit()
    bench.dispatch()
    bench.finish(1)
    assert positions(bench.take()) == [1]  # group 0 may still be trained in step 1
    bench.scheduler.published(1)
    bench.admit()
    bench.dispatch()
    bench.finish(2)
    return bench


def test_a_wait_names_what_is_missing() -> None:
    bench = Bench(count=3)
    assert bench.take().text == "the trainer (step 0) waits for 3 more groups; none is admitted while the engines serve version 0"
    bench.admit(lambda position: 100 + position)
    bench.dispatch(now_s=1.0)
    bench.finish(1)
    wait = bench.take()
    assert (wait.due, wait.missing, wait.blockers) == (False, 2, {0, 2})
    names = "group 0 (prompt 100, running for 1 s), group 2 (prompt 102, running for 1 s)"
    assert wait.text == f"the trainer (step 0) waits for 2 more groups: {names}"


def test_oversampled_group_is_the_first_to_end() -> None:
    bench = Bench(count=1, size=2, oversample=2)
    bench.admit()
    assert bench.scheduler.dispatched(0, 0.0) == range(4)
    assert bench.scheduler.sample_done(0, 3, 5, 0) == "running"
    assert bench.scheduler.sample_done(0, 1, 6, 0) == "complete"
    with pytest.raises(LedgerError, match="group 0 is scoring; this event needs it to be running or aborting"):
        bench.scheduler.sample_done(0, 0, 9, 0)
    bench.scheduler.wasted(0, "oversampled", 17)
    assert bench.events[-1] == Wasted(0, "oversampled", 17)


def test_failed_completions_are_made_good_by_surplus_then_by_fresh_ones_then_done_without() -> None:
    bench = Bench(count=1, size=3, oversample=1, sample_retries=1, min_group=2)
    bench.admit()
    bench.dispatch()
    fail = bench.scheduler.sample_failed
    assert fail(0, 0, "engine died", 9) == "running"  # three are left
    assert fail(0, 1, "engine died") == "again"
    assert fail(0, 1, "engine died") == "running"  # two will do
    assert bench.scheduler.sample_done(0, 2, 5, 0) == "running"
    assert bench.scheduler.sample_done(0, 3, 5, 0) == "complete"
    bench.scheduler.scored(0, 0.0, uniform=False)
    assert bench.take().groups[0].lengths == (5, 5)
    assert Wasted(0, "engine died", 9) in bench.events


def test_a_group_with_too_few_completions_is_refused_and_another_admitted() -> None:
    bench = Bench(count=1, size=2, sample_retries=0)
    assert bench.admit() == [0]
    bench.dispatch()
    assert bench.scheduler.sample_failed(0, 0, "engine died") == "aborting"
    assert bench.admit() == [1]
    bench.scheduler.refuse(0, 1.0, cut=[4])
    assert bench.refused() == [Refused(0, "failed", 4, 1, 1.0)]


def test_fresh_completions_make_a_group_young_again_if_nothing_old_is_left() -> None:
    bench = straggling()
    assert isinstance(bench.take(), Wait)
    assert [bench.scheduler.sample_failed(0, sample, "engine died") for sample in (0, 1)] == ["again", "again"]
    assert positions(bench.take()) == [2]  # group 0 now begins with version 1, so step 2 will do


def test_a_group_that_runs_too_long_is_refused_as_a_whole() -> None:
    bench = Bench(count=2, group_timeout_s=10.0)
    bench.admit()
    bench.dispatch(now_s=5.0)
    bench.finish(1)
    assert bench.scheduler.overdue(15.0) == []
    assert bench.scheduler.overdue(15.1) == [0]
    assert bench.scheduler.overdue(15.2) == []
    assert bench.admit() == [2]
    bench.scheduler.refuse(0, 16.0, cut=[100, 120])
    assert bench.refused() == [Refused(0, "timeout", 220, 2, 16.0)]


def test_the_time_of_a_group_that_lost_its_engine_stands_still_until_it_has_another() -> None:
    bench = Bench(count=1, group_timeout_s=10.0)
    bench.admit()
    bench.dispatch()
    bench.scheduler.stopped(0)
    assert bench.scheduler.overdue(1000.0) == []
    assert bench.take().text == "the trainer (step 0) waits for 1 more groups: group 0 (prompt 0, without an engine)"
    bench.scheduler.restarted(0, 1000.0)
    assert bench.scheduler.overdue(1009.0) == []
    assert bench.scheduler.overdue(1011.0) == [0]


def test_dynamic_sampling_replaces_uniform_groups_up_to_its_cap() -> None:
    bench = Bench(count=1, dynamic_sampling=True, max_resamples_per_step=2)
    for step in range(2):
        for _ in range(2):
            (position,) = bench.admit()
            bench.dispatch()
            assert bench.finish(position, uniform=True) == [False]
        (position,) = bench.admit()
        bench.dispatch()
        assert bench.finish(position, uniform=True) == [True]
        formed = bench.take()
        assert (positions(formed), formed.capped, formed.groups[0].uniform) == ([position], True, True)
        bench.scheduler.published(step + 1)
    assert [(event.reason, event.tokens) for event in bench.refused()] == [("uniform", 10)] * 4


def test_uniform_groups_are_trained_without_dynamic_sampling() -> None:
    bench = Bench(count=1)
    bench.admit()
    bench.dispatch()
    assert bench.finish(0, uniform=True) == [True]
    assert not bench.take().capped


def test_prompts_that_were_long_start_first_but_never_before_older_promises() -> None:
    bench = Bench(count=3)
    prompts = {0: 7, 1: 8, 2: 9, 3: 7, 4: 8, 5: 9, 6: 1, 7: 8, 8: 7}
    bench.admit(prompts.__getitem__)
    assert bench.dispatch() == [0, 1, 2]
    for position, lengths in ((0, (3, 20)), (1, (30, 90)), (2, (4, 40))):
        bench.finish(position, lengths=lengths)
    bench.take()
    bench.scheduler.published(1)
    bench.admit(prompts.__getitem__)
    assert bench.dispatch() == [4, 5, 3]
    bench.finish(3, 4, 5, lengths=(1, 1), version=1)
    bench.take()
    bench.scheduler.published(2)
    bench.admit(prompts.__getitem__)  # prompt 1 is new: it counts as the mean, between 8 and 7
    assert bench.dispatch() == [7, 6, 8]


def test_older_promises_start_before_longer_prompts() -> None:
    bench = Bench(count=1, max_lag=2)
    bench.admit(lambda position: position % 2)
    bench.scheduler.dispatched(0, 0.0)
    bench.finish(0, lengths=(500, 500))
    bench.take()
    bench.scheduler.published(1)
    assert bench.admit(lambda _: 0) == [3]
    assert bench.scheduler.expected_length(0) == 500
    assert bench.dispatch() == [1, 2, 3]


def test_averages_forget() -> None:
    bench = Bench(count=1, length_memory=0.5)
    for step, longest in enumerate((8, 4)):
        bench.admit(lambda _: 3)
        bench.dispatch()
        bench.finish(step, lengths=(1, longest))
        bench.take()
        bench.scheduler.published(step + 1)
    assert bench.scheduler.expected_length(3) == 6.0


def test_capacity_bounds_what_is_promised() -> None:
    bench = Bench(count=2, max_lag=4, capacity_groups=3)
    assert bench.admit() == [0, 1, 2]
    bench.dispatch()
    bench.finish(0, 1)
    bench.take()
    assert bench.admit() == [3, 4]


def test_capacity_below_a_step_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="buffer.capacity_groups 1 cannot hold the 2 groups of one step"):
        Bench(count=2, capacity_groups=1)


def test_a_resumed_run_first_admits_what_it_owes() -> None:
    state = State()
    state.apply(Opened(0, 10))
    for position in range(10, 15):
        state.apply(Admitted(position, 0, 0, 0.0))
    state.apply(Refused(12, "uniform", 5, 1, 0.0))
    state.apply(Opened(1, 0))
    bench = Bench(count=3, max_lag=1, state=state, step=1)
    assert bench.admit() == [10, 11, 13, 14, 15, 16]


def test_nothing_starts_before_a_version_is_published() -> None:
    scheduler = Scheduler(Buffer(), prompts_per_step=1, group_size=2, record=print)
    assert scheduler.wants() == []
    with pytest.raises(LedgerError, match="group 0 may not be admitted now"):
        scheduler.admit(0, 0, 0.0)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda s: s.take(1, 0.0), "step 1 was asked for, but the next one is 0"),
        (lambda s: s.published(1), "cannot serve version 1: they served 0, and the trainer is at 0"),
        (lambda s: s.dispatched(1, 0.0), "group 1 may not be dispatched now; next is None"),
        (lambda s: s.admit(5, 0, 0.0), "group 5 may not be admitted now"),
        (lambda s: s.scored(0, 0.0, uniform=False), "group 0 is running; this event needs it to be scoring"),
        (lambda s: s.scored(9, 0.0, uniform=False), "group 9 is not outstanding"),
        (lambda s: s.sample_done(0, 7, 1, 0), r"group 0 has no running completion 7; running are \[0, 1\]"),
        (lambda s: s.sample_done(0, 0, 1, 1), "cannot have tokens of version 1, with the trainer at 0"),
    ],
)
def test_events_that_contradict_the_state_are_refused(misuse, message: str) -> None:
    bench = Bench(count=2)
    bench.admit()
    bench.dispatch()
    with pytest.raises(LedgerError, match=message):
        misuse(bench.scheduler)
