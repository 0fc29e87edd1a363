"""The checksums of buckets: against definitions in plain integers, and what they must never miss."""

import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard.checksum import _LENGTH, _STEP, checksum, checksum_behind, position_sum

MASK = (1 << 63) - 1


def bucket_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def reference(content: bytes) -> int:
    """`position_sum` in integers without a limit."""
    total = len(content) * _LENGTH
    for number, at in enumerate(range(0, len(content), 4)):
        spread = (2 * number + 1) * _STEP
        spread = (spread + (1 << 63)) % (1 << 64) - (1 << 63)
        multiplier = spread ^ (((spread >> 31) * spread) << 32)
        total += int.from_bytes(content[at : at + 4].ljust(4, b"\0"), "little", signed=True) * multiplier
    return total & MASK


@given(st.binary(max_size=64))
@example(b"\xff" * 64)
@example(b"\x00\x00\x00\x80" * 16)
def test_sums_are_as_defined(content: bytes) -> None:
    assert position_sum(bucket_of(content)) == reference(content)
    assert checksum(bucket_of(content)) == xxhash.xxh3_64_intdigest(content) & MASK


@given(st.binary(max_size=200), st.integers(1, 70))
def test_chunks_do_not_show(content: bytes, chunk_words: int) -> None:
    assert position_sum(bucket_of(content), chunk_words) == position_sum(bucket_of(content))


def test_large_buckets_are_summed_in_chunks() -> None:
    bucket = torch.randint(0, 256, ((4 << 20) + 4099,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = position_sum(bucket)
    assert found == position_sum(bucket, 1 << 23)
    bucket[-1] ^= 1
    assert found != position_sum(bucket)


@pytest.mark.parametrize("function", [checksum, position_sum])
class TestNothingIsMissed:
    @given(content=st.binary(min_size=1, max_size=64), at=st.integers(min_value=0))
    def test_a_flipped_bit(self, function, content: bytes, at: int) -> None:
        bucket = bucket_of(content)
        before = function(bucket)
        bucket[at // 8 % len(content)] ^= 1 << at % 8
        assert function(bucket) != before

    @given(words=st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=40, unique=True), data=st.data())
    def test_two_words_that_changed_places(self, function, words: list[int], data) -> None:
        i, j = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
        swapped = list(words)
        swapped[i], swapped[j] = words[j], words[i]
        before, after = (b"".join(word.to_bytes(4, "little") for word in order) for order in (words, swapped))
        assert function(bucket_of(before)) != function(bucket_of(after))

    @given(content=st.binary(max_size=64), zeros=st.integers(1, 9))
    def test_zeros_at_the_end(self, function, content: bytes, zeros: int) -> None:
        assert function(bucket_of(content)) != function(bucket_of(content + bytes(zeros)))

    @given(content=st.binary(max_size=64))
    def test_it_fits_a_header(self, function, content: bytes) -> None:
        assert 0 <= function(bucket_of(content)) <= MASK


def test_every_bit_of_every_word_counts() -> None:
    content = bytearray(b"\xa5\x00\xff\x5a" * 16)
    found = {position_sum(bucket_of(bytes(content)))}
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        found.add(position_sum(bucket_of(bytes(content))))
        content[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * len(content)


@given(st.binary(max_size=4000), st.lists(st.integers(0, 4000), max_size=6))
def test_a_bucket_that_is_being_written(content: bytes, cuts: list[int]) -> None:
    bucket, written = torch.zeros(len(content), dtype=torch.uint8), bucket_of(content)

    def write():
        for end in sorted({min(cut, len(content)) for cut in cuts} | {len(content)}):
            bucket[:end] = written[:end]
            yield end

    assert checksum_behind(write(), bucket) == checksum(written)


def test_a_bucket_is_not_copied_on_a_cpu() -> None:
    bucket = torch.zeros(1000, dtype=torch.uint8)
    assert bucket.numpy().ctypes.data == bucket.data_ptr()
    assert checksum(bucket[128:900]) == xxhash.xxh3_64_intdigest(bytes(772)) & MASK


@pytest.mark.parametrize(
    "bucket",
    [torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]],
    ids=["dtype", "shape", "strides"],
)
def test_other_tensors_are_refused(bucket: torch.Tensor) -> None:
    with pytest.raises(ReshardError, match="contiguous bytes"):
        checksum(bucket)


def test_an_odd_start_is_refused_by_the_sum_only() -> None:
    bucket = torch.zeros(9, dtype=torch.uint8)[1:]
    assert checksum(bucket) == checksum(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ReshardError, match="multiple of 4"):
        position_sum(bucket)
