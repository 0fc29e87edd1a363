"""The figures of a mismatch, against definitions written out plainly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.routing.compare import common, differing, expert_counts, imbalance, k3, members, mismatch, repeated


def test_the_order_of_experts_carries_no_meaning() -> None:
    a = np.array([[[1, 2, 3]], [[1, 2, 3]]], np.uint8)
    b = np.array([[[3, 1, 2]], [[1, 2, 4]]], np.int32)
    assert differing(a, b).tolist() == [[False], [True]]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 4, 8]), st.sampled_from([np.uint8, np.uint16]), st.sampled_from([8, 12]))
def test_sets_are_compared_as_python_compares_them(seed: int, k: int, dtype: type, experts: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.permuted(np.broadcast_to(np.arange(experts), (2, 6, 3, experts)), axis=3)[..., :k].astype(dtype)
    b = np.where(rng.random((6, 3, 1)) < 0.5, a, b)
    pairs = [[(set(x.tolist()), set(y.tolist())) for x, y in zip(*both, strict=True)] for both in zip(a, b, strict=True)]
    assert common(a, b).tolist() == [[len(x & y) for x, y in row] for row in pairs]
    assert differing(a, b).tolist() == [[x != y for x, y in row] for row in pairs]
    assert members(a[:, 0], b[:, 0]).sum(axis=1).tolist() == [len(row[0][0] & row[0][1]) for row in pairs]
    assert not repeated(a).any()
    loops = [[sum(expert in row[layer][0] for row in pairs) for expert in range(experts)] for layer in range(3)]
    assert expert_counts(a, experts).tolist() == loops


def test_a_repeated_expert_leaves_fewer_in_common() -> None:
    a, b = np.array([[[0, 0, 0, 0]], [[1, 2, 3, 4]]], np.uint8), np.array([[[0, 1, 2, 3]], [[4, 3, 2, 1]]], np.uint8)
    assert repeated(a).tolist() == [[True], [False]]
    assert common(a, b).tolist() == common(b, a).tolist() == [[1], [4]]


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
