"""Gathers many strided boxes of tensors into one contiguous bucket, and scatters a bucket into many boxes, in one launch.

    Boxes --build--> Table;   tensors --pack(table)--> bucket uint8[bytes] --unpack(table)--> tensors

Four ways give the same bits: a CUDA kernel (csrc/pack.cu), a Triton kernel, C++ threads (csrc/pack.cpp), and torch, one copy per
box, which is the reference. The first that can be used on the tensors' device is taken; `problems` says why another cannot.
Bytes of the bucket that no box covers, and elements of the tensors outside of the boxes, are not touched.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from moerl.errors import ReshardError
from moerl.reshard.pack.table import Box, Table, build, check

__all__ = ["WAYS", "Box", "Table", "build", "pack", "pack_in_parts", "pick", "problems", "unpack"]

WAYS = ("cuda", "native", "triton", "reference")  # the best first; each a module, imported when it is asked for


def pack(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, threads: int | None = None, way: str = "") -> int:
    """Copy every box out of its tensor into the bucket. On a GPU it is queued on torch's current stream.

    Args:
        tensors: as the table was built for, all on the bucket's device.
        bucket: uint8[bytes], at least as long as the table's.
        threads: of a CPU; torch's number if not given.
        way: one of `WAYS`; the best that can be used if not given.

    Returns:
        The number of launches: 1, or with the reference one per box.

    Raises:
        ReshardError: tensors or bucket differ from those of the table, or `way` cannot be used.
    """
    return _move(table, tensors, bucket, threads, way, pack=True)


def pack_in_parts(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> Iterator[int]:
    """Like `pack`, but where one thread packs on a CPU it stops now and then, so that a part can be read while it is in the core's cache.

    Yields:
        The byte up to which the bucket is packed; its length in the end.
    """
    if pick(bucket.device) != "native" or torch.get_num_threads() > 1:
        pack(table, tensors, bucket)
    else:
        check(table, tensors, bucket)
        for first, behind, end in table.parts:
            _module("native").move(table, tensors, bucket, pack=True, threads=1, chunks=(first, behind))
            yield end
    yield len(bucket)


def unpack(table: Table, bucket: torch.Tensor, tensors: Sequence[torch.Tensor], *, threads: int | None = None, way: str = "") -> int:
    """Copy every box out of the bucket into its tensor, in place. Arguments, answer and errors are those of `pack`.

    Raises:
        ReshardError: also where a box names an element of its tensor twice.
    """
    if table.repeats:
        raise ReshardError("this table can only be packed:\n" + "\n".join(f"  - {sentence}" for sentence in table.repeats))
    return _move(table, tensors, bucket, threads, way, pack=False)


def problems(device: torch.device) -> dict[str, str]:
    """By way, the best first: why it cannot be used on a device; empty if it can."""
    return {name: _module(name).problem(device) for name in WAYS}


def pick(device: torch.device) -> str:
    """The way that is taken for tensors on a device."""
    return next(name for name in WAYS if not _module(name).problem(device))


def _module(way: str) -> Any:
    return import_module(f"{__name__}.{way}")


def _move(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, threads: int | None, way: str, *, pack: bool) -> int:
    check(table, tensors, bucket)
    if way and (why := _module(way).problem(bucket.device)):
        raise ReshardError(f"{way} cannot pack tensors on {bucket.device}: {why}; leave `way` out to take what can")
    if not table.boxes:
        return 0
    return _module(way or pick(bucket.device)).move(table, tensors, bucket, pack=pack, threads=threads or torch.get_num_threads())
