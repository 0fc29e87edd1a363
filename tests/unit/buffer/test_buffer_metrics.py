"""Figures of the loop: means over time, counts since the last report."""

import pytest

from moerl.buffer.ledger import Admitted, Delivered, Delivery, Refused, Wasted
from moerl.buffer.metrics import Level, Meter


def test_a_level_is_averaged_over_time() -> None:
    level = Level(10.0)
    level.set(12.0, 4.0)
    level.add(13.0, 2.0)
    assert level.take(14.0) == ((0 * 2 + 4 * 1 + 6 * 1) / 4, 6.0)
    assert level.take(14.0) == (6.0, 6.0)
    level.set(15.0, 0.0)
    assert level.take(18.0) == (1.5, 6.0)


def test_report_of_a_step() -> None:
    meter = Meter(slots=10)
    meter.trainer(0.0, "wait_groups")
    meter.running.set(0.0, 10)
    meter.running.set(6.0, 5)
    meter.paced.set(6.0, 5)
    meter.ready.set(5.0, 2)
    meter.trainer(2.0, "wait_due")
    meter.trainer(3.0, "train")
    meter.trainer(8.0, "sync")
    for event in (
        Admitted(0, 0, 0, 0.0),
        Delivered(3, (Delivery(0, (10, 20), 0), Delivery(1, (30, 20), 2, uniform=True), Delivery(2, (20, 20), 2)), 3.0),
        Refused(3, "late", 180, 2, 3.0),
        Refused(4, "uniform", 20, 2, 3.0),
        Wasted(0, "oversampled", 40),
    ):
        meter.see(event)
    assert meter.report(10.0) == {
        "buffer/engines_busy_share": pytest.approx(0.8),
        "buffer/engines_paced_share": pytest.approx(0.2),
        "buffer/trainer_busy_share": pytest.approx(0.5),
        "buffer/trainer_sync_share": pytest.approx(0.2),
        "buffer/trainer_waits_for_groups_s": 2.0,
        "buffer/trainer_waits_for_due_s": 1.0,
        "buffer/ready_groups": 1.0,
        "buffer/ready_groups_highest": 2,
        "buffer/lag_mean": pytest.approx(4 / 3),
        "buffer/lag_highest": 2.0,
        "buffer/lag_0": 1.0,
        "buffer/lag_2": 2.0,
        "buffer/refused_groups": 2.0,
        "buffer/refused_late": 1.0,
        "buffer/refused_uniform": 1.0,
        "buffer/uniform_trained": 1.0,
        "buffer/wasted_tokens": 240.0,
        "buffer/wasted_late_tokens": 180.0,
        "buffer/wasted_uniform_tokens": 20.0,
        "buffer/wasted_oversampled_tokens": 40.0,
        "buffer/wasted_share": pytest.approx(240 / 360),
        "buffer/length_trained": 20.0,
        "buffer/length_refused": 50.0,
    }


def test_a_report_begins_anew_and_goes_on_with_what_holds() -> None:
    meter = Meter(slots=4)
    meter.running.set(0.0, 4)
    meter.trainer(0.0, "train")
    meter.see(Refused(0, "late", 10, 1, 0.0))
    meter.report(5.0)
    after = meter.report(7.0)
    assert (after["buffer/engines_busy_share"], after["buffer/trainer_busy_share"]) == (1.0, 1.0)
    assert (after["buffer/refused_groups"], after["buffer/wasted_tokens"], after["buffer/lag_mean"]) == (0.0, 0.0, 0.0)
    assert "buffer/refused_late" not in after
    assert "buffer/length_refused" not in after


def test_each_engine_says_what_it_did_since_the_last_report_also_after_it_was_replaced() -> None:
    meter = Meter(slots=4)
    meter.engine(0, 100, 1.0)
    meter.engine(1, 40, 0.5)
    meter.report(10.0)
    meter.engine(0, 300, 1.0)
    meter.engine(0, 20, 0.25)  # a new one
    meter.engine(0, 60, 0.25)
    found = {name: value for name, value in meter.report(14.0).items() if name.startswith("engine/")}
    assert found == {
        "engine/0/tokens_per_s": (200 + 60) / 4,
        "engine/0/paused_s": 0.25,
        "engine/1/tokens_per_s": 0.0,
        "engine/1/paused_s": 0.0,
    }


def test_a_report_without_time_is_finite() -> None:
    assert Meter(slots=4).report(0.0)["buffer/trainer_busy_share"] == 0.0
