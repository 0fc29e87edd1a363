"""Metrics from sums, and effective sample sizes, by hand."""

import numpy as np
import pytest

from moerl.train.objective import averages, by_lag


def test_sums_become_means_of_what_they_are_sums_of() -> None:
    sums = {"loss": 6.0, "denominator": 3, "tokens": 4.0, "sequences": 2.0, "entropy": 2.0, "x_share_of_sequences": 1.0}
    assert averages(sums) == {"loss": 2.0, "entropy": 0.5, "x_share_of_sequences": 0.5}


def test_ess_of_the_correction() -> None:
    """Weights 1, 1, 2, 0: 4^2 / (4 * 6)."""
    found = averages({"loss": 0.0, "denominator": 4, "tokens": 4.0, "correction_weight": 4.0, "correction_weight_squared": 6.0})
    assert found == {"loss": 0.0, "correction_weight": 1.0, "correction_ess": pytest.approx(2 / 3)}


def test_a_step_in_which_everything_was_cut_has_no_ess() -> None:
    found = averages({"loss": 0.0, "denominator": 0, "tokens": 0.0, "correction_weight": 0.0, "correction_weight_squared": 0.0})
    assert found == {"loss": 0.0, "correction_weight": 0.0}


def test_by_lag() -> None:
    """Equal weights are worth their number; weights 1 and 3 are worth 4^2 / 10 of 2. k3 of a weight w is w - 1 - log w."""
    gap = np.log([2.0, 1.0, 2.0, 3.0])
    found = by_lag(gap, np.array([0, 2, 0, 2], np.float32))
    fresh = {"ess_lag0": 1.0, "kl_lag0": 1 - np.log(2), "token_share_lag0": 0.5}
    assert found == pytest.approx({**fresh, "ess_lag2": 0.8, "kl_lag2": (2 - np.log(3)) / 2, "token_share_lag2": 0.5})
    assert by_lag(gap[:0], np.zeros(0, np.float32)) == {}


def test_ess_of_extreme_weights_is_finite() -> None:
    found = by_lag(np.array([500.0, -2000.0]), np.zeros(2, np.float32))
    assert found["ess_lag0"] == pytest.approx(0.5)
