"""Random boxes, tensors and buckets for the packing kernels, and the comparison of a kernel with the reference.

Every tensor and bucket is cut out of a larger storage at an offset that need not be aligned, and storages are compared whole, so a
byte written beside a box is a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from moerl.reshard.pack import Box, Table, build
from moerl.reshard.pack import reference as torch_way

Move = Callable[..., int]  # `move` of a module of moerl.reshard.pack

F32, BF16 = torch.float32, torch.bfloat16
CASTS = [(F32, BF16), (BF16, F32)]
MOVES = [(dtype, dtype) for dtype in (BF16, F32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64)]
POISON = [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000000, 0x3F808000, 0x3F818000]
GUARD = 32  # bytes on either side


@dataclass(frozen=True)
class Case:
    """Boxes, each of a tensor[elements] of its own kind; `skews` are bytes that tensors and bucket lie off an aligned address."""

    boxes: tuple[Box, ...]
    lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    skews: tuple[int, ...]
    bucket_skew: int
    bucket_nbytes: int
    seed: int


@st.composite
def cases(draw: st.DrawFn, most: int = 40000) -> Case:
    """Boxes that share no element, with sizes of up to `most`, so that some are longer than a chunk of work."""
    boxes, lengths, dtypes, skews, at = [], [], [], [], 0
    for tensor in range(draw(st.integers(1, 4))):
        dtype, bucket_dtype = draw(st.sampled_from(CASTS + MOVES))
        sizes = draw(st.lists(st.integers(0, 6) | st.integers(1, 70), max_size=3).map(tuple))
        if draw(st.booleans()):
            sizes = (*sizes, draw(st.integers(1, most // max(1, int(np.prod([max(size, 1) for size in sizes]))) + 1)))
        strides = draw(injective(sizes))
        offset = draw(st.integers(0, 9))
        at += draw(st.sampled_from([0, 0, 1, 2, 3, 16, 29]))
        pieces = split(sizes, strides, draw(st.integers(0, 3)))
        for first, part in pieces:
            boxes.append(Box(tensor, offset + first, part, strides, dtype, at, bucket_dtype))
            at = boxes[-1].end
        lengths.append(offset + extent(sizes, strides) + draw(st.integers(0, 3)))
        dtypes.append(dtype)
        skews.append(draw(st.integers(0, 5)) * dtype.itemsize)
    order = draw(st.permutations(boxes))
    bucket_nbytes = at + draw(st.integers(0, 3))
    return Case(
        tuple(order), tuple(lengths), tuple(dtypes), tuple(skews), draw(st.integers(0, 17)), bucket_nbytes, draw(st.integers(0, 2**32))
    )


@st.composite
def injective(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in any order of the dims, with gaps, that name no element twice; mostly those of a contiguous box."""
    dims = draw(st.sampled_from([range(len(sizes))]) | st.permutations(range(len(sizes))))
    strides, reach = [0] * len(sizes), 1
    for dim in reversed(dims):
        strides[dim] = reach + draw(st.sampled_from([0, 0, 0, 1, 3, 8, 1000]))
        reach = strides[dim] * max(sizes[dim], 1)
        if reach > 1 << 21:  # a tensor of a few MB is enough
            return tuple(np.cumprod([1, *sizes[:0:-1]])[::-1].tolist()) if sizes else ()
    return tuple(strides)


def split(sizes: tuple[int, ...], strides: tuple[int, ...], cuts: int) -> list[tuple[int, tuple[int, ...]]]:
    """A box as several along its outermost dim: (elements before the first, sizes) of each."""
    if not sizes:
        return [(0, ())]
    edges = sorted({sizes[0] * cut // (cuts + 1) for cut in range(cuts + 2)})
    return [(low * strides[0], (high - low, *sizes[1:])) for low, high in pairwise(edges)] or [(0, sizes)]


def extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@dataclass
class Held:
    """A case in memory: whole storages uint8[bytes], and what is cut out of them."""

    storages: list[torch.Tensor]
    tensors: list[torch.Tensor]
    bucket: torch.Tensor

    @property
    def table_args(self) -> tuple[list[torch.Tensor], int]:
        return self.tensors, len(self.bucket)


def hold(case: Case, device: str = "cpu") -> Held:
    """Random bytes, many of them NaNs, infinities, ties and subnormals of float32 and bfloat16."""
    rng = np.random.default_rng(case.seed)

    def storage(nbytes: int) -> torch.Tensor:
        words = rng.integers(0, 2**32, (nbytes + 2 * GUARD) // 4 + 16, np.uint32)
        poisoned = rng.random(len(words)) < 0.3
        words[poisoned] = rng.choice(np.array(POISON, np.uint32), poisoned.sum())
        return torch.from_numpy(words.view(np.uint8)).to(device)

    sizes = [length * dtype.itemsize for length, dtype in zip(case.lengths, case.dtypes, strict=True)]
    storages = [storage(size) for size in (*sizes, case.bucket_nbytes)]
    tensors = [
        whole[GUARD + skew : GUARD + skew + size].view(dtype)
        for whole, skew, size, dtype in zip(storages, case.skews, sizes, case.dtypes, strict=False)
    ]
    begin = GUARD + case.bucket_skew
    return Held(storages, tensors, storages[-1][begin : begin + case.bucket_nbytes])


def agree(case: Case, move: Move, *, device: str = "cpu", threads: int = 2) -> Table:
    """Packs and unpacks with `move` and with the reference, and compares every byte."""
    for pack in (True, False):
        expected, got = hold(case, device), hold(case, device)
        table = build(case.boxes, *got.table_args)
        torch_way.move(table, expected.tensors, expected.bucket, pack=pack, threads=1)
        if table.boxes:
            assert move(table, got.tensors, got.bucket, pack=pack, threads=threads) == 1
        for number, (want, have) in enumerate(zip(expected.storages, got.storages, strict=True)):
            if not torch.equal(want, have):
                byte = int((want != have).nonzero()[0])
                what = "the bucket" if number == len(got.tensors) else f"tensor {number}"
                begin = GUARD + (*case.skews, case.bucket_skew)[number]
                raise AssertionError(
                    f"{'pack' if pack else 'unpack'}: byte {byte - begin} of {what} is {have[byte]}, expected {want[byte]}\n{table.rows}"
                )
    return table
