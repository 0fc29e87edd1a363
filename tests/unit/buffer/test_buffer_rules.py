"""Rules of the [buffer] section: what breaks each, and what does not."""

import pytest

from moerl.config.load import load_config
from moerl.errors import ConfigError


def check(*settings: str) -> list[str]:
    try:
        load_config(["--model.path=m", *(f"--{setting}" for setting in settings)])
    except ConfigError as error:
        return error.violations
    return []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["buffer.max_lag=-1"], "buffer.max_lag: expected a number of at least 0, got -1"),
        (["buffer.policy=drop"], "buffer.policy: expected one of 'wait', 'mask' or 'refuse', got \"drop\""),
        (["buffer.capacity_groups=15"], "buffer.capacity_groups 15 cannot hold the 16 groups of one step"),
        (["buffer.min_group=9"], "buffer.min_group 9 is more than the 8 completions of a group"),
        (["buffer.min_group=1"], "buffer.min_group: expected a number of at least 2, got 1"),
        (
            ["buffer.max_lag=2", "replay.max_row_lag=1"],
            "replay.max_row_lag 1 would refuse the routes of groups that buffer.max_lag 2 lets in",
        ),
        (["buffer.policy=mask"], "buffer.policy has no effect with buffer.max_lag = 0"),
        (["buffer.max_resamples_per_step=3"], "has no effect with buffer.dynamic_sampling = false"),
        (["buffer.longest_first=false", "buffer.length_memory=0.5"], "has no effect with buffer.longest_first = false"),
        (["buffer.group_timeout_s=0"], "buffer.group_timeout_s: expected a number above 0, got 0"),
    ],
)
def test_broken_rule(settings: list[str], message: str) -> None:
    (violation,) = check(*settings)
    assert message in violation


@pytest.mark.parametrize(
    "settings",
    [
        ["buffer.max_lag=4", "buffer.policy=refuse", "buffer.capacity_groups=16", "buffer.min_group=8"],
        ["buffer.max_lag=2", "replay.max_row_lag=2"],
        ["buffer.dynamic_sampling=true", "buffer.max_resamples_per_step=3"],
    ],
)
def test_settings_that_fit(settings: list[str]) -> None:
    assert check(*settings) == []
