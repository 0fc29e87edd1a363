"""One number for the bytes of a bucket, by which a receiver knows that it got what was sent.

    bucket on CPU   -> xxh3_64 of its bytes
    bucket on CUDA  -> position_sum: sum of word[i] * multiplier[i] over its 32-bit words, plus a multiple of its length, modulo 2^64

each without its highest bit, so that it fits int64. Both ends of a transfer hold their buckets on the same kind of device, so they
compute the same function.

What goes unnoticed. xxh3_64: any damage, with odds of about 2^-63. position_sum: never a single changed word (hence no flipped bit), never
two words that changed places, never zeros that were added or lost at the end, because multipliers are odd and differ in their lower 32
bits. Any other damage with odds of about 2^-63, and worse where all changes are in the high bits of words: 2^-31 if only signs changed.
The multipliers are constants: this guards against mistakes (a stale or overwritten buffer, a swap, a bad bit), not against an adversary.
"""

from collections import deque
from collections.abc import Iterable

import torch
import xxhash

from moerl.errors import ReshardError

_MASK = (1 << 63) - 1
_CHUNK_WORDS = 1 << 20
"""Scratch memory is about six times this many int64: 48 MiB."""
_STEP = -7046029254386353131  # odd; 2^64 / golden ratio, as a signed number
_LENGTH = -4417276706812531889  # odd


def checksum(bucket: torch.Tensor) -> int:
    """Non-negative int64 for the bytes of uint8[n], which must be contiguous. On CUDA it waits for torch's current stream."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ReshardError(f"expected contiguous bytes, got {bucket.dtype}{list(bucket.shape)} with strides {bucket.stride()}")
    if bucket.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(bucket.numpy()) & _MASK
    return position_sum(bucket)


def checksum_behind(writer: Iterable[int], bucket: torch.Tensor) -> int:
    """`checksum` of a bucket that is being written: on a CPU, each part of it while it is still in a cache.

    Args:
        writer: yields the byte up to which the bucket is written; all of it in the end.
    """
    if bucket.device.type != "cpu":
        deque(writer, maxlen=0)
        return checksum(bucket)
    found, content, begin = xxhash.xxh3_64(), bucket.numpy(), 0
    for end in writer:
        found.update(content[begin:end])
        begin = end
    return found.intdigest() & _MASK


def position_sum(bucket: torch.Tensor, chunk_words: int = _CHUNK_WORDS) -> int:
    """What `checksum` is for CUDA, on any device.

    Args:
        bucket: uint8[n], contiguous, starting at a multiple of 4 bytes of its memory; zeros are assumed after its end.
        chunk_words: how many words are worked on at a time; the result does not depend on it.
    """
    nbytes, whole = bucket.numel(), bucket.numel() // 4 * 4
    if bucket.storage_offset() % 4:
        raise ReshardError(f"a bucket starts at a multiple of 4 bytes of its memory, not at byte {bucket.storage_offset()}")
    parts = list(bucket[:whole].view(torch.int32).split(chunk_words)) if whole else []
    if whole < nbytes:
        parts.append(torch.nn.functional.pad(bucket[whole:], (0, 4 - nbytes % 4)).view(torch.int32))
    total = torch.full((), nbytes, dtype=torch.int64, device=bucket.device) * _LENGTH
    first = 0
    for part in parts:
        total += (part.to(torch.int64) * _multipliers(first, part.numel(), bucket.device)).sum()
        first += part.numel()
    return int(total.item()) & _MASK


def _multipliers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """int64[count], for the words from number `first` on. The lower halves are odd and distinct, the upper ones look random."""
    spread = torch.arange(2 * first + 1, 2 * (first + count) + 1, 2, dtype=torch.int64, device=device).mul_(_STEP)
    return spread.bitwise_xor_(((spread >> 31) * spread) << 32)
