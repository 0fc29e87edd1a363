"""Rewards in their own processes: right values in the right order; a function that raises, hangs or dies names its prompt."""

import time

import pytest

from moerl.cluster.rewards import RewardPool
from moerl.config.schema import Task
from moerl.errors import TaskError

pytestmark = pytest.mark.usefixtures("local_ray")


def task(name, **settings):
    return Task(reward=name, **settings)


def test_rewards_come_back_in_order_and_nothing_else_changes(make_groups):
    groups = make_groups(["a", "bb", "ccc", "dddd", "eeeee"])
    with RewardPool(task("cluster_test_rewards:length", reward_workers=2)) as pool:
        scored = pool.score(groups)
        assert pool.score([]) == []
    assert [[sample.reward for sample in group.samples] for group in scored] == [[float(n)] * 2 for n in range(1, 6)]
    assert [sample.trace for group in scored for sample in group.samples] == [b"trace"] * 10
    assert [group.prompt_id for group in scored] == [10, 11, 12, 13, 14]
    assert all(sample.reward == 0.0 for group in groups for sample in group.samples)


def test_a_built_in_reward_works(make_groups):
    with RewardPool(task("exact_integer")) as pool:
        (group,) = pool.score(make_groups(["42"]))
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]


def test_a_reward_that_raises_names_prompt_and_cause(make_groups):
    with RewardPool(task("cluster_test_rewards:raising")) as pool:
        with pytest.raises(TaskError, match=r"prompt 12.*cannot score three"):
            pool.score(make_groups(["1", "2", "3", "4"]))
        assert len(pool.score(make_groups(["1"]))) == 1


def test_a_reward_that_hangs_is_killed_names_its_prompt_and_leaves_the_pool_usable(make_groups):
    with RewardPool(task("cluster_test_rewards:hanging", reward_workers=2, reward_timeout_s=4.0)) as pool:
        start = time.monotonic()
        with pytest.raises(TaskError, match=r"did not answer within 4 s for prompt 12 \(answer '3'\)"):
            pool.score(make_groups(["1", "2", "3", "4"]))
        assert time.monotonic() - start < 60
        assert [sample.reward for sample in pool.score(make_groups(["5"]))[0].samples] == [1.0, 1.0]


def test_a_reward_that_kills_its_process_is_an_error(make_groups):
    with RewardPool(task("cluster_test_rewards:dying")) as pool, pytest.raises(TaskError, match=r"prompt 10.*its process died"):
        pool.score(make_groups(["1"]))


@pytest.mark.parametrize(("name", "message"), [("cluster_test_rewards:nothing", "has no function"), ("no_such_module:f", "cannot import")])
def test_a_reward_that_cannot_be_loaded_is_reported_at_the_start(name, message):
    with pytest.raises(TaskError, match=message), RewardPool(task(name)):
        pass
