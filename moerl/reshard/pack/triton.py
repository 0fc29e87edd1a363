"""The kernel for GPUs without a CUDA compiler, in Triton; on a CPU it runs in Triton's interpreter, which the tests do.

It walks the same descriptors as csrc/pack.cu, with a division per element and accesses of at most 8 bytes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moerl.reshard.pack.resident import addresses, descriptors
from moerl.reshard.pack.table import CHUNK_BYTES, Table

BLOCK = 512  # units at a time
_PROGRAMS_PER_PROCESSOR = 8
_PROGRAMS_INTERPRETED = 3


def problem(device: torch.device) -> str:
    """Why it cannot be used on a device; empty if it can."""
    if triton.knobs.runtime.interpret:
        return "" if device.type == "cpu" else "TRITON_INTERPRET is set, and the interpreter reads memory of the CPU"
    if device.type != "cuda":
        return f"it moves tensors on a GPU, not on {device}"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def move(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, pack: bool, threads: int) -> int:
    """Into the bucket if `pack`, else out of it, queued on torch's current stream; `threads` has no meaning here.

    Returns:
        The number of launches.
    """
    device = bucket.device
    rows, owners = descriptors(table, device)
    spots = addresses(table, tensors, device)
    programs = _PROGRAMS_INTERPRETED
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_PROCESSOR
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(min(programs, len(owners)),)](rows, owners, len(owners), spots, bucket, PACK=pack, CHUNK=CHUNK_BYTES, STEP=BLOCK)
    return 1


@triton.jit
def _narrow(bits):
    # float32 to bfloat16: to nearest, ties to even; every NaN becomes 0x7fc0.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _load(address, mask, UINT: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        return tl.load(address.to(tl.pointer_type(UINT)), mask=mask, other=0)
    else:
        value = tl.zeros(address.shape, tl.uint32)
        for byte in tl.static_range(BYTES):
            value |= tl.load((address + byte).to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.uint32) << (8 * byte)
        return value.to(UINT)


@triton.jit
def _store(address, value, mask, UINT: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        tl.store(address.to(tl.pointer_type(UINT)), value, mask=mask)
    else:
        for byte in tl.static_range(BYTES):
            tl.store((address + byte).to(tl.pointer_type(tl.uint8)), (value >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def _span(box, tensor, flat, begin, end, WIDTH: tl.constexpr, T: tl.constexpr, B: tl.constexpr, ALIGNED: tl.constexpr,
          PACK: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    # Units [begin, end) of a box, in groups of WIDTH units; T and B are the groups' integer types in tensor and bucket.
    TENSOR: tl.constexpr = T.primitive_bitwidth // 8
    BUCKET: tl.constexpr = B.primitive_bitwidth // 8
    run = tl.load(box + 5) // WIDTH
    for first in range(begin // WIDTH, end // WIDTH, STEP):
        group = first + tl.arange(0, STEP).to(tl.int64)
        mask = group < end // WIDTH
        row = group // run
        inside = tensor + (group - row * run) * TENSOR
        for dim in tl.static_range(3, 0, -1):
            size = tl.load(box + 8 + dim)
            inside += (row % size) * tl.load(box + 12 + dim)
            row = row // size
        inside += row * tl.load(box + 12)
        place = flat + group * BUCKET
        if PACK:
            value = _load(inside, mask, T, TENSOR, ALIGNED)
            if T == B:
                _store(place, value, mask, B, BUCKET, ALIGNED)
            elif TENSOR == 4:
                _store(place, _narrow(value), mask, B, BUCKET, ALIGNED)
            else:
                _store(place, value.to(tl.uint32) << 16, mask, B, BUCKET, ALIGNED)
        else:
            value = _load(place, mask, B, BUCKET, ALIGNED)
            if T == B:
                _store(inside, value, mask, T, TENSOR, ALIGNED)
            elif BUCKET == 4:
                _store(inside, _narrow(value), mask, T, TENSOR, ALIGNED)
            else:
                _store(inside, value.to(tl.uint32) << 16, mask, T, TENSOR, ALIGNED)


@triton.jit
def kernel(rows, owners, chunks, spots, bucket, PACK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Programs take chunks in turn; see `table.COLUMNS` for the numbers of the columns."""
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        box = rows + tl.load(owners + chunk).to(tl.int64) * 16
        tensor = tl.load(spots + tl.load(box)) + tl.load(box + 1)
        flat = bucket.to(tl.int64) + tl.load(box + 2)
        tensor_bytes = tl.load(box + 6)
        bucket_bytes = tl.load(box + 7)
        size = CHUNK // bucket_bytes
        begin = (chunk - tl.load(box + 3)) * size
        end = tl.minimum(begin + size, tl.load(box + 4))
        # The lowest bit that is set in any address or distance says what both sides are aligned to.
        mixed = tensor | flat | tl.load(box + 12) | tl.load(box + 13) | tl.load(box + 14) | tl.load(box + 15)
        if tensor_bytes == bucket_bytes:
            mixed |= tl.load(box + 5)
            if mixed % 8 == 0:
                _span(box, tensor, flat, begin, end, 8, tl.uint64, tl.uint64, True, PACK, STEP)
            elif mixed % 4 == 0:
                _span(box, tensor, flat, begin, end, 4, tl.uint32, tl.uint32, True, PACK, STEP)
            elif mixed % 2 == 0:
                _span(box, tensor, flat, begin, end, 2, tl.uint16, tl.uint16, True, PACK, STEP)
            else:
                _span(box, tensor, flat, begin, end, 1, tl.uint8, tl.uint8, True, PACK, STEP)
        elif tensor_bytes == 4:
            # Strides are multiples of the tensor's own unit if its address is, so only addresses matter.
            if tensor % 4 == 0 and flat % 2 == 0:
                _span(box, tensor, flat, begin, end, 1, tl.uint32, tl.uint16, True, PACK, STEP)
            else:
                _span(box, tensor, flat, begin, end, 1, tl.uint32, tl.uint16, False, PACK, STEP)
        else:
            if tensor % 2 == 0 and flat % 4 == 0:
                _span(box, tensor, flat, begin, end, 1, tl.uint16, tl.uint32, True, PACK, STEP)
            else:
                _span(box, tensor, flat, begin, end, 1, tl.uint16, tl.uint32, False, PACK, STEP)
