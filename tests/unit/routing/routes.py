"""Random routes and traces for the tests of this room."""

from itertools import pairwise

import numpy as np

from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace, hash_tokens


def random_ids(
    seed: int, rows: int, layers: int, experts: int, topk: int, groups: int = 0, group_topk: int = 0, *, dtype: type | None = None
) -> np.ndarray:
    """uint8|uint16[rows, layers, topk], distinct, in random order, within the group limit."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, layers, experts), np.float32)
    if groups:
        allowed = rng.random((rows, layers, groups)).argsort(axis=-1).argsort(axis=-1) < group_topk
        scores[~np.repeat(allowed, experts // groups, axis=-1)] += 2.0
    ids = scores.argsort(axis=-1)[..., :topk]
    order = rng.random(ids.shape).argsort(axis=-1)
    return np.take_along_axis(ids, order, axis=-1).astype(dtype or (np.uint8 if experts <= 256 else np.uint16))


def random_trace(seed: int, rows: int, layout: Layout, *, missing: bool = False, start: int = 0) -> tuple[Trace, np.ndarray]:
    """(trace of some version runs, its input tokens int64[rows])."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 100_000, rows)
    cuts = sorted({0, rows, *rng.integers(0, rows + 1, 3).tolist()})
    runs = tuple(VersionRun(i, a, b) for i, (a, b) in enumerate(pairwise(cuts)))
    ids = random_ids(seed, rows, len(layout.layers), layout.experts, layout.topk)
    trace = Trace(ids, layout, hash_tokens(inputs, start), runs, start)
    return (trace.without(rng.random(rows) < 0.3) if missing else trace), inputs


def assert_same(found: Trace, wanted: Trace, *, as_sets: bool = False) -> None:
    order = (lambda ids: np.sort(ids, axis=-1)) if as_sets else (lambda ids: ids)
    np.testing.assert_array_equal(order(found.ids), order(wanted.ids))
    assert found.ids.dtype == wanted.ids.dtype
    for name in ("layout", "tokens_hash", "versions", "start"):
        assert getattr(found, name) == getattr(wanted, name)
    masks = [np.ones(trace.rows, bool) if trace.valid is None else trace.valid for trace in (found, wanted)]
    np.testing.assert_array_equal(*masks)
