import pytest

from moerl.config.schema import Require
from moerl.errors import TrainError
from moerl.train.summary import check_requirements, closing_rows, headline, summarise


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


BUSY = {"buffer/engines_busy_share": 0.914, "buffer/trainer_busy_share": 0.74, "buffer/lag_highest": 1.0, "buffer/lag_mean": 0.25}
WASTE = {"buffer/refused_groups": 1.0, "buffer/wasted_tokens": 1000.0}


def test_the_line_of_a_step_shows_lag_and_busy_shares_where_generation_runs_ahead() -> None:
    metrics = {"reward": 0.5, "loss": 0.1, "version": 3, "time/rollout": 1.0, "time/sync": 0.5, **BUSY}
    plain = {"reward": 0.5, "loss": 0.1, "version": 3}
    assert headline(metrics) == {**plain, "s": 1.5}
    assert headline(metrics, ahead=True) == {**plain, "lag": 1, "busy": "0.91/0.74", "s": 1.5}
    assert headline({**plain, "time/sync": 2.0}, ahead=True) == {**plain, "s": 2.0}, "recorded rollouts have no buffer"


def test_what_ran_beside_training_is_summed_up() -> None:
    steps = [
        {"reward": 0.5, "response_tokens": 10, "time/rollout": 1.0, **BUSY, **WASTE, "sync_way": "direct",
         "alarms": 2, "alarm/kl": 1, "alarm/ess": 1},
        {"reward": 0.5, "response_tokens": 90, "time/rollout": 3.0, **BUSY, **WASTE, "buffer/engines_busy_share": 0.514,
         "buffer/lag_mean": 0.75, "buffer/lag_highest": 3.0, "sync_way": "compatible", "sync_changed_share": 0.5, "alarms": 0},
        {"reward": 0.5, "response_tokens": 10, "time/rollout": 0.0, **BUSY, **WASTE, "sync_way": "direct", "sync_changed_share": 0.25},
    ]  # fmt: skip
    found = summarise(steps, minutes=1.0)
    assert found["engines_busy_share"] == pytest.approx((0.914 + 3 * 0.514) / 4), "weighted by seconds"
    assert found["lag_mean"] == pytest.approx(1.25 / 3)
    rows = closing_rows(found)
    assert rows["lag, mean and highest"] == "0.42, 3"
    assert rows["engines busy, trainer busy"] == "61 %, 74 %"
    assert rows["groups refused, tokens wasted"] == "3, 3,000"
    assert rows["weights changed per update"] == "37.50 %"
    assert rows["how weights travelled"] == "2 x direct, 1 x compatible"
    assert rows["alarms"] == "in 1 of 3 steps: kl 1, ess 1"


def test_with_a_lag_the_gap_is_that_of_tokens_under_the_weights_that_sampled_them() -> None:
    gaps = dict.fromkeys(("abs_diff", "extreme_share", "wide_share"), 9.0)
    sides = {f"fresh/{name}_{side}": value for name, value in gaps.items() for side in ("natural", "replay")}
    fresh = {"fresh/tokens": 10, "fresh/kl_natural": 1e-3, "fresh/kl_replay": 1e-5, "fresh/natural_flip_share": 0.125, **sides}
    stale = {"kl_natural": 0.5, "kl_replay": 0.25, "natural_flip_share": 0.5, "kl_lag0": 0.125, "token_share_lag0": 0.5}
    steps = [
        {"reward": 0.5, "response_tokens": 10, **stale, "kl_lag1": 0.75, "token_share_lag1": 0.5},
        {"reward": 0.5, "response_tokens": 30, **stale, **fresh, "kl_lag1": 0.25, "token_share_lag1": 0.5},
        {"reward": 0.5, "response_tokens": 10, **stale, **fresh, "fresh/tokens": 30, "fresh/kl_natural": 5e-3},
    ]
    found = summarise(steps, minutes=1.0)
    assert (found["kl_natural"], found["kl_replay"]) == pytest.approx((4e-3, 1e-5)), "weighted by the tokens that were measured"
    assert found["natural_flip_share"] == 0.125
    assert found["mismatch_tokens"] == 40
    assert found["kl_by_lag"] == pytest.approx({"0": 0.125, "1": (0.75 * 5 + 0.25 * 15) / 20})
    rows = closing_rows(found)
    assert rows["KL(engine || trainer), k3"] == "4.0e-03 natural, 1.0e-05 replayed (1/400)"
    assert rows["tokens measured"] == "40, under the weights that sampled them"
    assert rows["KL with staleness, by lag"] == "0: 1.2e-01, 1: 3.8e-01 replayed"
    assert headline(steps[1], ahead=True)["kl natural"] == 1e-3
    assert headline(steps[1], ahead=True)["kl stale"] == 0.25
    assert "kl natural" not in headline(steps[0], ahead=True), "it would contain what the updates changed"


def test_without_figures_under_the_sampling_weights_a_run_with_a_lag_has_no_gap_to_show() -> None:
    steps = [{"reward": 0.5, "response_tokens": 10, "kl_natural": 0.5, "kl_replay": 0.25, "kl_lag1": 0.25, "token_share_lag1": 1.0}]
    found = summarise(steps, minutes=1.0)
    assert "kl_natural" not in found
    assert "KL(engine || trainer), k3" not in closing_rows(found)


def test_what_was_not_measured_has_no_row() -> None:
    rows = closing_rows(summarise([{"reward": 0.5, "response_tokens": 1}], minutes=1.0))
    assert list(rows) == ["steps", "reward"]
