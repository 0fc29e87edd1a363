"""Lag by token against its definition."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.buffer.lag import fresh_tokens, oldest_version, token_lags
from moerl.errors import RolloutError

by_token = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def runs_of(versions: list[int]) -> list[tuple[int, int, int]]:
    edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return [(versions[start], start, stop) for start, stop in pairwise(edges)]


@given(by_token, st.integers(9, 15), st.integers(0, 6))
@settings(deadline=None)
def test_a_token_is_fresh_if_its_own_version_is(versions: list[int], trained: int, max_lag: int) -> None:
    runs = runs_of(versions)
    mask = fresh_tokens(runs, trained, max_lag)
    assert mask.dtype == bool
    assert mask.tolist() == [trained - version <= max_lag for version in versions]
    assert token_lags(runs, trained).tolist() == [trained - version for version in versions]
    assert mask.all() == (trained - oldest_version(runs) <= max_lag)


def test_no_tokens_no_lags() -> None:
    assert token_lags([], 3).shape == (0,)
    assert token_lags([], 3).dtype == np.int64


@pytest.mark.parametrize("runs", [[(0, 1, 3)], [(0, 0, 2), (1, 3, 4)], [(0, 0, 0)], [(0, 0, 3), (1, 2, 4)]])
def test_runs_with_gaps_are_refused(runs) -> None:
    with pytest.raises(RolloutError, match="must follow each other from token 0"):
        token_lags(runs, 5)


def test_tokens_from_the_future_are_refused() -> None:
    with pytest.raises(RolloutError, match="tokens of version 4 cannot be trained at version 3"):
        token_lags([(2, 0, 1), (4, 1, 2)], 3)


def test_a_sample_without_runs_has_no_age() -> None:
    with pytest.raises(RolloutError, match="has no age"):
        oldest_version([])
