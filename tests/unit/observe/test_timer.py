"""The phase timer."""

import time

import pytest

from moerl.observe.timer import PhaseTimer


def test_seconds_add_up_by_phase_and_start_anew() -> None:
    seen: list[str] = []
    timer = PhaseTimer(seen.append)
    for phase in ("rollout", "train", "rollout"):
        with timer(phase):
            time.sleep(0.01)
    taken = timer.take()
    assert list(taken) == ["time/rollout", "time/train"]
    assert taken["time/rollout"] > taken["time/train"] >= 0.01
    assert seen == ["rollout", "train", "rollout"]
    assert timer.take() == {}


def test_a_phase_that_raises_still_counts() -> None:
    timer = PhaseTimer()
    with pytest.raises(ZeroDivisionError), timer("train"):
        raise ZeroDivisionError
    assert list(timer.take("")) == ["train"]
