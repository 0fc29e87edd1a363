"""Deltas of packed buckets: what is written is the smallest form, comes back bit for bit, and is refused whole if it is damaged."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard import delta
from moerl.reshard.delta import Form, apply, changed_units, encode

UNITS = (1, 2, 4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that small buckets have many chunks."""
    monkeypatch.setitem(delta._CHUNK, "cpu", 64)


def as_bytes(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.uint8).copy())


def buckets(units: int, unit: int, changed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(new, old) random bit patterns of which `changed` units differ, some in a single bit."""
    rng = np.random.default_rng(seed)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]
    old = rng.integers(0, np.iinfo(kind).max, units, dtype=kind, endpoint=True)
    new = old.copy()
    new[rng.choice(units, changed, replace=False)] ^= kind(1) << rng.integers(0, 8 * unit, changed).astype(kind)
    return as_bytes(new), as_bytes(old)


def sent(new: torch.Tensor, old: torch.Tensor, unit: int) -> tuple[delta.Delta, torch.Tensor]:
    """The delta and its payload; what lies behind the payload must not have been written."""
    out = torch.full((len(new) + 5,), 0xA5, dtype=torch.uint8)
    before = new.clone(), old.clone()
    found = encode(new, old, unit, out)
    assert torch.equal(new, before[0])
    assert torch.equal(old, before[1])
    written = found.nbytes if found.kind in (Form.INDICES, Form.BITMAP) else 0
    assert (out[written:] == 0xA5).all()
    return found, new.clone() if found.kind is Form.FULL else out[: found.nbytes].clone()


@st.composite
def cases(draw):
    unit, units = draw(st.sampled_from(UNITS)), draw(st.integers(0, 400))
    share = draw(st.sampled_from([0, 0.01, 0.03, 0.04, 0.3, 0.86, 0.89, 0.93, 0.95, 0.96, 0.98, 1]))
    return unit, *buckets(units, unit, round(share * units), draw(st.integers(0, 2**32)))


@given(cases())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_new_bucket_comes_back_bit_for_bit_and_in_the_fewest_bytes(case):
    unit, new, old = case
    a, b = (t.numpy().view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]) for t in (new, old))
    changed = int((a != b).sum())
    found, payload = sent(new, old, unit)
    sizes = {Form.FULL: len(new), Form.BITMAP: (len(a) + 7) // 8 + changed * unit, Form.INDICES: changed * (4 + unit)}
    assert found.changed == changed == changed_units(new, old, unit)
    assert found.nbytes == len(payload) == (min(sizes.values()) if changed else 0)
    assert found.kind is Form.NOTHING if not changed else sizes[found.kind] == found.nbytes
    base = old.clone()
    apply(payload, found.kind, base, unit)
    assert torch.equal(base, new)
    again, same = sent(new, old, unit)
    assert again == found
    assert torch.equal(same, payload)


def test_the_layouts_are_those_of_the_docstring():
    old = as_bytes(np.zeros(100, np.uint16))
    few, many = np.zeros(100, np.uint16), np.zeros(100, np.uint16)
    few[[3, 70]] = 0x1234, 0xFFFF
    found, payload = sent(as_bytes(few), old, 2)
    assert found == (Form.INDICES, 12, 2)
    assert payload.tolist() == [3, 0, 0, 0, 70, 0, 0, 0, 0x34, 0x12, 0xFF, 0xFF]
    many[[0, 9, 17, 95, 98]] = range(1, 6)
    found, payload = sent(as_bytes(many), old, 2)
    assert found == (Form.BITMAP, 23, 5)
    assert payload.tolist() == [1, 2, 2, *[0] * 8, 0x80, 4, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]


@pytest.mark.parametrize("unit", UNITS)
def test_each_form_wins_at_the_stated_shares(unit):
    units = 2048
    forms = {}
    for changed in range(0, units + 1, 16):
        forms.setdefault(encode(*buckets(units, unit, changed, 1), unit, torch.empty(units * unit, dtype=torch.uint8)).kind, []).append(
            changed / units
        )
    assert forms.pop(Form.NOTHING) == [0]
    assert max(forms[Form.INDICES]) < 1 / 32 <= min(forms[Form.BITMAP])
    assert max(forms[Form.BITMAP]) < 1 - 1 / (8 * unit) <= min(forms[Form.FULL])
    assert max(forms[Form.FULL]) == 1


def test_bit_patterns_are_compared_not_numbers():
    values = torch.tensor([0.0, float("nan"), 1.0, float("inf"), 5.0] * 8)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        old = values.to(dtype)
        new = old.clone()
        new[0] = -0.0
        new.view(bits)[6] ^= 1  # another NaN
        assert new[6].isnan()
        raw = new.view(torch.uint8), old.view(torch.uint8)
        assert changed_units(*raw, dtype.itemsize) == 2, "equal NaNs do not count"
        found, payload = sent(*raw, dtype.itemsize)
        base = old.clone()
        apply(payload, found.kind, base.view(torch.uint8), dtype.itemsize)
        assert torch.equal(base.view(bits), new.view(bits))


def damaged(kind: Form, payload: torch.Tensor, units: int, unit: int):
    """(what is wrong, payload) for everything that a form can have wrong."""
    yield "a byte is missing", payload[:-1]
    yield "a byte too many", torch.cat((payload, payload[:1]))
    if kind is Form.INDICES:
        changed = len(payload) // (4 + unit)
        for name, at, position in [
            ("before the bucket", 0, -1),
            ("behind the bucket", changed - 1, units),
            ("far behind", changed - 1, 2**31 - 1),
            ("repeated", 1, None),
            ("out of order", changed - 1, 0),
        ]:
            bad = payload.clone()
            positions = bad[: 4 * changed].view(torch.int32)
            positions[at] = positions[0].clone() if position is None else position
            yield name, bad
    if kind is Form.BITMAP:
        for name, byte, bit in [("a bit more or less", 0, 1), ("the last bit", (units - 1) // 8, 1 << (units - 1) % 8)]:
            bad = payload.clone()
            bad[byte] ^= bit
            yield name, bad
        if units % 8:
            bad = payload.clone()
            bad[units // 8] |= 0x80
            yield "a bit behind the last unit", bad
            yield "that, and its value", torch.cat((bad, payload[:unit]))


@given(st.sampled_from(UNITS), st.integers(203, 330), st.sampled_from([Form.INDICES, Form.BITMAP, Form.FULL, Form.NOTHING]))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_payload_is_refused_and_nothing_is_written(unit, units, kind):
    changed = {Form.INDICES: 5, Form.BITMAP: units // 2, Form.FULL: units, Form.NOTHING: 0}[kind]
    new, old = buckets(units, unit, changed, units)
    found, payload = sent(new, old, unit)
    assert found.kind is kind
    cases = list(damaged(kind, payload, units, unit)) if len(payload) else [("not empty", new[:1])]
    assert len(cases) >= {Form.INDICES: 7, Form.BITMAP: 4}.get(kind, 1)
    for name, bad in cases:
        base = old.clone()
        with pytest.raises(ReshardError):
            apply(bad, kind, base, unit)
        assert torch.equal(base, old), name


def test_what_is_wrong_is_said():
    new, old = buckets(100, 2, 3, 0)
    found, payload = sent(new, old, 2)
    for kind, bad, words in [
        (Form.INDICES, payload[:-1], "6 bytes per changed unit of 2, got 17 bytes"),
        (Form.BITMAP, payload[:12], "begins with 13 bytes of bits, got 12"),
        (Form.FULL, payload, "for a bucket of 200 bytes has 200 bytes, got 18"),
        (Form.NOTHING, payload, "has 0 bytes, got 18"),
        (7, payload, r"kind: expected one of 0 \(FULL\), 1 \(NOTHING\), 2 \(INDICES\), 3 \(BITMAP\), got 7"),
    ]:
        with pytest.raises(ReshardError, match=words):
            apply(bad, kind, old, 2)
    assert found.kind is Form.INDICES


def test_tensors_that_do_not_fit_are_refused_with_every_reason():
    new, old = buckets(8, 2, 3, 0)
    out = torch.empty(16, dtype=torch.uint8)
    with pytest.raises(ReshardError, match="unit: expected one of 1, 2, 4 bytes, got 3"):
        encode(new, old, 3, out)
    with pytest.raises(ReshardError, match=r"(?s)new: expected whole, aligned units of 4 bytes, got 14.*two buckets of one size"):
        changed_units(new[:14], old, 4)
    with pytest.raises(ReshardError, match="aligned units of 2 bytes, got 14 bytes at address"):
        changed_units(new[1:15], old[1:15], 2)
    with pytest.raises(ReshardError, match=r"new: expected contiguous uint8\[bytes\], got int16"):
        encode(new.view(torch.int16), old, 2, out)
    with pytest.raises(ReshardError, match="out: expected at least 16 bytes on cpu, got 15"):
        encode(new, old, 2, out[:15])
    assert changed_units(new[1:], old[1:], 1) <= 3, "bytes have no alignment"


@pytest.mark.parametrize("changed", [600, 30000, 64000])
def test_scratch_memory_does_not_grow_with_the_bucket(changed, monkeypatch):
    """On CPU, nearly all scratch is numpy's, which tracemalloc sees."""
    monkeypatch.setitem(delta._CHUNK, "cpu", 1024)
    new, old = buckets(1 << 17, 1, changed, 0)
    out = torch.empty(len(new), dtype=torch.uint8)
    tracemalloc.start()
    found = encode(new, old, 1, out)
    apply(new if found.kind is Form.FULL else out[: found.nbytes], found.kind, old, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(old, new)
    assert 1024 < peak < 40 * 1024


@given(st.integers(1, 100), st.integers(0, 2**32))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bits_are_packed_alike_on_every_device(count, seed):
    mask = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, count).astype(bool))
    packed = delta.pack_bits_in_torch(mask)
    assert torch.equal(packed, delta._pack_bits(mask))
    assert torch.equal(delta.unpack_bits_in_torch(packed), delta._unpack_bits(packed))
    assert torch.equal(delta._unpack_bits(packed)[:count], mask)


def test_large_chunks_give_the_same_payload(monkeypatch):
    new, old = buckets(1000, 2, 400, 0)
    small = sent(new, old, 2)
    monkeypatch.undo()
    assert delta._CHUNK["cpu"] > 1000
    large = sent(new, old, 2)
    assert small[0] == large[0]
    assert torch.equal(small[1], large[1])
