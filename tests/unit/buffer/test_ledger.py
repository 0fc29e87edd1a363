"""The ledger: what a run is owed after any crash, at any byte, and what contradicts the past."""

from pathlib import Path
from random import Random

import pytest

from moerl.buffer.ledger import NAME, Admitted, Delivered, Delivery, Event, Ledger, Opened, Refused, State, Wasted, events, replay
from moerl.buffer.scheduler import Formed, Scheduler
from moerl.config.schema import Buffer
from moerl.errors import LedgerError


def admitted(*positions: int, version: int = 0) -> list[Event]:
    return [Admitted(position, 100 + position, version, 1.5) for position in positions]


def delivered(step: int, *positions: int) -> Delivered:
    return Delivered(step, tuple(Delivery(position, (3, 4), 0) for position in positions), 2.5)


def write(folder: Path, some: list[Event], *, step: int = 0, position: int = 0) -> Path:
    ledger = Ledger(folder, step=step, position=position)
    for event in some:
        ledger.append(event)
    ledger.close()
    return ledger.path


def test_events_come_back_as_written(tmp_path: Path) -> None:
    some = [*admitted(0, 1, 2), Refused(1, "uniform", 30, 2, 2.0), Wasted(0, "oversampled", 7), delivered(0, 0, 2)]
    path = write(tmp_path, some)
    assert list(events(path)) == [Opened(0, 0), *some]
    state = replay(path)
    assert (state.next_position, state.owed, state.delivered, state.refused) == (3, set(), {0: 0, 2: 0}, {1: "uniform"})


def test_every_event_is_on_file_when_append_returns(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for position in range(3):
        ledger.append(*admitted(position))
        assert replay(ledger.path).owed == set(range(position + 1))
    ledger.close()


def test_no_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert replay(tmp_path / NAME) == State()


def test_truncation_at_every_byte_loses_only_what_was_not_complete(tmp_path: Path) -> None:
    some = [*admitted(0, 1, 2, 3), delivered(0, 0, 2), Refused(1, "late", 9, 2, 3.0), *admitted(4, version=1), delivered(1, 3, 4)]
    raw = write(tmp_path / "whole", some).read_bytes()
    lines = raw.splitlines(keepends=True)
    for size in range(len(raw) + 1):
        complete = raw[:size].count(b"\n")
        expected = State()
        for event in ([Opened(0, 0), *some])[:complete]:
            expected.apply(event)
        path = tmp_path / "torn" / NAME
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw[:size])
        assert replay(path) == expected

        ledger = Ledger(path.parent, step=len(expected.steps))  # it goes on after the torn line as if that had never been
        assert path.read_bytes().startswith(b"".join(lines[:complete]) + b'{"event":"opened"')
        for position in sorted(ledger.state.owed):
            ledger.append(*admitted(position))
        assert ledger.state.owed == expected.owed
        ledger.close()
        assert replay(path).owed == expected.owed


def test_resuming_takes_back_what_was_delivered_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, [*admitted(0, 1, 2, 3, 4), delivered(0, 0, 1), delivered(1, 3), Refused(2, "failed", 1, 1, 0.0)])
    ledger = Ledger(tmp_path, step=1)
    assert (ledger.state.owed, ledger.state.delivered, ledger.state.next_position) == ({3, 4}, {0: 0, 1: 0}, 5)
    for event in [*admitted(3, 4), delivered(1, 4, 3)]:
        ledger.append(event)
    ledger.close()
    assert replay(ledger.path).delivered == {0: 0, 1: 0, 3: 1, 4: 1}


def test_a_new_ledger_begins_where_the_stream_is(tmp_path: Path) -> None:
    path = write(tmp_path, admitted(40, 41), step=5, position=40)
    assert (replay(path).next_position, replay(path).owed) == (42, {40, 41})
    assert Ledger(tmp_path, step=5, position=99).state.next_position == 42


def test_a_ledger_without_the_checkpoints_steps_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [*admitted(0, 1), delivered(0, 0)])
    with pytest.raises(LedgerError, match="holds no delivery of step 1, so it is not known what the checkpoint before step 3"):
        Ledger(tmp_path, step=3)


@pytest.mark.parametrize(
    ("some", "message"),
    [
        ([*admitted(0, 0)], "group 0 was admitted twice"),
        ([*admitted(0), delivered(0, 0), *admitted(0)], "group 0 was admitted twice"),
        ([delivered(0, 0)], "group 0 was delivered to step 0, but had been not admitted"),
        ([*admitted(0, 1), delivered(0, 0), delivered(1, 0)], "group 0 was delivered to step 1, but had been delivered to step 0"),
        ([*admitted(0), delivered(0, 0), Refused(0, "late", 0, 0, 0.0)], r"was refused \(late\), but had been delivered to step 0"),
        ([*admitted(0), Refused(0, "late", 0, 0, 0.0), delivered(0, 0)], r"but had been refused \(late\)"),
        ([*admitted(0, 1), delivered(0, 0), delivered(0, 1)], "step 0 was delivered twice"),
        ([*admitted(0), Opened(0, 0), delivered(0, 0)], "but had been not admitted"),
    ],
)
def test_contradictions_are_refused_when_written_and_when_read(tmp_path: Path, some: list[Event], message: str) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(LedgerError, match=message):
        for event in some:
            ledger.append(event)
    size = ledger.path.stat().st_size
    ledger.close()
    replay(ledger.path)  # what was refused is not on file
    assert ledger.path.stat().st_size == size


def test_a_damaged_line_names_itself(tmp_path: Path) -> None:
    path = write(tmp_path, admitted(0, 1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"event":"admitted","position":"x"}\n' + lines[2])
    with pytest.raises(LedgerError, match=r"groups.jsonl line 2 is damaged: .*only the last line may be torn"):
        replay(path)
    path.write_bytes(b"".join(lines) + lines[1])
    with pytest.raises(LedgerError, match="line 4: group 0 was admitted twice"):
        replay(path)


def test_a_run_that_is_killed_again_and_again_trains_every_prompt_once(tmp_path: Path) -> None:
    """Scheduler and ledger together: crashes cut the file anywhere since the last delivery, and resume from any earlier step."""
    random = Random(7)
    step = 0
    for _ in range(25):
        ledger = Ledger(tmp_path, step=step)
        buffer = Buffer(max_lag=2, dynamic_sampling=True)
        scheduler = Scheduler(buffer, prompts_per_step=3, group_size=2, record=ledger.append, state=ledger.state, step=step)
        scheduler.published(step)
        for _ in range(random.randint(1, 12)):
            for position in scheduler.wants():
                scheduler.admit(position, position, 0.0)
            for _ in range(random.randint(0, 5)):
                if (position := scheduler.next_waiting()) is not None:
                    scheduler.dispatched(position, 0.0)
                    for sample in (0, 1):
                        scheduler.sample_done(position, sample, 4, scheduler.version)
                    scheduler.scored(position, 0.0, uniform=random.random() < 0.2)
            if isinstance(scheduler.take(scheduler.step, 0.0), Formed):
                scheduler.published(scheduler.step)
        ledger.close()
        raw = ledger.path.read_bytes()
        durable = raw.rfind(b'{"event":"delivered"')
        keep = raw.find(b"\n", durable) + 1 if durable >= 0 else 0
        ledger.path.write_bytes(raw[: random.randint(keep, len(raw))])
        step = max(0, scheduler.step - random.randint(0, 1))
    state = replay(ledger.path)
    assert len(state.delivered) == 3 * len(state.steps) > 60
    assert state.steps == set(range(len(state.steps)))
    assert state.delivered.keys() | state.refused.keys() | state.owed == set(range(state.next_position))
    assert state.delivered.keys().isdisjoint(state.refused.keys())
