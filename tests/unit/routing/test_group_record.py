"""A group's record holds the prompt once, and gives every trace back."""

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.errors import TraceError
from moerl.routing.codec import Codec
from moerl.routing.group import MAGIC, codec_of, pack_group, unpack_group
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace, hash_tokens
from tests.unit.routing.routes import assert_same, random_ids

LAYOUT = Layout((1, 2, 5), 64, 4)
quick = settings(max_examples=80, deadline=None)
CODECS = st.sampled_from([Codec("narrow"), Codec("packed"), Codec("set"), Codec("set", True), Codec("set", False, 8, 4)])


def make_group(seed: int, prompt: int, responses: list[int], *, ties: int = 0, missing: float = 0.0, start: int = 0) -> list[Trace]:
    """Traces with the same prompt rows, `ties` of which fell otherwise in one sample each."""
    rng = np.random.default_rng(seed)
    shared, tokens = random_ids(seed, prompt, 3, 64, 4), rng.integers(0, 999, prompt)
    traces = []
    for index, size in enumerate(responses):
        ids = np.concatenate([shared, random_ids(seed + 1 + index, size, 3, 64, 4)])
        inputs = np.concatenate([tokens, rng.integers(0, 999, size)])
        for row in rng.integers(0, max(prompt, 1), ties if prompt else 0):
            ids[row] = random_ids(seed + 77 + int(row), 1, 3, 64, 4)[0]
        runs = tuple(run for run in (VersionRun(1, 0, prompt), VersionRun(2, prompt, prompt + size)) if run.stop > run.start)
        trace = Trace(ids, LAYOUT, hash_tokens(inputs, start), runs, start)
        traces.append(trace.without(rng.random(prompt + size) < missing) if missing else trace)
    return traces


@quick
@given(
    seed=st.integers(0, 9999),
    prompt=st.integers(0, 12),
    responses=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    ties=st.integers(0, 3),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    said=st.integers(0, 20),
    codec=CODECS,
)
def test_unpacking_gives_every_trace_back(
    seed: int, prompt: int, responses: list[int], ties: int, missing: float, said: int, codec: Codec
) -> None:
    traces = make_group(seed, prompt, responses, ties=ties, missing=missing, start=seed % 3)
    record = pack_group(traces, said, codec)
    assert codec_of(record).name == codec.name
    found = unpack_group(record)
    for back, trace in zip(found, traces, strict=True):
        assert_same(back, trace, as_sets=codec.name == "set" and not codec.keep_order)
        back.check()


def test_the_prompt_is_stored_once() -> None:
    traces = make_group(0, 500, [10] * 8)
    row = 3 * 4
    record = pack_group(traces, 500)
    assert len(record) < (500 + 8 * 10) * row + 1000
    assert len(record) < sum(len(trace.to_bytes()) for trace in traces) / 5


def test_a_row_that_differs_costs_one_row() -> None:
    traces = make_group(0, 500, [10] * 8)
    same = len(pack_group(traces, 500))
    ids = traces[3].ids.copy()
    ids[250] = ids[250, :, ::-1]
    traces[3] = Trace(ids, LAYOUT, traces[3].tokens_hash, traces[3].versions)
    record = pack_group(traces, 500)
    assert same < len(record) < same + 3 * 4 + 16
    assert_same(unpack_group(record)[3], traces[3])


@quick
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), codec=CODECS)
def test_every_flipped_bit_is_noticed(position: int, bit: int, codec: Codec) -> None:
    record = bytearray(pack_group(make_group(0, 4, [2, 3], missing=0.2), 4, codec))
    record[position % len(record)] ^= 1 << bit
    with pytest.raises(TraceError):
        unpack_group(bytes(record))


@quick
@given(size=st.integers(0, 10_000), body=st.binary(max_size=200))
def test_truncations_and_any_bytes_are_refused(size: int, body: bytes) -> None:
    record = pack_group(make_group(0, 4, [2, 3]), 4)
    with pytest.raises(TraceError):
        unpack_group(record[: size % len(record)])
    with pytest.raises(TraceError):
        unpack_group(MAGIC + body + xxhash.xxh3_64_digest(MAGIC + body))


INTEGERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**16, 2**24, 2**40, 2**63, 2**64 - 1]))
RUNS = st.lists(st.tuples(INTEGERS, INTEGERS), max_size=2)
PART = st.tuples(INTEGERS, INTEGERS, RUNS, RUNS, INTEGERS, st.lists(st.tuples(INTEGERS, INTEGERS, INTEGERS), max_size=2))
FIELDS = {"layers": st.lists(INTEGERS, max_size=4), "experts": INTEGERS, "topk": INTEGERS, "common": INTEGERS, "common_missing": RUNS}
FIELDS["samples"] = st.lists(PART, max_size=3)


@settings(max_examples=300, deadline=None)
@given(change=st.fixed_dictionaries({}, optional=FIELDS))
def test_a_forged_header_gives_valid_traces_or_a_trace_error(change: dict[str, object]) -> None:
    record = pack_group(make_group(0, 4, [2, 3], missing=0.2), 4)
    start = len(MAGIC) + 4
    size = int.from_bytes(record[len(MAGIC) : start], "little")
    header = msgspec.msgpack.encode(msgspec.msgpack.decode(record[start : start + size]) | change)
    body = MAGIC + len(header).to_bytes(4, "little") + header
    body += bytes(-len(body) % 8) + record[start + size + -(start + size) % 8 : -8]
    try:
        traces = unpack_group(body + xxhash.xxh3_64_digest(body))
    except TraceError:
        return
    for trace in traces:
        trace.check()


def test_groups_need_traces_of_one_model() -> None:
    traces = make_group(0, 4, [2, 3])
    with pytest.raises(TraceError, match="at least one"):
        pack_group([], 4)
    with pytest.raises(TraceError, match="another model"):
        pack_group([traces[0], traces[1].select_layers([1])], 4)


def test_a_trace_record_is_no_group_record() -> None:
    trace = make_group(0, 4, [2])[0]
    with pytest.raises(TraceError, match="not a group record"):
        unpack_group(trace.to_bytes())
    assert codec_of(trace.to_bytes("packed")) == Codec("packed")
