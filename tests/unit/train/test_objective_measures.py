"""Metrics from sums, and effective sample sizes, by hand."""

import numpy as np
import pytest

from moerl.train.objective import averages, ess_by_lag


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


def test_ess_by_lag() -> None:
    """Equal weights are worth their number; weights 1 and 3 are worth 4^2 / 10 of 2."""
    gap = np.log([2.0, 1.0, 2.0, 3.0])
    found = ess_by_lag(gap, np.array([0, 2, 0, 2], np.float32))
    assert found == pytest.approx({"ess_lag0": 1.0, "token_share_lag0": 0.5, "ess_lag2": 0.8, "token_share_lag2": 0.5})
    assert ess_by_lag(gap[:0], np.zeros(0, np.float32)) == {}


def test_ess_of_extreme_weights_is_finite() -> None:
    found = ess_by_lag(np.array([2000.0, -2000.0]), np.zeros(2, np.float32))
    assert found["ess_lag0"] == pytest.approx(0.5)
