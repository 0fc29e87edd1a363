"""What the benchmark of the loop makes of its measurements; that it runs is for a machine with time."""

from pathlib import Path

import pytest

from moerl.bench import loop
from moerl.buffer.simulate import Outcome
from moerl.config.load import load_config
from moerl.config.schema import Config


def pace(step_s: float, waits_s: float, *, lag: int = 0, dropped: int = 0) -> loop.Pace:
    return loop.Pace(step_s, waits_s, step_s - waits_s, 0.1, 0.9, 0.1, lag, dropped)


def outcome(share: float, refused: float) -> Outcome:
    return Outcome(100.0, 100.0 * share, 10.0, 1, 1, {"buffer/refused_groups": refused})


def test_figures_are_ratios_to_taking_turns_and_to_the_slower_side_alone() -> None:
    found = loop.figures(pace(8.0, 3.0), pace(5.5, 0.5, lag=2, dropped=1), outcome(0.97, 2.0), outcome(0.36, 0.0))
    assert found == {
        "async_over_sync": pytest.approx(8 / 5.5, abs=1e-3),
        "share_of_bound": pytest.approx(5 / 5.5, abs=1e-3),
        "sim_share_of_bound": 0.97,
        "sim_sync_share_of_bound": 0.36,
        "max_lag_allowed": loop.MAX_LAG,
        "max_lag_seen": 2,
        "groups_dropped": 3,
    }


def test_its_settings_keep_every_rule() -> None:
    settings = loop._settings(Path("folder"))
    words = [f"--{section}.{name}={value}" for section in ("rollout", "train", "engine") for name, value in settings[section].items()]
    load_config(["--model.path=m", *(word.replace("False", "false") for word in words), f"--buffer.max_lag={loop.MAX_LAG}"])
    Config.model_validate(settings)


def test_stretched_steps_take_as_long_as_asked_for_whatever_they_do() -> None:
    """The trainer sleeps for what is missing, before its optimizer's update."""
    from contextlib import nullcontext
    from time import perf_counter, sleep
    from types import SimpleNamespace

    run = SimpleNamespace(phase=lambda name: nullcontext())
    loop._stretch(run, 0.2)
    for busy_s in (0.0, 0.1, 0.25):
        start = perf_counter()
        with run.phase("pack"):
            sleep(busy_s)
        with run.phase("optimizer"):
            took = perf_counter() - start
        assert took >= max(0.2, busy_s)
        assert took < max(0.2, busy_s) + 0.1 or busy_s > 0.2
