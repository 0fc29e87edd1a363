"""Which strided boxes of tensors lie where in a bucket, as the descriptors that every kernel reads.

    Boxes --check against the tensors, drop what is empty, merge--> Table (built once, used at every sync)

Invariants: no two boxes share a byte of the bucket; every box lies inside its tensor; descriptors are in the order of the bucket, and
what is contiguous on both sides is one run. A table holds no tensors, only what they must look like, so it outlives them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from moerl.errors import ReshardError

COLUMNS = ("tensor", "offset", "at", "chunk", "units", "run", "tensor_bytes", "bucket_bytes", "sizes", "strides")  # `Box` in csrc/pack.h
CHUNK_BYTES = 16384
PART_BYTES = 1 << 18
"""What a core's own cache holds for certain, beside what it was packed from."""
DIMS = 4

_WIDTH = 16  # int64 per descriptor
_CASTS = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Box:
    """A strided region of a tensor, and where its elements lie in a bucket, one after another (row-major over `sizes`).

    Attributes:
        tensor: position in the list of tensors that is given to `pack` and `unpack`.
        offset: of the first element, in elements from the tensor's first (its `data_ptr`).
        sizes: up to four; a size of 0 makes the box empty.
        strides: one per size, in elements of the tensor's memory; 0 repeats elements, which only packing can do.
        dtype: of the tensor.
        at: of the first element, in bytes from the bucket's beginning; any number, also one that does not suit the dtype.
        bucket_dtype: float32 and bfloat16 are cast into each other; any other dtype must be the tensor's and moves as bytes.
    """

    tensor: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    at: int
    bucket_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """In the bucket."""
        return prod(self.sizes) * self.bucket_dtype.itemsize

    @property
    def end(self) -> int:
        """The byte of the bucket behind its last."""
        return self.at + self.nbytes

    def __str__(self) -> str:
        where = (
            f"sizes {list(self.sizes)}, strides {list(self.strides)}, offset {self.offset} of tensor {self.tensor} ({_name(self.dtype)})"
        )
        return f"box [{where}; bytes {self.at} to {self.end} of the bucket ({_name(self.bucket_dtype)})]"


@dataclass(frozen=True)
class Look:
    """What a tensor must look like: its memory is addressed with these strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Look":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def extent(self) -> int:
        """Elements from the first to the last, both included."""
        return _extent(self.shape, self.strides)

    def __str__(self) -> str:
        return f"{_name(self.dtype)}{list(self.shape)} with strides {list(self.strides)}"


@dataclass(frozen=True, eq=False)
class Table:
    """Checked boxes and their descriptors.

    Attributes:
        boxes: as given, without empty ones; in the order of the bucket.
        looks: of the tensors.
        bucket_nbytes: the least a bucket must hold.
        nbytes: of the bucket, covered by boxes.
        rows: int64[descriptor, 16], the columns of `COLUMNS`; contiguous boxes are merged.
        owners: int32[chunk], the descriptor that each chunk of work belongs to.
        repeats: why it cannot be unpacked: a sentence for each box that names an element of its tensor twice.
        cache: what kernels keep with the table, such as a copy on a device.
    """

    boxes: tuple[Box, ...]
    looks: tuple[Look, ...]
    bucket_nbytes: int
    nbytes: int
    rows: np.ndarray
    owners: np.ndarray
    repeats: tuple[str, ...]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """The bucket in parts of about `PART_BYTES`: (first chunk, the one behind the last, the byte at which the next part begins)."""
        numbers, boxes = np.arange(len(self.owners)), self.rows[self.owners]
        starts = boxes[:, COLUMNS.index("at")] + (numbers - boxes[:, COLUMNS.index("chunk")]) * CHUNK_BYTES
        wanted = np.arange(PART_BYTES, self.bucket_nbytes, PART_BYTES)
        cuts = [0, *(int(cut) for cut in np.unique(np.searchsorted(starts, wanted)) if 0 < cut < len(starts)), len(starts)]
        ends = [*(int(starts[cut]) for cut in cuts[1:-1]), self.bucket_nbytes]
        return list(zip(cuts[:-1], cuts[1:], ends, strict=True))


def build(boxes: Sequence[Box], tensors: Sequence[torch.Tensor], bucket_nbytes: int) -> Table:
    """Check the boxes and describe them.

    Whether boxes of one tensor overlap in the tensor is not checked: unpacking such a table leaves either's bytes.

    Args:
        tensors: with the shapes, strides and dtypes of those to come; their device does not matter (`meta` will do).
        bucket_nbytes: size of the bucket.

    Raises:
        ReshardError: with a sentence for each box that does not fit its tensor or the bucket, and for each two that share bytes of it.
    """
    looks = tuple(Look.of(tensor) for tensor in tensors)
    problems = [f"{box}: {problem}" for box in boxes for problem in _problems(box, looks, bucket_nbytes)]
    if not problems:
        kept = sorted((box for box in boxes if box.nbytes), key=lambda box: box.at)
        problems = list(_overlaps(kept))
    if problems:
        raise ReshardError(
            f"{len(problems)} problems of boxes and a bucket of {bucket_nbytes} bytes:\n" + "\n".join(f"  - {p}" for p in problems)
        )
    rows, owners = _describe(kept)
    repeats = tuple(f"{box} names elements of its tensor twice" for box in kept if _repeats(box))
    return Table(tuple(kept), looks, bucket_nbytes, sum(box.nbytes for box in kept), rows, owners, repeats)


def check(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    """That tensors and bucket are those the table was built for.

    Raises:
        ReshardError: with a sentence for each difference.
    """
    problems = []
    if len(tensors) != len(table.looks):
        problems.append(f"expected {len(table.looks)} tensors, got {len(tensors)}")
    for number, (tensor, look) in enumerate(zip(tensors, table.looks, strict=False)):
        if tensor.dtype != look.dtype or tensor.shape != look.shape or tensor.stride() != look.strides:
            problems.append(f"tensor {number}: expected {look}, got {Look.of(tensor)}")
        if tensor.device != bucket.device:
            problems.append(f"tensor {number}: expected it on the bucket's device, {bucket.device}, got {tensor.device}")
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        problems.append(f"expected a contiguous bucket uint8[bytes], got {Look.of(bucket)}")
    elif len(bucket) < table.bucket_nbytes:
        problems.append(f"expected a bucket of at least {table.bucket_nbytes} bytes, got {len(bucket)}")
    if problems:
        raise ReshardError("the table was built for other tensors; build it anew:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _problems(box: Box, looks: tuple[Look, ...], bucket_nbytes: int) -> Iterator[str]:
    if not 0 <= box.tensor < len(looks):
        yield f"expected a tensor of 0 to {len(looks) - 1}"
        return
    if len(box.sizes) != len(box.strides) or len(box.sizes) > DIMS:
        yield f"expected at most {DIMS} sizes and a stride for each"
        return
    if min((*box.sizes, *box.strides, box.offset, box.at), default=0) < 0:
        yield "expected no negative number"
        return
    look = looks[box.tensor]
    if box.dtype != look.dtype:
        yield f"the tensor is {_name(look.dtype)}"
    if box.dtype != box.bucket_dtype and (box.dtype, box.bucket_dtype) not in _CASTS:
        yield "only float32 and bfloat16 are cast into each other; give the bucket the tensor's dtype"
    if box.nbytes and (end := box.offset + _extent(box.sizes, box.strides)) > look.extent:
        yield f"it ends at element {end}, and the tensor, {look}, at {look.extent}"
    if box.nbytes and box.end > bucket_nbytes:
        yield f"it ends {box.end - bucket_nbytes} bytes behind the bucket"


def _overlaps(boxes: list[Box]) -> Iterator[str]:
    """Of boxes in the order of the bucket: each that begins before the furthest end so far."""
    furthest = None
    for box in boxes:
        if furthest is not None and box.at < furthest.end:
            yield f"{box} shares {min(furthest.end, box.end) - box.at} bytes of the bucket with {furthest}"
        if furthest is None or box.end > furthest.end:
            furthest = box


def _repeats(box: Box) -> bool:
    """Whether an element could be named twice. Exact for boxes cut from tensors, in which each stride steps over all smaller ones."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(box.strides, box.sizes, strict=True) if size > 1):
        if stride < reach:
            return True
        reach = (size - 1) * stride + reach
    return False


@dataclass
class _Runs:
    """A box as it is described: lengths in units, `dims` (size, stride in bytes) around a run, outermost first."""

    tensor: int
    offset: int
    at: int
    run: int
    tensor_bytes: int
    bucket_bytes: int
    dims: list[tuple[int, int]]

    @property
    def units(self) -> int:
        return self.run * prod(size for size, _ in self.dims)


def _describe(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    merged: list[_Runs] = []
    for runs in map(_runs, boxes):
        if not (merged and _continues(merged[-1], runs)):
            merged.append(runs)
        elif runs.dims:
            (size, stride), (more, _) = merged[-1].dims[0], runs.dims[0]
            merged[-1].dims[0] = (size + more, stride)
        else:
            merged[-1].run += runs.run
    rows, counts, chunk = [], [], 0
    for runs in merged:
        dims = [(1, 0)] * (DIMS - len(runs.dims)) + runs.dims
        head = (runs.tensor, runs.offset, runs.at, chunk, runs.units, runs.run, runs.tensor_bytes, runs.bucket_bytes)
        rows.append((*head, *(size for size, _ in dims), *(stride for _, stride in dims)))
        counts.append(-(-runs.units * runs.bucket_bytes // CHUNK_BYTES))
        chunk += counts[-1]
    return np.array(rows, np.int64).reshape(-1, _WIDTH), np.repeat(np.arange(len(merged), dtype=np.int32), counts)


def _runs(box: Box) -> _Runs:
    """Neighbouring dims that can be walked as one become one; the last one, if contiguous, is the run."""
    item = box.dtype.itemsize
    dims: list[tuple[int, int]] = []
    for size, stride in zip(box.sizes, box.strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride * item:
            dims[-1] = (dims[-1][0] * size, stride * item)
        else:
            dims.append((size, stride * item))
    run = dims.pop()[0] if dims and dims[-1][1] == item else 1
    moved = box.dtype == box.bucket_dtype
    unit = (1, 1) if moved else (item, box.bucket_dtype.itemsize)
    return _Runs(box.tensor, box.offset * item, box.at, run * item if moved else run, *unit, dims)


def _continues(before: _Runs, runs: _Runs) -> bool:
    """Whether `runs` is `before` continued along its outermost dim, or its run where it has none, in tensor and bucket."""
    same = (runs.tensor, runs.tensor_bytes, runs.bucket_bytes) == (before.tensor, before.tensor_bytes, before.bucket_bytes)
    if not same or runs.at != before.at + before.units * before.bucket_bytes or len(runs.dims) != len(before.dims):
        return False
    if not runs.dims:
        return runs.offset == before.offset + before.run * before.tensor_bytes
    (size, stride), (_, other) = before.dims[0], runs.dims[0]
    return runs.offset == before.offset + size * stride and (runs.run, other, runs.dims[1:]) == (before.run, stride, before.dims[1:])


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
