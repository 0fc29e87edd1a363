"""How large the pieces of a conversion are, from the memory it may use."""

import os
from dataclasses import dataclass

from moerl.errors import ConfigError

_LARGEST_CHUNK = 1 << 25
"""Elements: 64 MiB of bfloat16, a DeepSeek-V3 expert's linear and more."""
_BYTES_PER_ELEMENT = 10
"""Of a chunk that is being converted: its values, what they were read from or read into, and scratch memory."""
_SCRATCH = 80 << 20
"""Besides, of each worker: strips that are dequantised or quantised."""


@dataclass(frozen=True)
class Limits:
    """Attributes:
    workers: files that are written at a time.
    chunk_elements: elements that a worker holds at a time, where it may choose.
    file_bytes: of each output file, roughly.
    """

    workers: int
    chunk_elements: int
    file_bytes: int


def limits(total_bytes: int, *, memory_mib: int, workers: int | None = None, file_mib: int | None = None) -> Limits:
    """Choose sizes for a conversion of `total_bytes` that allocates no more than `memory_mib` besides the libraries themselves.

    Args:
        workers: at most; None: one for each CPU.
        file_mib: of each output file; None: as many files as workers can share evenly, of at most 4 GiB.

    Raises:
        ConfigError: too little memory for one worker.
    """
    wanted = workers or len(os.sched_getaffinity(0))
    memory = memory_mib << 20
    each = _LARGEST_CHUNK * _BYTES_PER_ELEMENT + _SCRATCH
    count = max(min(wanted, memory // each), 1)
    elements = min(_LARGEST_CHUNK, (memory // count - _SCRATCH) // _BYTES_PER_ELEMENT)
    if elements < 1 << 20:
        least = ((1 << 20) * _BYTES_PER_ELEMENT + _SCRATCH) / 2**20
        raise ConfigError(f"--memory-mib {memory_mib}: expected at least {least:.0f}")
    even = total_bytes // (4 * count)
    return Limits(count, elements, file_mib << 20 if file_mib else min(max(even, 256 << 20), 4 << 30))
