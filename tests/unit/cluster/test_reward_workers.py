"""Rewards in their own processes: a function that raises, hangs or dies costs an attempt, and names its prompt."""

import asyncio
import time

import pytest

from moerl.cluster.rewards import RewardWorkers
from moerl.config.schema import Task
from moerl.errors import TaskError

pytestmark = pytest.mark.usefixtures("local_ray")


def scored(name, groups, then=(), **settings):
    """What became of `groups`, scored at once, and of `then`, scored after them: groups or errors."""

    async def run():
        workers = RewardWorkers(Task(reward=name, **settings))
        try:
            await workers.start()
            found = await asyncio.gather(*map(workers.score, groups), return_exceptions=True)
            return [*found, *await asyncio.gather(*map(workers.score, then), return_exceptions=True)]
        finally:
            workers.stop()

    return asyncio.run(run())


def rewards(group):
    return [sample.reward for sample in group.samples]


def test_each_group_gets_its_own_rewards_and_nothing_else_changes(make_groups):
    groups = make_groups(["a", "bb", "ccc", "dddd", "eeeee"])
    found = scored("cluster_test_rewards:length", groups, reward_workers=2)
    assert [rewards(group) for group in found] == [[float(n)] * 2 for n in range(1, 6)]
    assert [sample.trace for group in found for sample in group.samples] == [b"trace"] * 10
    assert [group.prompt_id for group in found] == [10, 11, 12, 13, 14]
    assert all(sample.reward == 0.0 for group in groups for sample in group.samples)


def test_a_built_in_reward_works(make_groups):
    assert rewards(*scored("exact_integer", make_groups(["42"]))) == [1.0, 1.0]


def test_a_reward_that_raises_names_prompt_and_cause_and_the_others_go_on(make_groups):
    found = scored("cluster_test_rewards:raising", make_groups(["1", "2", "3", "4"]))
    assert [rewards(found[at]) for at in (0, 1, 3)] == [[1.0, 1.0]] * 3
    with pytest.raises(TaskError, match=r"prompt 12 \(answer '3'\).*cannot score three"):
        raise found[2]


@pytest.mark.parametrize("retries", [0, 1])
def test_what_fails_once_is_tried_again(make_groups, tmp_path, retries):
    (found,) = scored("cluster_test_rewards:once", make_groups([str(tmp_path / "seen")], size=1), reward_retries=retries)
    assert rewards(found) == [1.0] if retries else "not yet" in str(found)


def test_a_worker_that_hangs_is_killed_and_replaced(make_groups):
    start = time.monotonic()
    late, *others = scored(
        "cluster_test_rewards:hanging",
        make_groups(["3", "1", "2"]),
        make_groups(["4", "5"]),
        reward_workers=1,
        reward_timeout_s=3.0,
        reward_retries=0,
    )
    with pytest.raises(TaskError, match=r"prompt 10 \(answer '3'\): no answer within 3 s \(task.reward_timeout_s\)"):
        raise late
    assert [rewards(group) for group in others] == [[1.0, 1.0]] * 4
    assert time.monotonic() - start < 60


def test_a_reward_that_kills_its_process_is_an_error_at_the_last_attempt(make_groups):
    (error,) = scored("cluster_test_rewards:dying", make_groups(["1"]), reward_retries=1)
    with pytest.raises(TaskError, match=r"(?s)prompt 10.*its process died"):
        raise error


@pytest.mark.parametrize(("name", "message"), [("cluster_test_rewards:nothing", "has no function"), ("no_such_module:f", "cannot import")])
def test_a_reward_that_cannot_be_loaded_is_reported_at_the_start(name, message):
    with pytest.raises(TaskError, match=message):
        scored(name, [])
