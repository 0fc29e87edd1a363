"""The figures of a mismatch, against definitions written out plainly."""

import numpy as np
import pytest

from moerl.routing.compare import differing, expert_counts, imbalance, k3, mismatch


def test_the_order_of_experts_carries_no_meaning() -> None:
    a = np.array([[[1, 2, 3]], [[1, 2, 3]]], np.uint8)
    b = np.array([[[3, 1, 2]], [[1, 2, 4]]], np.int32)
    assert differing(a, b).tolist() == [[False], [True]]


def test_k3_is_zero_only_without_a_gap() -> None:
    d = np.array([0.0, 0.1, -0.1])
    np.testing.assert_allclose(k3(d), np.exp(d) - 1 - d, rtol=1e-9)
    assert k3(np.array([1e-9]))[0] >= 0


def test_mismatch_figures() -> None:
    d = np.log(np.array([1.0, 1.0, 4.0, 0.4, 1.3]))
    found = mismatch(d)
    assert found["extreme_share"] == pytest.approx(0.4)
    assert found["wide_share"] == pytest.approx(0.6)
    assert found["abs_diff"] == pytest.approx(np.abs(d).mean())
    weights = np.exp(d)
    assert found["ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 5)
    assert found["ratio_p50"] == pytest.approx(1.0)
    assert mismatch(np.array([])) == {}


def test_expert_load_is_one_when_balanced() -> None:
    balanced = np.arange(8).reshape(4, 1, 2)
    np.testing.assert_allclose(imbalance(expert_counts(balanced, 8)), [1.0])
    crowded = np.zeros((4, 2, 2), int)
    crowded[..., 1] = 1
    np.testing.assert_allclose(imbalance(expert_counts(crowded, 8)), [4.0, 4.0])
