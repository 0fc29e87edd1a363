"""`moerl bench pack`: packing a bucket of weights against memcpy of as many bytes, and against a loop of `copy_`.

    trainer's tensors --pack--> bucket --unpack--> tensors         (one launch each)
    memory --memcpy--> memory                                      (of the bucket's bytes, by as many threads)
    trainer's tensors --copy_, one per box--> bucket, and back     (torch, with as many threads)

The bucket is what one engine rank of eight gets of a DeepSeek-V3 layer: its slices of some experts, the heads of its attention, its
rows of the embedding. The ways run in turns within each round, and medians over the rounds of their ratios are told. A cast reads
float32 and writes bfloat16: six bytes per element where memcpy of the bucket moves four.
"""

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch

from moerl.reshard import pack as packing

ROUNDS = 9


@dataclass(frozen=True)
class Sizes:
    """Of DeepSeek-V3, with few experts and a sixteenth of the vocabulary, and the engine's `tp` ranks."""

    hidden: int = 7168
    expert_ffn: int = 2048
    experts: int = 8
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    vocabulary: int = 8080  # rows that a trainer's rank and the engine's have in common
    routed: int = 256
    tp: int = 8


@dataclass(frozen=True)
class Part:
    """A slice of a tensor [rows, columns], as (first, count) of each."""

    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


def main(*, as_json: bool = False) -> int:
    """Measure and print the result."""
    found = measure(Sizes())
    _print_table(found)
    if as_json:
        print(json.dumps({name: value for name, value in found.items() if name not in ("mib", "threads")}))
    return 0


def measure(sizes: Sizes, *, rounds: int = ROUNDS) -> dict[str, float]:
    """The figures, as speed ratios: above 1 is faster than the other.

    Returns:
        pack_vs_memcpy, unpack_vs_memcpy: bfloat16 on both sides. pack_cast_vs_memcpy: of float32 tensors into bfloat16.
        vs_torch_loop: packing and unpacking together. launches_per_bucket: of either. mib: the bucket. threads: of every way.
    """
    moved = _ratios(sizes, torch.bfloat16, rounds)
    cast = _ratios(sizes, torch.float32, rounds)
    return {
        "pack_vs_memcpy": moved["pack"],
        "unpack_vs_memcpy": moved["unpack"],
        "pack_cast_vs_memcpy": cast["pack"],
        "vs_torch_loop": moved["loop"],
        "launches_per_bucket": moved["launches"],
        "mib": moved["mib"],
        "threads": torch.get_num_threads(),
    }


def parts(sizes: Sizes) -> list[Part]:
    """What rank 1 of the engine gets: experts' fc1 (gate and up rows) and fc2 (columns), then what surrounds them."""
    hidden, ffn, tp = sizes.hidden, sizes.expert_ffn, sizes.tp

    def rows(count: int, columns: int, first: int = 0, of: int = 0) -> Part:
        return Part((of or count, columns), (first + count // tp, count // tp), (0, columns))

    def columns(count: int, across: int) -> Part:
        return Part((count, across), (0, count), (across // tp, across // tp))

    def whole(count: int, across: int) -> Part:
        return Part((count, across), (0, count), (0, across))

    found = []
    for _ in range(sizes.experts):
        found += [rows(ffn, hidden, of=2 * ffn), rows(ffn, hidden, first=ffn, of=2 * ffn), columns(hidden, ffn)]
    found += [whole(sizes.q_rank, hidden), whole(sizes.kv_rank + 64, hidden), rows(sizes.heads * 192, sizes.q_rank)]
    found += [rows(sizes.heads * 256, sizes.kv_rank), columns(hidden, sizes.heads * 128), whole(sizes.vocabulary, hidden)]
    return [*found, whole(sizes.routed, hidden), whole(1, hidden), whole(1, hidden), whole(1, sizes.q_rank), whole(1, sizes.kv_rank)]


def boxes(sizes: Sizes, dtype: torch.dtype) -> tuple[list[packing.Box], list[torch.Size], int]:
    """Boxes of tensors of `dtype` in a bucket of bfloat16, the tensors' shapes, and the bucket's bytes."""
    found: list[packing.Box] = []
    shapes: list[torch.Size] = []
    at = 0
    for part in parts(sizes):
        second_of_fc1 = part.rows[0] >= sizes.expert_ffn and part.shape == (2 * sizes.expert_ffn, sizes.hidden)
        if not second_of_fc1:  # gate and up lie in one tensor
            shapes.append(torch.Size(part.shape))
        across = part.shape[1]
        (row, rows), (column, columns) = part.rows, part.columns
        box = packing.Box(len(shapes) - 1, row * across + column, (rows, columns), (across, 1), dtype, at, torch.bfloat16)
        found.append(box)
        at += box.nbytes
    return found, shapes, at


def _ratios(sizes: Sizes, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    described, shapes, nbytes = boxes(sizes, dtype)
    tensors = [torch.full(shape, 1.5, dtype=dtype) for shape in shapes]
    bucket, other = torch.full((nbytes,), 1, dtype=torch.uint8), torch.full((nbytes,), 2, dtype=torch.uint8)
    table = packing.build(described, tensors, nbytes)
    pairs = [
        (tensors[box.tensor].as_strided(box.sizes, box.strides, box.offset), bucket[box.at : box.end].view(torch.bfloat16).view(box.sizes))
        for box in described
    ]
    threads, launches = torch.get_num_threads(), set()
    with ThreadPoolExecutor(threads) as pool:
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: _memcpy(other, bucket, pool, threads),
            "pack": lambda: launches.add(packing.pack(table, tensors, bucket)),
            "unpack": lambda: launches.add(packing.unpack(table, bucket, tensors)),
            "loop in": lambda: [flat.copy_(inside) for inside, flat in pairs],
            "loop out": lambda: [inside.copy_(flat) for inside, flat in pairs],
        }
        seconds = _rounds(ways, rounds)
    ratio = {name: statistics.median(one["memcpy"] / one[name] for one in seconds) for name in ("pack", "unpack")}
    loop = statistics.median((one["loop in"] + one["loop out"]) / (one["pack"] + one["unpack"]) for one in seconds)
    return {**ratio, "loop": loop, "launches": max(launches), "mib": nbytes / 2**20}


def _memcpy(dst: torch.Tensor, src: torch.Tensor, pool: ThreadPoolExecutor, threads: int) -> None:
    """The C library's, a slice per thread; ctypes lets them run side by side."""
    cuts = [len(src) * number // threads for number in range(threads + 1)]
    jobs = [pool.submit(ctypes.memmove, dst.data_ptr() + begin, src.data_ptr() + begin, end - begin) for begin, end in pairwise(cuts)]
    for job in jobs:
        job.result()


def _rounds(ways: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Seconds of each way by round; a first round only warms up."""
    found = []
    for _ in range(rounds + 1):
        seconds = {}
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name] = time.perf_counter() - start
        found.append(seconds)
    return found[1:]


def _print_table(found: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    way, why = packing.pick(torch.device("cpu")), packing.problems(torch.device("cpu"))["native"]
    console = Console(highlight=False, width=140)
    console.print(f"{found['mib']:.0f} MiB of bfloat16, {found['threads']} threads, packed by {way}: times as fast as the other")
    table = Table(box=None, pad_edge=False)
    for head in ("pack / memcpy", "unpack / memcpy", "cast / memcpy", "both / copy_ loop", "launches"):
        table.add_column(head, justify="right")
    names = ("pack_vs_memcpy", "unpack_vs_memcpy", "pack_cast_vs_memcpy", "vs_torch_loop")
    table.add_row(*(f"{found[name]:.2f}" for name in names), str(found["launches_per_bucket"]))
    console.print(table)
    if why:
        console.print(f"native cannot be used: {why}", soft_wrap=True)
