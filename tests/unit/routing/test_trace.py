"""A trace proves what it belongs to; anything that doesn't fit is an error with its cause."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import TraceError
from moerl.routing.trace import Layout, Trace, VersionRun, hash_tokens


def random_ids(rng: np.random.Generator, rows: int, layout: Layout) -> np.ndarray:
    scores = rng.random((rows, len(layout.layers), layout.experts))
    return scores.argsort(axis=-1)[..., : layout.topk].astype(layout.dtype)


def make(rows: int = 5, experts: int = 16, topk: int = 4, layers: tuple[int, ...] = (1, 2, 3), seed: int = 0) -> tuple[Trace, np.ndarray]:
    layout = Layout(layers, experts, topk)
    tokens = np.arange(rows + 1)
    ids = random_ids(np.random.default_rng(seed), rows, layout)
    return Trace(ids, layout, hash_tokens(tokens[:-1]), (VersionRun(3, 0, rows),)), tokens


@given(rows=st.integers(1, 40), experts=st.sampled_from([2, 16, 256, 257, 384]), seed=st.integers(0, 99))
def test_a_record_survives_the_round_trip(rows: int, experts: int, seed: int) -> None:
    trace, tokens = make(rows, experts, min(2, experts), seed=seed)
    back = Trace.from_bytes(trace.to_bytes()).check_tokens(tokens)
    assert back.ids.dtype == (np.uint8 if experts <= 256 else np.uint16)
    np.testing.assert_array_equal(back.ids, trace.ids)
    assert (back.layout, back.tokens_hash, back.versions) == (trace.layout, trace.tokens_hash, trace.versions)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    record = bytearray(make()[0].to_bytes())
    record[position % len(record)] ^= 1 << bit
    with pytest.raises(TraceError):
        Trace.from_bytes(bytes(record))


@given(size=st.integers(0, 400))
def test_a_record_cut_short_is_refused(size: int) -> None:
    record = make()[0].to_bytes()
    with pytest.raises(TraceError):
        Trace.from_bytes(record[: min(size, len(record) - 1)])


def test_other_tokens_are_refused() -> None:
    trace, tokens = make()
    with pytest.raises(TraceError, match="belongs to other tokens"):
        trace.check_tokens(tokens[::-1])
    with pytest.raises(TraceError, match="belongs to 6 tokens, got 7"):
        trace.check_tokens(np.arange(7))


def test_another_model_is_refused() -> None:
    trace, _ = make()
    with pytest.raises(TraceError, match="MoE layers 1-3, 16 experts, top-4.*this model has MoE layers 1-4"):
        trace.check_layout(Layout((1, 2, 3, 4), 16, 4))


def changed(**edit: object) -> Trace:
    trace, _ = make()
    ids = trace.ids.copy()
    if "at" in edit:
        ids[edit["at"]] = edit["value"]
    versions = edit.get("versions", trace.versions)
    return Trace(ids, trace.layout, trace.tokens_hash, versions)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (changed(at=(2, 1), value=[3, 3, 1, 2]), r"distinct, got \[3, 3, 1, 2\] at row 2, layer 2"),
        (changed(at=(2, 1, 0), value=16), "must lie in 0..15"),
        (changed(at=(slice(None), slice(1, 3)), value=0), "all rows of layers 2-3 are zero: .*pipeline"),
        (changed(at=slice(3, 5), value=0), "2 rows are all zero .first: row 3"),
        (changed(versions=(VersionRun(1, 0, 2), VersionRun(2, 3, 5))), "do not cover rows 0..5"),
        (changed(versions=()), "do not cover rows"),
    ],
)
def test_a_broken_invariant_names_its_cause(trace: Trace, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace.check()


def test_a_wrong_shape_is_refused() -> None:
    trace, _ = make()
    with pytest.raises(TraceError, match="shape"):
        Trace(trace.ids[:, :2], trace.layout, trace.tokens_hash, trace.versions).check()
    with pytest.raises(TraceError, match="uint8"):
        Trace(trace.ids.astype(np.int32), trace.layout, trace.tokens_hash, trace.versions).check()
