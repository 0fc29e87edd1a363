"""Cutting and joining traces: nothing is lost, moved or taken on trust."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.errors import TraceError
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace, hash_tokens, join
from tests.unit.routing.routes import assert_same, random_ids, random_trace

LAYOUT = Layout((1, 2, 3, 6), 32, 4)
quick = settings(max_examples=80, deadline=None)
cases = {"seed": st.integers(0, 9999), "rows": st.integers(1, 30), "missing": st.booleans(), "start": st.integers(0, 9)}


@quick
@given(cuts=st.lists(st.integers(0, 30), max_size=4), **cases)
def test_slices_joined_are_the_trace(cuts: list[int], seed: int, rows: int, missing: bool, start: int) -> None:
    trace, inputs = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    parts = [trace.slice(a, b, inputs) for a, b in pairwise(edges)]
    for part, a, b in zip(parts, edges[:-1], edges[1:], strict=True):
        part.check().check_inputs(inputs[a:b])
        assert part.start == start + a
        assert part.ids.base is not None
    assert_same(join(parts), trace)


@quick
@given(a=st.integers(0, 30), b=st.integers(0, 30), **cases)
def test_a_slice_of_a_slice_is_a_slice(a: int, b: int, seed: int, rows: int, missing: bool, start: int) -> None:
    trace, inputs = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    a, b = sorted((min(a, rows), min(b, rows)))
    middle = (a + b) // 2
    outer = trace.slice(a, b, inputs)
    assert_same(outer.slice(middle - a, b - a, inputs[a:b]), trace.slice(middle, b, inputs))
    assert_same(trace.slice(0, rows, inputs), trace)


@quick
@given(names=st.sets(st.sampled_from(LAYOUT.layers)), **cases)
def test_selected_layers_survive_a_record_and_a_second_selection(names: set[int], seed: int, rows: int, missing: bool, start: int) -> None:
    trace, inputs = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    part = trace.select_layers(list(names)).check().check_inputs(inputs)
    assert part.layout.layers == tuple(sorted(names))
    for at, layer in enumerate(part.layout.layers):
        np.testing.assert_array_equal(part.ids[:, at], trace.ids[:, LAYOUT.layers.index(layer)])
    assert_same(part.select_layers(part.layout.layers), part)
    for codec in ("narrow", "packed", "set"):
        assert_same(Trace.from_bytes(part.to_bytes(codec)), part, as_sets=True)


@quick
@given(at=st.integers(0, 30), **cases)
def test_rows_and_layers_can_be_cut_in_either_order(at: int, seed: int, rows: int, missing: bool, start: int) -> None:
    trace, inputs = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    at = min(at, rows)
    assert_same(trace.slice(at, rows, inputs).select_layers([2, 3]), trace.select_layers([3, 2]).slice(at, rows, inputs))


def test_a_pipeline_stages_layers_are_a_view() -> None:
    trace, _ = random_trace(0, 5, LAYOUT)
    assert np.shares_memory(trace.select_layers([2, 3]).ids, trace.ids)


@quick
@given(turns=st.lists(st.integers(1, 8), min_size=1, max_size=5), seed=st.integers(0, 9999))
def test_turns_appended_are_the_conversation(turns: list[int], seed: int) -> None:
    """Every turn delivers the rows after those before it; the sum of hashes proves the tokens of all."""
    tokens = np.random.default_rng(seed).integers(0, 1000, sum(turns) + 1)
    ids = random_ids(seed, sum(turns), 4, 32, 4)
    whole, at = None, 0
    for version, rows in enumerate(turns):
        delta = Trace.of(ids[at : at + rows], LAYOUT, tokens[at : at + rows], [VersionRun(version, 0, rows)], at)
        whole, at = (delta if whole is None else whole.append(delta)), at + rows
    whole.check().check_tokens(tokens)
    np.testing.assert_array_equal(whole.ids, ids)
    assert [run.version for run in whole.versions] == list(range(len(turns)))


def test_runs_of_one_version_become_one() -> None:
    trace, inputs = random_trace(0, 6, LAYOUT)
    one = Trace(trace.ids, LAYOUT, trace.tokens_hash, (VersionRun(4, 0, 6),))
    assert one.slice(0, 2, inputs).append(one.slice(2, 6, inputs)).versions == one.versions


def test_a_resumed_request_that_returns_its_rows_again_is_refused() -> None:
    trace, inputs = random_trace(0, 8, LAYOUT)
    with pytest.raises(TraceError, match="begins at row 3, the trace ends before row 5: 2 rows would come twice.*routed_experts_start_len"):
        trace.slice(0, 5, inputs).append(trace.slice(3, 8, inputs))


def test_a_gap_between_turns_is_refused() -> None:
    trace, inputs = random_trace(0, 8, LAYOUT)
    with pytest.raises(TraceError, match="begins at row 6, the trace ends before row 5: 1 rows are missing"):
        trace.slice(0, 5, inputs).append(trace.slice(6, 8, inputs))


def test_a_delta_of_another_model_is_refused() -> None:
    trace, inputs = random_trace(0, 8, LAYOUT)
    with pytest.raises(TraceError, match="another model"):
        trace.slice(0, 5, inputs).append(trace.slice(5, 8, inputs).select_layers([1, 2]))


def test_joining_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="at least one"):
        join([])


def test_a_slice_needs_the_right_tokens_and_rows() -> None:
    trace, inputs = random_trace(0, 8, LAYOUT)
    with pytest.raises(TraceError, match="other tokens"):
        trace.slice(0, 4, inputs + 1)
    with pytest.raises(TraceError, match="8 input tokens, got 4"):
        trace.slice(0, 4, inputs[:4])
    with pytest.raises(TraceError, match="rows 3..9 do not lie in a trace of 8"):
        trace.slice(3, 9, inputs)


def test_a_slice_does_not_pass_for_the_whole() -> None:
    trace, inputs = random_trace(0, 8, LAYOUT)
    with pytest.raises(TraceError, match="5 rows from row 3 on"):
        trace.slice(3, 8, inputs).check_tokens(inputs[2:])


def test_dense_layers_cannot_be_selected() -> None:
    with pytest.raises(TraceError, match=r"layers \[0, 5\] are not in a trace of MoE layers 1-3, 6.*dense"):
        random_trace(0, 2, LAYOUT)[0].select_layers([0, 1, 5])


# Hashes.


@quick
@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=40), cut=st.integers(0, 40), start=st.integers(0, 9))
def test_hashes_of_parts_add_up(tokens: list[int], cut: int, start: int) -> None:
    cut = min(cut, len(tokens))
    whole = np.array(tokens)
    parts = hash_tokens(whole[:cut], start) + hash_tokens(whole[cut:], start + cut)
    assert parts % 2**64 == hash_tokens(whole, start)


@quick
@given(tokens=st.lists(st.integers(0, 5), min_size=2, max_size=40), i=st.integers(0, 39), j=st.integers(0, 39))
def test_a_changed_swapped_or_moved_token_changes_the_hash(tokens: list[int], i: int, j: int) -> None:
    whole = np.array(tokens)
    i, j = i % len(tokens), j % len(tokens)
    other = whole.copy()
    other[i] += 1
    assert hash_tokens(other) != hash_tokens(whole)
    if whole[i] != whole[j]:
        swapped = whole.copy()
        swapped[[i, j]] = whole[[j, i]]
        assert hash_tokens(swapped) != hash_tokens(whole)
    assert hash_tokens(whole, 1) != hash_tokens(whole)


def test_the_hash_does_not_depend_on_the_integer_type() -> None:
    tokens = np.arange(20)
    assert hash_tokens(tokens.astype(np.int32)) == hash_tokens(tokens.astype(np.uint16)) == hash_tokens(tokens)
    assert hash_tokens(tokens[:0]) == 0


# Rows without routes, padding, arrays.


def test_rows_without_routes_take_no_bytes_and_come_back_missing() -> None:
    trace, _ = random_trace(0, 40, LAYOUT)
    rows = np.zeros(40, bool)
    rows[5:25] = rows[39] = True
    thinned = trace.without(rows).check()
    assert len(trace.to_bytes()) - len(thinned.to_bytes()) > 20 * 16
    back = Trace.from_bytes(thinned.to_bytes("set"))
    assert_same(back, thinned, as_sets=True)
    with pytest.raises(TraceError, match=r"21 of 40 rows have no routes .first: row 5"):
        back.check_complete()
    assert trace.check_complete() is trace


def test_a_missing_row_with_routes_is_refused() -> None:
    trace, _ = random_trace(0, 4, LAYOUT)
    with pytest.raises(TraceError, match="must be zero"):
        Trace(trace.ids, LAYOUT, trace.tokens_hash, trace.versions, 0, np.array([True, True, False, True])).check()
    with pytest.raises(TraceError, match=r"validity is bool\[3\], expected bool\[4\]"):
        Trace(trace.ids, LAYOUT, trace.tokens_hash, trace.versions, 0, np.ones(3, bool)).check()


@quick
@given(more=st.integers(0, 20), **cases)
def test_padding_is_distinct_balanced_and_told_apart(more: int, seed: int, rows: int, missing: bool, start: int) -> None:
    trace, _ = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    ids, recorded = trace.padded(rows + more)
    valid = np.ones(rows, bool) if trace.valid is None else trace.valid
    np.testing.assert_array_equal(recorded, np.concatenate([valid, np.zeros(more, bool)]))
    np.testing.assert_array_equal(ids[recorded], trace.ids[valid])
    assert all(len(set(experts)) == 4 for row in ids for experts in row.tolist())
    counts = np.bincount(ids[~recorded][:, 0].ravel(), minlength=32)
    assert counts.max() <= -(-4 * (rows + more) // 32)
    with pytest.raises(TraceError, match="does not fit"):
        trace.padded(rows - 1)


@pytest.mark.parametrize("experts", [32, 300])
def test_numpy_record_and_torch_share_memory(experts: int) -> None:
    layout = LAYOUT._replace(experts=experts)
    trace, _ = random_trace(0, 5, layout)
    record = trace.to_bytes()
    back = Trace.from_bytes(record)
    assert np.shares_memory(back.ids, np.frombuffer(record, np.uint8))
    assert back.ids.flags.aligned
    tensor = back.to_torch()
    assert tensor.dtype == (torch.uint8 if experts == 32 else torch.uint16)
    assert tensor.data_ptr() == back.ids.ctypes.data
    again = Trace.of(tensor.numpy(), layout, random_trace(0, 5, layout)[1], trace.versions)
    assert again.ids.ctypes.data == back.ids.ctypes.data
    assert_same(again, trace)
