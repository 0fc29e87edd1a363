"""Advantages against hand-worked groups, and the algebra that every baseline keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema import Objective
from moerl.train.objective import group_advantages, is_uniform, overlong_penalty, uniform_share

REWARDS = np.array([3.0, 1.0, 1.0, 3.0], np.float32)
"""Mean 2, standard deviation 1."""

groups = st.lists(st.integers(-5, 5), min_size=2, max_size=12).map(lambda found: np.array(found, np.float32))


@pytest.mark.parametrize(
    ("settings", "advantages"),
    [
        ({}, [1, -1, -1, 1]),
        ({"normalize_std": False}, [1, -1, -1, 1]),
        ({"baseline": "leave_one_out", "normalize_std": False}, [3 - 5 / 3, 1 - 7 / 3, 1 - 7 / 3, 3 - 5 / 3]),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_a_group_by_hand(settings: dict, advantages: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(Objective(**settings))(REWARDS), advantages, rtol=1e-5)


def test_only_grpo_divides_by_the_standard_deviation() -> None:
    np.testing.assert_allclose(group_advantages(Objective())(5 * REWARDS), [1, -1, -1, 1], rtol=1e-5)
    np.testing.assert_allclose(group_advantages(Objective(normalize_std=False))(5 * REWARDS), [5, -5, -5, 5], rtol=1e-5)


@given(groups)
def test_leave_one_out_is_its_definition(rewards: np.ndarray) -> None:
    found = group_advantages(Objective(baseline="leave_one_out", normalize_std=False))(rewards)
    others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
    np.testing.assert_allclose(found, rewards - others, atol=1e-4)


@given(groups, st.integers(-3, 3), st.sampled_from(["mean", "leave_one_out"]), st.booleans())
def test_advantages_of_a_group_cancel_and_ignore_an_offset(rewards: np.ndarray, offset: int, baseline: str, std: bool) -> None:
    advantages = group_advantages(Objective(baseline=baseline, normalize_std=std))
    found = advantages(rewards)
    assert found.dtype == np.float32
    assert abs(found.sum()) < 1e-4
    np.testing.assert_allclose(advantages(rewards + offset), found, atol=1e-4)


@given(groups)
def test_a_uniform_group_is_one_without_advantages(rewards: np.ndarray) -> None:
    assert is_uniform(rewards) == (not group_advantages(Objective(normalize_std=False))(rewards).any())


@given(st.floats(-8, 8, width=32), st.integers(2, 64), st.sampled_from([("mean", True), ("mean", False), ("leave_one_out", False)]))
def test_a_group_of_equal_rewards_has_no_advantages_at_all(reward: float, size: int, kind: tuple[str, bool]) -> None:
    rewards = np.full(size, reward, np.float32)
    assert is_uniform(rewards)
    assert not group_advantages(Objective(baseline=kind[0], normalize_std=kind[1]))(rewards).any()


def test_share_of_uniform_groups() -> None:
    uniform, mixed = np.ones(4, np.float32), np.array([1, 0, 0, 1], np.float32)
    assert uniform_share([uniform, mixed, mixed, 0 * uniform]) == 0.5
    assert uniform_share([]) == 0


def test_overlong_answers_are_punished_softly() -> None:
    found = overlong_penalty(np.array([1, 6, 7, 8, 10, 12]), limit_tokens=10, margin_tokens=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert found.dtype == np.float32
