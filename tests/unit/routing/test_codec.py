"""Codecs: lossless as sets, in slot order where promised, the same bytes compiled and in numpy, damage always noticed."""

import math
from itertools import combinations

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.errors import TraceError
from moerl.routing import codec as codecs
from moerl.routing import native, packing
from moerl.routing.codec import Codec
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.space import id_space, set_space
from moerl.routing.trace import MAGIC, Trace, hash_tokens
from tests.unit.routing.routes import assert_same, random_ids, random_trace

compiled = pytest.mark.skipif(bool(native.problem()), reason=f"the compiled codecs cannot be used: {native.problem()}")
quick = settings(max_examples=60, deadline=None)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    """Models with and without a group limit, from one expert to 1024, up to top-12."""
    if draw(st.booleans()):
        groups = draw(st.sampled_from([2, 4, 8, 16]))
        size = draw(st.integers(1, 1024 // groups))
        used = draw(st.integers(1, groups))
        return {"experts": groups * size, "topk": draw(st.integers(1, min(12, used * size))), "groups": groups, "group_topk": used}
    experts = draw(st.sampled_from([1, 2, 3, 8, 64, 128, 200, 256, 257, 384, 512, 1000, 1024]))
    return {"experts": experts, "topk": draw(st.integers(1, min(12, experts))), "groups": 0, "group_topk": 0}


rows_and_layers = {"rows": st.integers(0, 7), "layers": st.integers(0, 20), "seed": st.integers(0, 2**32 - 1)}


@quick
@given(shape=shapes(), name=st.sampled_from(["narrow", "packed", "set"]), keep=st.booleans(), **rows_and_layers)
def test_every_codec_gives_the_same_sets_back(shape: dict[str, int], name: str, keep: bool, rows: int, layers: int, seed: int) -> None:
    ids = random_ids(seed, rows, layers, **shape)
    codec = Codec(name, keep, shape["groups"], shape["group_topk"]) if name == "set" else Codec(name)
    data, used = codecs.encode(ids, shape["experts"], codec)
    assert used == codec
    assert data.nbytes == rows * codecs.row_bytes(shape["experts"], shape["topk"], layers, codec)
    found = codecs.decode(data, shape["experts"], shape["topk"], layers, used)
    assert found.dtype == ids.dtype
    wanted = ids if keep or name != "set" else np.sort(ids, axis=-1)
    np.testing.assert_array_equal(found, wanted)


@compiled
@quick
@given(shape=shapes(), keep=st.booleans(), **rows_and_layers)
def test_compiled_and_numpy_write_the_same_bytes(shape: dict[str, int], keep: bool, rows: int, layers: int, seed: int) -> None:
    assume(rows * layers)
    ids = random_ids(seed, rows, layers, **shape)
    space = set_space(*shape.values(), keep)
    (a, _), (b, _) = native.encode_sets(ids, space), packing.encode_sets(ids, space)
    np.testing.assert_array_equal(a, b)
    (a, _), (b, _) = native.decode_sets(a, space, layers, ids.dtype), packing.decode_sets(a, space, layers, ids.dtype)
    np.testing.assert_array_equal(a, b)
    plain = id_space(shape["experts"], shape["topk"])
    packed = native.pack_ids(ids, plain)
    np.testing.assert_array_equal(packed, packing.pack_ids(ids, plain))
    np.testing.assert_array_equal(native.unpack_ids(packed, plain, layers, ids.dtype), packing.unpack_ids(packed, plain, layers, ids.dtype))


@compiled
@quick
@given(shape=shapes(), keep=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_compiled_and_numpy_agree_on_any_bits_and_any_ids(shape: dict[str, int], keep: bool, seed: int) -> None:
    rng, layers = np.random.default_rng(seed), 5
    space = set_space(*shape.values(), keep)
    dtype = np.dtype(np.uint8 if shape["experts"] <= 256 else np.uint16)
    data = rng.integers(0, 256, (6, space.row_bytes(layers)), np.uint8)
    (a, bad_a), (b, bad_b) = native.decode_sets(data, space, layers, dtype), packing.decode_sets(data, space, layers, dtype)
    assert bad_a == bad_b
    if bad_a < 0:
        np.testing.assert_array_equal(a, b)
        assert native.first_bad(a.reshape(-1, shape["topk"]), shape["experts"]) == -1
    ids = rng.integers(0, min(shape["experts"] + 2, np.iinfo(dtype).max + 1), (6, layers, shape["topk"])).astype(dtype)
    assert native.encode_sets(ids, space)[1] == packing.encode_sets(ids, space)[1]
    flat = ids.reshape(-1, shape["topk"])
    assert native.first_bad(flat, shape["experts"]) == packing.first_bad(flat, shape["experts"])


@pytest.mark.parametrize("engine", [packing, pytest.param(native, marks=compiled)], ids=["numpy", "compiled"])
@pytest.mark.parametrize(("experts", "topk", "groups", "used"), [(7, 3, 0, 0), (8, 3, 4, 2), (9, 2, 3, 1), (6, 6, 0, 0)])
def test_ranks_number_all_reachable_sets(engine, experts: int, topk: int, groups: int, used: int) -> None:
    """Every set has a rank of its own below the total, against a plain enumeration."""
    size = experts // groups if groups else experts
    sets = [s for s in combinations(range(experts), topk) if not groups or len({e // size for e in s}) <= used]
    space = set_space(experts, topk, groups, used)
    data, bad = engine.encode_sets(np.array(sets, np.uint8)[:, None], space)
    ranks = [int.from_bytes(bytes(row), "little") for row in data]
    assert bad == -1
    assert len(set(ranks)) == len(sets)
    assert max(ranks) < space.total
    if not groups:
        by_hand = [sum(math.comb(c, i + 1) for i, c in enumerate(s)) for s in sets]
        assert ranks == by_hand
    found, bad = engine.decode_sets(data, space, 1, np.dtype(np.uint8))
    assert bad == -1
    assert [tuple(row[0]) for row in found.tolist()] == sets


@pytest.mark.parametrize("engine", [packing, pytest.param(native, marks=compiled)], ids=["numpy", "compiled"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_value_that_stands_for_no_set_is_a_fault(engine, keep: bool) -> None:
    space = set_space(256, 8, 0, 0, keep)
    data = np.zeros((2, space.row_bytes(3)), np.uint8)
    assert engine.decode_sets(data, space, 3, np.dtype(np.uint8))[1] == -1
    row = ((space.total if not keep else space.orders << space.set_bits) << space.bits).to_bytes(space.row_bytes(3), "little")
    data[1] = np.frombuffer(row, np.uint8)
    assert engine.decode_sets(data, space, 3, np.dtype(np.uint8))[1] == 1 * 3 + 1


@pytest.mark.parametrize(
    ("experts", "topk", "layers", "codec", "most"),
    [
        (256, 8, 58, Codec("narrow"), 464),
        (256, 8, 58, Codec("set"), 360),
        (256, 8, 58, Codec("set", False, 8, 4), 341),
        (384, 8, 60, Codec("set"), 410),
        (384, 8, 60, Codec("packed"), 540),
        (512, 10, 48, Codec("set"), 414),
    ],
)
def test_bytes_per_token(experts: int, topk: int, layers: int, codec: Codec, most: int) -> None:
    assert codecs.row_bytes(experts, topk, layers, codec) <= most


def test_a_row_beyond_the_group_limit_is_kept_and_the_record_says_so() -> None:
    ids = random_ids(1, 4, 3, 64, 4, 8, 2)
    limited = Codec("set", False, 8, 2)
    ids[2, 1] = [0, 9, 17, 60]
    data, used = codecs.encode(ids, 64, limited)
    assert used == Codec("set")
    np.testing.assert_array_equal(codecs.decode(data, 64, 4, 3, used), np.sort(ids, axis=-1))


@pytest.mark.parametrize("bad", [[5, 5, 1, 2], [1, 2, 3, 64]])
def test_the_set_codec_refuses_what_is_no_set(bad: list[int]) -> None:
    ids = random_ids(1, 4, 3, 64, 4)
    ids[3, 2] = bad
    with pytest.raises(TraceError, match=rf"distinct experts below 64, got \[{bad[0]}, .*row 3, layer 2"):
        codecs.encode(ids, 64, Codec("set"))


@pytest.mark.parametrize(
    ("experts", "topk", "codec", "message"),
    [
        (4096, 12, Codec("set", True), "at most 128 bits.*in order.*use 'packed'"),
        (64, 21, Codec("set"), "at most top-20.*use 'packed'"),
        (60, 4, Codec("set", False, 8, 4), "4 of 8 groups does not fit 60 experts"),
        (64, 4, Codec("zip"), "unknown codec 'zip'; expected one of narrow, packed, set"),
    ],
)
def test_a_codec_that_cannot_hold_a_model_says_why(experts: int, topk: int, codec: Codec, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        codecs.row_bytes(experts, topk, 2, codec)


@pytest.mark.parametrize("name", ["narrow", "packed", "set"])
def test_records_work_without_the_compiled_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = random_trace(3, 9, Layout((1, 2, 5), 384, 8))
    before = trace.to_bytes(name, keep_order=True)
    monkeypatch.setattr(native, "problem", lambda: "no compiler")
    assert trace.to_bytes(name, keep_order=True) == before
    assert_same(Trace.from_bytes(before), trace)


# Records: whole, damaged, forged.

LAYOUT = Layout((1, 2, 5), 300, 4)
CODECS = st.sampled_from([Codec("narrow"), Codec("packed"), Codec("set"), Codec("set", True), Codec("set", False, 4, 3)])


@quick
@given(seed=st.integers(0, 999), rows=st.integers(0, 30), codec=CODECS, missing=st.booleans(), start=st.integers(0, 50))
def test_a_record_of_any_codec_survives(seed: int, rows: int, codec: Codec, missing: bool, start: int) -> None:
    trace, inputs = random_trace(seed, rows, LAYOUT, missing=missing, start=start)
    back = Trace.from_bytes(trace.to_bytes(codec)).check_inputs(inputs)
    assert_same(back, trace, as_sets=codec.name == "set" and not codec.keep_order)


@quick
@given(codec=CODECS, position=st.integers(0, 10_000), bit=st.integers(0, 7), missing=st.booleans())
def test_every_flipped_bit_is_noticed(codec: Codec, position: int, bit: int, missing: bool) -> None:
    record = bytearray(random_trace(1, 6, LAYOUT, missing=missing)[0].to_bytes(codec))
    record[position % len(record)] ^= 1 << bit
    with pytest.raises(TraceError):
        Trace.from_bytes(bytes(record))


@quick
@given(codec=CODECS, size=st.integers(0, 10_000))
def test_every_truncation_is_noticed(codec: Codec, size: int) -> None:
    record = random_trace(1, 6, LAYOUT)[0].to_bytes(codec)
    with pytest.raises(TraceError):
        Trace.from_bytes(record[: size % len(record)])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_with_a_trace_error(body: bytes, dressed: bool) -> None:
    body = MAGIC + body if dressed else body
    with pytest.raises(TraceError):
        Trace.from_bytes(body + xxhash.xxh3_64_digest(body))


def forge(record: bytes, **change: object) -> bytes:
    """The record with other fields in its header, and a checksum that fits."""
    start = len(MAGIC) + 4
    size = int.from_bytes(record[len(MAGIC) : start], "little")
    rows = record[start + size + -(start + size) % 8 : -8]
    header = msgspec.msgpack.encode(msgspec.msgpack.decode(record[start : start + size]) | change)
    body = MAGIC + len(header).to_bytes(4, "little") + header
    body += bytes(-len(body) % 8) + rows
    return body + xxhash.xxh3_64_digest(body)


def test_a_forgery_without_change_is_the_record() -> None:
    record = random_trace(1, 6, LAYOUT)[0].to_bytes("set")
    assert forge(record) == record


INTEGERS = st.one_of(st.integers(-3, 12), st.sampled_from([256, 300, 2**16, 2**31, 2**40, 2**63, 2**64 - 1, -(2**63)]))
RUNS = st.lists(st.tuples(INTEGERS, INTEGERS), max_size=3)
FIELDS = {
    "layers": st.lists(INTEGERS, max_size=5),
    "experts": INTEGERS,
    "topk": INTEGERS,
    "start": INTEGERS,
    "rows": INTEGERS,
    "missing": RUNS,
    "tokens_hash": INTEGERS,
    "versions": st.lists(st.tuples(INTEGERS, INTEGERS, INTEGERS), max_size=3),
    "codec": st.tuples(st.sampled_from(["narrow", "packed", "set", "zip"]), st.booleans(), INTEGERS, INTEGERS),
}


@settings(max_examples=400, deadline=None)
@given(codec=CODECS, change=st.fixed_dictionaries({}, optional=FIELDS))
def test_a_forged_header_gives_a_valid_trace_or_a_trace_error(codec: Codec, change: dict[str, object]) -> None:
    record = forge(random_trace(1, 6, LAYOUT, missing=True)[0].to_bytes(codec), **change)
    try:
        trace = Trace.from_bytes(record)
    except TraceError:
        return
    trace.check()
    assert trace.ids.nbytes < 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 2**40, "missing": [(0, 2**40 - 6)], "versions": []}, "at most 16777216 rows"),
        ({"rows": 2**24, "missing": [(0, 2**24 - 6)], "layers": list(range(1000)), "versions": []}, "bytes in memory"),
        ({"rows": 7}, "holds 144 bytes of routes, but its header says 7 rows of 24 .narrow."),
        ({"missing": [(0, 2), (2, 3)]}, "expected runs in order, apart"),
        ({"experts": 2**16 + 1}, "describes no model"),
        ({"layers": [1, 2, 2]}, "describes no model"),
        ({"experts": 200}, "holds 144 bytes of routes, but its header says 6 rows of 12"),
    ],
)
def test_forged_sizes_are_bounded_before_anything_is_allocated(change: dict[str, object], message: str) -> None:
    record = random_trace(1, 6, LAYOUT)[0].to_bytes()
    with pytest.raises(TraceError, match=message):
        Trace.from_bytes(forge(record, **change))


def test_a_forged_duplicate_is_found_in_codecs_that_can_hold_one() -> None:
    trace, inputs = random_trace(1, 6, LAYOUT)
    ids = trace.ids.copy()
    ids[4, 1] = [7, 9, 9, 1]
    broken = Trace(ids, LAYOUT, hash_tokens(inputs), (VersionRun(0, 0, 6),))
    for name in ("narrow", "packed"):
        with pytest.raises(TraceError, match=r"distinct, got \[7, 9, 9, 1\] at row 4, layer 2"):
            Trace.from_bytes(broken.to_bytes(name))
