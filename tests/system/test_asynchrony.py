"""A run with a lag on a real engine: bounded staleness, evaluations between, what is measured, and that measuring changes nothing.

The set of evaluation prompts is larger than the engine's slots, and evaluations happen while groups for later steps are sampled.
"""

from collections.abc import Callable

import pytest

from moerl.config.schema import Config
from moerl.rollout import store
from moerl.rollout.curriculum import take
from moerl.rollout.rewards import exact_integer
from moerl.rollout.sample import Group
from moerl.rollout.tasks import load_task
from tests.system.run_harness import Finished
from tests.system.test_train import assert_same_weights, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, MAX_LAG, SLOTS, HELDOUT = 8, 2, 16, 40
SETTINGS = (
    *("--buffer.max_lag", str(MAX_LAG), "--train.steps", str(STEPS), "--engine.max_running_requests", str(SLOTS)),
    *("--task.heldout_prompts", str(HELDOUT), "--diagnostics.evaluate_every_steps", "2"),
)


def rollouts(run: Finished) -> list[list[Group]]:
    """The groups of each step."""
    config = Config.model_validate_json((run.folder / "config.json").read_text())
    expected = store.make_header(config.model.path, step=0, version=0)
    return [store.load_step(run.folder / "rollouts", step, expected)[1] for step in range(config.train.steps)]


@pytest.fixture(scope="module")
def ahead(moerl: Callable[..., Finished]) -> Finished:
    finished = moerl("ahead", *SETTINGS)
    assert finished.status == 0, finished.output[-4000:]
    return finished


def test_without_a_lag_the_stream_is_the_synchronous_loop(live_run: Finished) -> None:
    """Steps are the next prompts in order, complete, sampled by the very version that they train, each with its own reward.

    That training on exactly these gives the weights of this run, bit by bit, is tested with recorded rollouts, where there is no stream.
    """
    config = Config.model_validate_json((live_run.folder / "config.json").read_text())
    task = load_task(config.task, config.model.path, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.run.seed)
    count, size = config.rollout.prompts_per_step, config.rollout.group_size
    for step, groups in enumerate(rollouts(live_run)):
        prompts = take(task.train, position=step * count, count=count, seed=config.run.seed)
        assert [(group.prompt_id, group.answer) for group in groups] == [(prompt.id, prompt.answer) for prompt in prompts]
        for group, prompt in zip(groups, prompts, strict=True):
            assert [sample.index for sample in group.samples] == list(range(size))
            for sample in group.samples:
                assert sample.prompt_tokens == prompt.tokens
                assert sample.versions == [(step, 0, len(sample.response_tokens))]
                assert {run.version for run in sample.load_trace().versions} == {step}
                assert sample.reward == exact_integer(sample.text, prompt.answer, sample.finish_reason)
    records = [record for record in live_run.metrics if record["step"] >= 0]
    assert [record["buffer/lag_highest"] for record in records] == [0] * len(records)
    assert not any(name.startswith("fresh/") for record in records for name in record), "all tokens are fresh"


def test_no_token_is_older_than_the_lag_allows_and_some_are_old(ahead: Finished) -> None:
    lags = [
        [step - version for group in groups for sample in group.samples for version, _, _ in sample.versions]
        for step, groups in enumerate(rollouts(ahead))
    ]
    assert all(0 <= min(found) <= max(found) <= MAX_LAG for found in lags)
    assert max(map(max, lags)) > 0
    records = [record for record in ahead.metrics if record["step"] >= 0]
    assert [record["buffer/lag_highest"] for record in records] == list(map(max, lags))
    assert ahead.summary["versions_consistent"]
    assert ahead.left == []


def test_evaluations_of_more_prompts_than_slots_are_of_one_version_and_starve_nobody(ahead: Finished) -> None:
    evaluated = [record for record in ahead.metrics if "heldout_accuracy" in record]
    assert [record["step"] for record in evaluated] == [-1, 1, 3, 5, 7]
    for record in evaluated:
        for name in ("heldout_accuracy", "heldout_greedy_accuracy"):
            assert record[name] * HELDOUT == pytest.approx(round(record[name] * HELDOUT)), "a share of all prompts"
    assert ahead.summary["steps"] == STEPS
    assert ahead.summary["groups_refused"] == 0


def test_every_step_says_how_busy_who_was_who_waited_and_what_it_trained(ahead: Finished) -> None:
    names = {
        *("buffer/engines_busy_share", "buffer/trainer_busy_share", "buffer/trainer_sync_share", "buffer/engines_paced_share"),
        *("buffer/trainer_waits_for_groups_s", "buffer/trainer_waits_for_due_s", "buffer/ready_groups", "buffer/ready_groups_highest"),
        *("buffer/lag_mean", "buffer/lag_highest", "buffer/refused_groups", "buffer/wasted_tokens", "buffer/wasted_share"),
        *("ess_replay", "kl_replay", "kl_natural", "replay_agreement", "time/rollout", "time/sync"),
    }
    records = [record for record in ahead.metrics if record["step"] >= 0]
    for record in records:
        assert not names - record.keys()
        assert 0 <= record["buffer/engines_busy_share"] <= 1
        by_lag = [record.get(f"buffer/lag_{lag}", 0) for lag in range(MAX_LAG + 1)]
        assert sum(by_lag) == 4
        assert sum(record.get(f"token_share_lag{lag}", 0) for lag in range(MAX_LAG + 1)) == pytest.approx(1)
        for lag in range(MAX_LAG + 1):
            assert (f"kl_lag{lag}" in record) == (f"ess_lag{lag}" in record) == (f"token_share_lag{lag}" in record)
    assert sum(record["engine/0/tokens_per_s"] for record in records if "engine/0/tokens_per_s" in record) > 0
    assert sum(record["engine/0/paused_s"] for record in records if "engine/0/paused_s" in record) > 0


def test_the_gap_without_staleness_is_that_of_a_run_without_a_lag(ahead: Finished, live_run: Finished) -> None:
    measured = [record for record in ahead.metrics if "fresh/tokens" in record]
    assert measured
    assert ahead.summary["mismatch_tokens"] == sum(record["fresh/tokens"] for record in measured)
    assert all(record["fresh/version"] + MAX_LAG == record["step"] for record in measured)
    here, there = ahead.summary, live_run.summary
    assert here["kl_replay"] < 0.2 * here["kl_by_lag"][max(here["kl_by_lag"])], "what updates changed is not in it"
    assert here["kl_replay"] < 5 * there["kl_replay"]
    assert here["kl_replay"] < here["kl_natural"]
    assert 0 < here["natural_flip_share"] < 1


def test_neither_measuring_nor_the_stream_changes_what_is_trained(moerl: Callable[..., Finished], ahead: Finished) -> None:
    """The same rollouts, without an engine and without weights that are kept, give the same weights bit by bit."""
    again = moerl("ahead-again", "--rollouts", str(ahead.folder), *SETTINGS, "--diagnostics.mismatch_every_steps", "0")
    assert again.status == 0, again.output[-4000:]
    without = [{name: value for name, value in record.items() if name != "kl_natural"} for record in trained(ahead)]
    assert [{name: record[name] for name in without[0]} for record in again.metrics if record["step"] >= 0] == without
    assert_same_weights(again, ahead)
