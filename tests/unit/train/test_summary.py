import pytest

from moerl.config.schema import Require
from moerl.errors import TrainError
from moerl.train.summary import check_requirements, summarise


def records(rewards: list[float]) -> list[dict[str, object]]:
    steps = [
        {"step": i, "reward": r, "response_tokens": 10 * (i + 1), "kl_natural": 0.1 * i, "versions_consistent": True}
        for i, r in enumerate(rewards)
    ]
    steps[0] |= {"heldout_accuracy": 0.3, "heldout_greedy_accuracy": 0.8}
    return [*steps, {"step": len(rewards), "heldout_accuracy": 0.6, "heldout_greedy_accuracy": 0.9}]


def test_means_are_weighted_by_tokens() -> None:
    found = summarise(records([0.0, 1.0]), minutes=2.0)
    assert found["kl_natural"] == pytest.approx(0.1 * 20 / 30)
    assert (found["heldout_start"], found["heldout_end"]) == (0.3, 0.6)
    assert found["steps"] == 2


def test_reward_windows_are_a_tenth_of_the_steps() -> None:
    found = summarise(records([0.0] * 5 + [0.5] * 40 + [1.0] * 5), minutes=1.0)
    assert (found["reward_start"], found["reward_end"]) == (0.0, 1.0)


def test_an_unmet_requirement_is_an_error_that_lists_all() -> None:
    found = summarise(records([0.5] * 10), minutes=1.0)
    check_requirements(found, Require(min_heldout_gain=0.2))
    with pytest.raises(TrainError, match=r"(?s)reward went from 0\.500 to 0\.500.*heldout went"):
        check_requirements(found, Require(min_reward_gain=0.1, min_heldout_gain=0.5))


def test_what_was_not_measured_cannot_be_required() -> None:
    found = summarise([{"step": i, "reward": 0.5, "response_tokens": 1} for i in range(4)], minutes=1.0)
    assert found["versions_consistent"] is None
    with pytest.raises(TrainError, match=r"heldout was not measured, but require\.min_heldout_gain"):
        check_requirements(found, Require(min_heldout_gain=0.1))


def test_an_inconsistent_version_fails_the_run() -> None:
    broken = records([0.1, 0.9])
    broken[1]["versions_consistent"] = False
    with pytest.raises(TrainError, match="another weight version"):
        check_requirements(summarise(broken, minutes=1.0), Require())
