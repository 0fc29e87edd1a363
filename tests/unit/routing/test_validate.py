"""Every way in which routes can be wrong has a sentence with its likely reason."""

import re

import numpy as np
import pytest

from moerl.errors import TraceError
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace
from moerl.routing.validate import count_problem, route_problem, shape_problem, version_problem
from tests.unit.routing.routes import random_ids, random_trace

LAYOUT = Layout(tuple(range(3, 61)), 256, 8)
SMALL = Layout((1, 2, 3), 300, 4)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (100 * 61 * 8, None),
        (99 * 61 * 8, "got 99 rows: 1 missing.*cached prefix.*routed_experts_start_len"),
        (101 * 61 * 8, "got 101 rows: 1 too many; the last sampled token was never an input"),
        (150 * 61 * 8, "got 150 rows: 50 too many; is routed_experts_start_len ignored"),
        (0, "got 0 rows: nothing was recorded; was the request aborted"),
        (100 * 58 * 8, "100 rows of 58 layers: the dense layers were left out"),
        (100 * 48 * 8, "100 rows of 48 layers x top-8: the engine serves a model of other depth"),
        (100 * 61 * 6, "100 rows of 61 layers x top-6: the engine serves a model of other top-k"),
        (100 * 61 * 8 - 1, "no whole number of rows"),
    ],
)
def test_another_number_of_ids_than_expected(count: int, message: str | None) -> None:
    found = count_problem(count, rows=100, layers=61, layout=LAYOUT)
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("expected 100 rows of routes (prompt + response - 1) of 61 layers x top-8, got ")
        assert re.search(message, found), found


def test_a_count_with_two_readings_names_both() -> None:
    found = count_problem(6 * 2 * 2, rows=6, layers=3, layout=Layout((1, 2), 8, 2))
    assert "got 4 rows: 2 missing" in found
    assert "or got 6 rows of 2 layers: the dense layers were left out" in found


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 4, 4), "4 layers came: are dense layers included"),
        ((5, 3, 6), "top-6 came"),
        ((5, 12), r"shape \(5, 12\), expected \[row, moe_layer, k\] = \(5, 3, 4\)"),
    ],
)
def test_another_shape(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace(np.zeros(shape, np.uint16), SMALL, 0, (VersionRun(0, 0, 5),)).check()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ((3, 1), [9, 299, 9, 1], r"distinct, got \[9, 299, 9, 1\] at row 3, layer 2; were rows of two requests mixed"),
        ((3, 1, 2), 300, r"0\.\.299, got .*row 3, layer 2"),
        ((slice(None), 1), 0, "all rows of layers 2 are zero.*pipeline-parallel"),
        ((slice(None),), 0, "all 6 rows of all layers are zero: the engine recorded nothing"),
        ((slice(4, 6),), 0, "2 rows are all zero .first: row 4, the last ones.*padded"),
        ((2,), 0, "1 rows are all zero .first: row 2.: routes of these tokens were lost"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_wrong_experts(at: tuple, value: object, message: str, dtype: type) -> None:
    ids = random_ids(0, 6, 3, 300, 4, dtype=dtype)
    ids[at] = value
    found = route_problem(ids, SMALL)
    assert found is not None
    assert re.search(message, found), found


def test_rows_are_called_by_their_place_in_the_sequence() -> None:
    trace, _ = random_trace(0, 6, SMALL, start=40)
    ids = trace.ids.copy()
    ids[3, 1] = [9, 9, 1, 2]
    with pytest.raises(TraceError, match="row 43, layer 2"):
        Trace(ids, SMALL, trace.tokens_hash, trace.versions, 40).check()
    thin = Trace(ids, SMALL, trace.tokens_hash, trace.versions, 40).without(np.arange(6) < 2)
    with pytest.raises(TraceError, match="row 43, layer 2"):
        thin.check()
    thin.without(np.arange(6) == 3).check()


def test_experts_beyond_256_never_wrap() -> None:
    """299 is 43 in a byte: neither narrowing nor a narrow array of a wide model passes."""
    ids = random_ids(0, 6, 3, 300, 4, dtype=np.int64)
    ids[5, 2] = [299, 256, 0, 255]
    inputs = np.arange(6)
    trace = Trace.of(ids, SMALL, inputs, [VersionRun(0, 0, 6)])
    assert trace.ids.dtype == np.uint16
    for codec in ("narrow", "packed", "set"):
        assert set(Trace.from_bytes(trace.to_bytes(codec)).ids[5, 2].tolist()) == {299, 256, 0, 255}
    with pytest.raises(TraceError, match=r"0\.\.255, got 0\.\.299"):
        Trace.of(ids, SMALL._replace(experts=256), inputs, [VersionRun(0, 0, 6)])
    with pytest.raises(TraceError, match="uint8, expected uint16 for 300 experts"):
        Trace(ids.astype(np.uint8), SMALL, trace.tokens_hash, trace.versions).check()


def test_negative_experts_do_not_wrap_either() -> None:
    ids = random_ids(0, 6, 3, 300, 4, dtype=np.int32)
    ids[5, 2, 0] = -1
    with pytest.raises(TraceError, match=r"0\.\.299, got -1"):
        Trace.of(ids, SMALL, np.arange(6), [VersionRun(0, 0, 6)])


def test_mixed_versions_where_one_is_promised() -> None:
    trace, _ = random_trace(0, 6, SMALL)
    mixed = Trace(trace.ids, SMALL, trace.tokens_hash, (VersionRun(4, 0, 2), VersionRun(5, 2, 6)), start=0)
    with pytest.raises(TraceError, match="promised from weight version 4, but rows 2..6 .1 of 2 runs. come from version 5.*an update"):
        mixed.check().check_version(4)
    one = Trace(trace.ids, SMALL, trace.tokens_hash, (VersionRun(4, 0, 6),))
    assert one.check_version(4) is one


def test_as_many_input_tokens_as_rows() -> None:
    with pytest.raises(TraceError, match="6 rows of routes belong to 6 input tokens, got 7"):
        Trace.of(random_ids(0, 6, 3, 300, 4), SMALL, np.arange(7), [VersionRun(0, 0, 6)])


@pytest.mark.parametrize("runs", [[(0, 0, 2), (0, 3, 6)], [(0, 0, 4), (0, 2, 6)], [(0, 0, 7)], [(0, 0, 0), (0, 0, 6)], [(0, 1, 6)], []])
def test_version_runs_cover_every_row_once(runs: list[tuple[int, int, int]]) -> None:
    assert "do not cover rows 0..6 once" in version_problem(tuple(VersionRun(*run) for run in runs), 6)


def test_right_routes_have_no_problem() -> None:
    ids = random_ids(0, 6, 3, 300, 4)
    assert route_problem(ids, SMALL) is None
    assert shape_problem(ids, SMALL) is None
    assert version_problem((VersionRun(1, 0, 2), VersionRun(2, 2, 6)), 6) is None
    assert route_problem(np.zeros((4, 1, 1), np.uint8), Layout((0,), 8, 1)) is None
