"""Ranks that act as one: results and errors are the same everywhere."""

import pytest

from moerl.errors import EngineError, ReshardError
from moerl.reshard import crew
from moerl.reshard.deadline import Deadline


def test_three_ranks_agree_on_results_and_errors(torchrun):
    output = torchrun(3, "crew_worker.py", timeout_s=120).stdout
    assert output.count("crew right") == 3, output[-3000:]


def test_one_process_is_a_crew_of_its_own():
    deadline = Deadline("a test", 5)
    assert crew.first(lambda: 3, deadline) == 3
    assert crew.all(lambda: 4, deadline) == [4]
    cause = EngineError("gone")

    def fail():
        raise cause

    with pytest.raises(ReshardError, match="^gone$") as caught:
        crew.all(fail, deadline)
    assert caught.value.__cause__ is cause
