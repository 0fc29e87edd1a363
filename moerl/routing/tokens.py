"""Which tokens routes belong to: a hash that can be cut and joined.

`hash_tokens` adds one 64-bit hash of (token, its place in the sequence) per row, modulo 2**64. So the hash of any rows of a
sequence is the sum of the hashes of the parts they are put together from, in whatever pieces it was cut, sent and joined, and
the hash of what is left is the difference. A piece at another place, or of other tokens, has another hash, except with a chance
of 2**-64: it guards against mistakes, not against an adversary.
"""

import numpy as np

MODULUS = 1 << 64


def hash_tokens(tokens: np.ndarray, start: int = 0) -> int:
    """Sum modulo 2**64 of one hash per token (any integer type) and its place, `start` being the place of the first."""
    with np.errstate(over="ignore"):
        places = np.arange(start, start + len(tokens), dtype=np.uint64)
        mixed = _mix(np.asarray(tokens, dtype=np.int64).view(np.uint64) ^ _mix(places + np.uint64(1)))
        return int(mixed.sum(dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 over a Weyl step: uint64[n] to uint64[n], one to one."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
