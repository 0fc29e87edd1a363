"""Built-in rewards, foreign ones, and what is said when one misbehaves."""

import threading

import pytest

from moerl.errors import TaskError
from moerl.rollout.rewards import exact_integer, math_verify, resolve_reward, score_groups
from moerl.rollout.sample import Group, Sample


def group(*texts: str, answer: str = "7", finish: str = "stop") -> Group:
    samples = [Sample(4, i, [1], [2], b"", b"", [], text, finish) for i, text in enumerate(texts)]
    return Group(4, answer, samples)


@pytest.mark.parametrize(
    ("completion", "answer", "finish", "reward"),
    [
        ("7", "7", "stop", 1.0),
        ("-12", "-12", "stop", 1.0),
        ("8", "7", "stop", 0.1),
        ("007", "7", "stop", 0.1),
        ("7", "7", "length", 0.0),
        ("7 ", "7", "stop", 0.0),
        ("+7", "7", "stop", 0.0),
        ("", "7", "stop", 0.0),
        ("7-", "7", "stop", 0.0),
        ("٧", "7", "stop", 0.0),
    ],
)
def test_exact_integer(completion, answer, finish, reward):
    assert exact_integer(completion, answer, finish) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("so it is \\boxed{7}", "7", 1.0), ("0.5", "1/2", 1.0), ("8", "7", 0.0), ("no idea", "7", 0.0), ("", "7", 0.0)],
)
def test_math_verify(completion, answer, reward):
    assert math_verify(completion, answer, "stop") == reward


def test_math_verify_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(math_verify("7", "7", "stop")))
    thread.start()
    thread.join(20)
    assert results == [1.0]


def test_score_groups_fills_copies():
    groups = [group("7", "8"), group("5", answer="5")]
    scored = score_groups(groups, resolve_reward("exact_integer"))
    assert [[sample.reward for sample in g.samples] for g in scored] == [[1.0, 0.1], [1.0]]
    assert [sample.reward for sample in groups[0].samples] == [0.0, 0.0]


def test_a_foreign_reward():
    reward = resolve_reward("os.path:commonprefix")
    assert callable(reward)


def test_an_unknown_reward_suggests_the_nearest():
    with pytest.raises(TaskError, match="no reward 'exact_intger'; did you mean 'exact_integer'"):
        resolve_reward("exact_intger")


def test_a_missing_module_and_a_missing_function():
    with pytest.raises(TaskError, match="cannot import 'no_such_module'.*PYTHONPATH"):
        resolve_reward("no_such_module:reward")
    with pytest.raises(TaskError, match="no function 'exact_intege'; did you mean 'exact_integer'"):
        resolve_reward("moerl.rollout.rewards:exact_intege")


def raising(completion: str, answer: str, finish_reason: str) -> float:
    raise ZeroDivisionError("by nothing")


def test_a_reward_that_raises_is_named_with_prompt_and_cause():
    with pytest.raises(TaskError, match=r"reward .*:raising, prompt 4, sample 0: ZeroDivisionError: by nothing \(completion '7'"):
        score_groups([group("7")], raising)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_reward_that_is_no_finite_number(value):
    with pytest.raises(TaskError, match="expected a finite number"):
        score_groups([group("7")], lambda completion, answer, finish_reason: value)
