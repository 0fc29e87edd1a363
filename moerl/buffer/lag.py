"""Lag by token: version runs of a sample and the version being trained in, lags and masks out."""

from collections.abc import Sequence

import numpy as np

from moerl.errors import RolloutError

Runs = Sequence[tuple[int, int, int]]
"""(weight version, start, stop) over the response tokens, as in `rollout.sample.Sample.versions`."""


def oldest_version(runs: Runs) -> int:
    """The version of the oldest token; it decides the lag of the whole sample."""
    if not runs:
        raise RolloutError("a sample without version runs has no age; expected (version, start, stop) over its response tokens")
    return min(version for version, _, _ in runs)


def token_lags(runs: Runs, version: int) -> np.ndarray:
    """How many versions before `version` each response token was sampled: int64[token].

    Raises:
        RolloutError: the runs do not cover the tokens from 0 without a gap, or a token is newer than `version`.
    """
    end = 0
    for _, start, stop in runs:
        if start != end or stop <= start:
            raise RolloutError(f"version runs must follow each other from token 0 and not be empty, got {list(runs)}")
        end = stop
    lags = np.concatenate([np.full(stop - start, version - made, np.int64) for made, start, stop in runs] or [np.zeros(0, np.int64)])
    if (lags < 0).any():
        raise RolloutError(f"tokens of version {version - int(lags.min())} cannot be trained at version {version}, which is older")
    return lags


def fresh_tokens(runs: Runs, version: int, max_lag: int) -> np.ndarray:
    """Which response tokens may be trained at `version`: bool[token], False where a token lags by more than `max_lag`."""
    return token_lags(runs, version) <= max_lag
