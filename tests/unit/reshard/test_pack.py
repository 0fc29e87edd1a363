"""Packing and unpacking: every kernel gives the reference's bits, tables are merged and checked, and what is missing is told.

The CUDA kernel's device code is plain C++ and runs here thread by thread, with every misaligned access an error; what only a GPU can
show is in tests/gpu. Triton's kernel runs in its interpreter, and is compiled for a GPU without running.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard import pack as packing
from moerl.reshard.pack import Box, build, cuda, native, pack, pack_in_parts, unpack
from moerl.reshard.pack import reference as torch_way
from moerl.reshard.pack import table as tables
from tests.unit.reshard.pack_cases import BF16, F32, Case, agree, cases, hold

ROOT = Path(__file__).resolve().parents[3]
CPU, U8, F8 = torch.device("cpu"), torch.uint8, torch.float8_e4m3fn
needs_native = pytest.mark.skipif(bool(native.problem(CPU)), reason=f"the compiled kernel cannot be used: {native.problem(CPU)}")

EMULATION = """
#include "pack.cu"
extern "C" void run(const moerl::Box* boxes, const std::int32_t* owners, std::int64_t chunks, moerl::u8* const* tensors,
                    moerl::u8* bucket, int pack, int blocks) {
  const moerl::Work work{boxes, owners, chunks, tensors, bucket};
  for (int block = 0; block < blocks; ++block)
    for (int thread = 0; thread < moerl::kThreads; ++thread)
      pack ? moerl::move_chunks<true>(work, block, blocks, thread) : moerl::move_chunks<false>(work, block, blocks, thread);
}
"""

AGREE_EMULATED = """
import ctypes, sys
import numpy as np
from hypothesis import HealthCheck, given, settings
from tests.unit.reshard.pack_cases import agree, cases

library = ctypes.CDLL(sys.argv[1])
pointer = ctypes.c_void_p
library.run.argtypes = pointer, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int, ctypes.c_int

def move(table, tensors, bucket, *, pack, threads):
    addresses = np.array([tensor.data_ptr() for tensor in tensors])
    work = table.rows.ctypes.data, table.owners.ctypes.data, len(table.owners)
    library.run(*work, addresses.ctypes.data, bucket.data_ptr(), pack, 3)
    return 1

@settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def check(case):
    agree(case, move)

check()
"""

AGREE_TRITON = """
from hypothesis import HealthCheck, given, settings
from moerl.reshard.pack import triton
from tests.unit.reshard.pack_cases import agree, cases

@settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(3000))
def check(case):
    agree(case, triton.move)

check()
"""

COMPILE_TRITON = """
import triton
from triton.backends.compiler import GPUTarget
from moerl.reshard.pack.triton import BLOCK, kernel

arguments = {"rows": "*i64", "owners": "*i32", "chunks": "i32", "spots": "*i64", "bucket": "*u8"}
constants = {"PACK": True, "CHUNK": 16384, "STEP": BLOCK}
source = triton.compiler.ASTSource(kernel, {**arguments, **dict.fromkeys(constants, "constexpr")}, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


def run(script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, "-c", script, *words], env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@needs_native
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_threads_agree_with_the_reference(case: Case) -> None:
    agree(case, native.move)


@needs_native
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(), part_bytes=st.sampled_from([1, 20000, 1 << 18]), threads=st.sampled_from([1, 1, 2]))
def test_parts_are_final_when_they_are_told_and_make_the_whole(case: Case, part_bytes: int, threads: int) -> None:
    expected, got, ends = hold(case), hold(case), []
    table = build(case.boxes, *got.table_args)
    pack(table, expected.tensors, expected.bucket, way="reference")
    with patch.object(tables, "PART_BYTES", part_bytes), patch.object(torch, "get_num_threads", lambda: threads):
        for end in pack_in_parts(table, got.tensors, got.bucket):
            assert torch.equal(got.bucket[:end], expected.bucket[:end])
            ends.append(end)
    assert ends == sorted(ends)
    assert ends[-1] == len(got.bucket)
    assert threads > 1 or part_bytes > 1 or len(ends) >= len(table.owners)


@needs_native
@pytest.mark.parametrize(("rows", "columns", "skew"), [(1200, 1024, 0), (1201, 1001, 1), (5, 1 << 18, 3), (400000, 3, 0), (9001, 2003, 5)])
@pytest.mark.parametrize(("dtype", "bucket_dtype"), [(BF16, BF16), (F32, BF16), (BF16, F32)])
def test_threads_share_what_is_large(rows: int, columns: int, skew: int, dtype: torch.dtype, bucket_dtype: torch.dtype) -> None:
    across = columns + 64
    boxes = (
        Box(0, 32, (rows, columns), (across, 1), dtype, skew, bucket_dtype),
        Box(1, 0, (333, 777), (1, 400), dtype, skew + rows * columns * bucket_dtype.itemsize, bucket_dtype),
    )
    case = Case(boxes, (rows * across, 400 * 777), (dtype, dtype), (dtype.itemsize, 0), 0, boxes[-1].end, seed=1)
    assert len(agree(case, native.move, threads=3).owners) > 2 * 64  # what a thread takes at a time


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which would run the CUDA kernel's code on this CPU")
def test_the_cuda_kernels_code_agrees_and_is_aligned(tmp_path: Path) -> None:
    source, library = tmp_path / "emulation.cpp", tmp_path / "emulation.so"
    source.write_text(EMULATION)
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", *checks, f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    run(AGREE_EMULATED, str(library))


def test_the_triton_kernel_agrees_in_the_interpreter() -> None:
    run(AGREE_TRITON, TRITON_INTERPRET="1")


def test_the_triton_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    done = run(COMPILE_TRITON, TRITON_CACHE_DIR=str(tmp_path))
    assert int(done.stdout) > 1000
    assert "warn" not in done.stderr.lower(), done.stderr


@pytest.mark.skipif(cuda._library()[0] is None, reason=f"the CUDA kernel cannot be loaded: {cuda._library()[1]}")
def test_the_cuda_library_says_what_cuda_says() -> None:
    library, _ = cuda._library()
    assert library.pack_error(2) == b"out of memory"
    assert library.pack_launch(None, None, 1, None, None, True, 1 << 20, None) != 0  # no such device, and here perhaps no driver


def test_the_reference_by_hand() -> None:
    source = torch.tensor([1.0, 1.00390625, 1.01171875, float("nan"), float("-inf"), 3.0e-40])  # two are ties: to even, down and up
    table = build([Box(0, 0, (6,), (1,), F32, 1, BF16)], [source], 13)
    bucket = torch.zeros(13, dtype=U8)
    assert pack(table, [source], bucket, way="reference") == 1
    assert bucket[0] == 0
    assert bucket[1:].clone().view(torch.int16).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7FC0, 0xFF80 - 0x10000, 0x0003]
    back = torch.zeros(6)
    assert unpack(table, bucket, [back], way="reference") == 1
    assert back[:3].tolist() == [1.0, 1.0, 1.015625]


def test_columns_come_in_row_major_order() -> None:
    source = torch.arange(12, dtype=U8).view(3, 4)
    table = build([Box(0, 1, (3, 2), (4, 1), U8, 0, U8), Box(0, 0, (2, 3), (1, 4), U8, 6, U8)], [source], 12)
    bucket = torch.zeros(12, dtype=U8)
    pack(table, [source], bucket)
    assert bucket.tolist() == [1, 2, 5, 6, 9, 10, 0, 4, 8, 1, 5, 9]


def rows_of(boxes: list[Box], *tensors: torch.Tensor) -> list[tuple[int, int, list[int], list[int]]]:
    """(units, run, sizes, strides) of each descriptor."""
    rows = build(boxes, tensors, 1 << 30).rows
    return [(row[4], row[5], row[8:12].tolist(), row[12:].tolist()) for row in rows]


def test_contiguous_boxes_become_one_run() -> None:
    tensor = torch.empty(8, 16, 32, dtype=BF16)
    whole = [Box(0, 0, (8, 16, 32), (512, 32, 1), BF16, 0, BF16)]
    pieces = [Box(0, 512 * row, (16, 32), (32, 1), BF16, 1024 * row, BF16) for row in range(8)]
    assert rows_of(whole, tensor) == rows_of(pieces[::-1], tensor) == [(8192, 8192, [1, 1, 1, 1], [0, 0, 0, 0])]


def test_slices_keep_only_the_dims_that_they_need() -> None:
    tensor = torch.empty(8, 16, 32, dtype=F32)
    halves = [Box(0, 512 * 4 * half + 3, (4, 16, 8), (512, 32, 1), F32, 1 + 1024 * half, BF16) for half in range(2)]
    assert rows_of(halves, tensor) == [(1024, 8, [1, 1, 1, 128], [0, 0, 0, 128])]


def test_what_is_apart_in_either_place_is_not_merged() -> None:
    tensors = torch.empty(64, dtype=U8), torch.empty(64, dtype=U8)
    apart_in_bucket = [Box(0, 0, (8,), (1,), U8, 0, U8), Box(0, 8, (8,), (1,), U8, 9, U8)]
    apart_in_tensor = [Box(0, 0, (8,), (1,), U8, 0, U8), Box(0, 9, (8,), (1,), U8, 8, U8)]
    of_two_tensors = [Box(0, 0, (8,), (1,), U8, 0, U8), Box(1, 8, (8,), (1,), U8, 8, U8)]
    for boxes in (apart_in_bucket, apart_in_tensor, of_two_tensors):
        assert len(rows_of(boxes, *tensors)) == 2


@pytest.mark.parametrize("way", ["native", "reference"])
def test_rows_that_are_gigabytes_apart(way: str) -> None:
    if why := packing.problems(CPU)[way]:
        pytest.skip(why)
    apart = (5 << 29) + 1
    tensor, bucket = torch.empty(2 * apart + 8, dtype=U8), torch.arange(10, 25, dtype=U8)  # of the tensor, only touched pages take memory
    table = build([Box(0, 3, (3, 5), (apart, 1), U8, 0, U8)], [tensor], 15)
    unpack(table, bucket, [tensor], way=way)
    assert [tensor[3 + row * apart : 8 + row * apart].tolist() for row in range(3)] == bucket.view(3, 5).tolist()
    back = torch.zeros(15, dtype=U8)
    pack(table, [tensor], back, way=way)
    assert torch.equal(back, bucket)


def test_a_table_of_nothing_launches_nothing() -> None:
    tensor, bucket = torch.ones(4), torch.zeros(4, dtype=U8)
    table = build([Box(0, 0, (0, 4), (4, 1), F32, 4, BF16)], [tensor], 4)
    assert (pack(table, [tensor], bucket), unpack(table, bucket, [tensor])) == (0, 0)
    assert not bucket.any()


def test_build_tells_every_problem() -> None:
    tensor = torch.empty(4, 4)
    wrong = {
        "expected a tensor of 0 to 0": Box(1, 0, (1,), (1,), F32, 0, F32),
        "expected at most 4 sizes and a stride for each": Box(0, 0, (1, 1), (1,), F32, 0, F32),
        "expected no negative number": Box(0, 3, (4,), (-1,), F32, 0, F32),
        "the tensor is float32": Box(0, 0, (1,), (1,), BF16, 0, BF16),
        "only float32 and bfloat16 are cast": Box(0, 0, (1,), (1,), F32, 0, torch.float16),
        "it ends at element 17, and the tensor, float32[4, 4] with strides [4, 1], at 16": Box(0, 1, (4, 4), (4, 1), F32, 0, F32),
        "it ends 2 bytes behind the bucket": Box(0, 0, (4,), (1,), F32, 50, F32),
    }
    with pytest.raises(ReshardError) as error:
        build(list(wrong.values()), [tensor], 64)
    message = str(error.value)
    assert message.count("\n  - ") == len(wrong)
    for words, box in wrong.items():
        assert f"{box}: {words}" in message


def test_build_tells_all_overlaps_in_the_bucket() -> None:
    tensor = torch.empty(64, dtype=U8)
    boxes = [Box(0, 0, (length,), (1,), U8, at, U8) for at, length in [(0, 30), (10, 5), (29, 4), (33, 7), (39, 1), (40, 0)]]
    with pytest.raises(ReshardError) as error:
        build(boxes, [tensor], 64)
    message = str(error.value)
    assert message.count("\n  - ") == 3
    assert f"{boxes[1]} shares 5 bytes of the bucket with {boxes[0]}" in message
    assert f"{boxes[2]} shares 1 bytes of the bucket with {boxes[0]}" in message
    assert f"{boxes[4]} shares 1 bytes of the bucket with {boxes[3]}" in message


@pytest.mark.parametrize("way", ["native", "reference"])
def test_repeated_elements_can_be_packed_only(way: str) -> None:
    if why := packing.problems(CPU)[way]:
        pytest.skip(why)
    tensor, bucket = torch.tensor([7, 8, 9], dtype=U8), torch.zeros(6, dtype=U8)
    table = build([Box(0, 0, (2, 3), (0, 1), U8, 0, U8)], [tensor], 6)
    pack(table, [tensor], bucket, way=way)
    assert bucket.tolist() == [7, 8, 9, 7, 8, 9]
    with pytest.raises(ReshardError, match="can only be packed:\n.*names elements of its tensor twice"):
        unpack(table, bucket, [tensor], way=way)


def test_other_tensors_than_the_tables_are_refused() -> None:
    tensors = [torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4)]
    table = build([Box(0, 0, (16,), (1,), F32, 0, F32)], tensors, 64)
    others = [torch.empty(4, 4).T, torch.empty(4, 4, dtype=BF16), torch.empty(4, 4, device="meta"), torch.empty(2, 8)]
    with pytest.raises(ReshardError) as error:
        pack(table, [*others, tensors[0]], torch.empty(63, dtype=U8))
    message = str(error.value)
    assert "expected 4 tensors, got 5" in message
    assert "tensor 0: expected float32[4, 4] with strides [4, 1], got float32[4, 4] with strides [1, 4]" in message
    assert "tensor 1: expected float32[4, 4] with strides [4, 1], got bfloat16" in message
    assert "tensor 2: expected it on the bucket's device, cpu, got meta" in message
    assert "got float32[2, 8]" in message
    assert "expected a bucket of at least 64 bytes, got 63" in message
    for bucket in (torch.empty(64, dtype=torch.int8), torch.empty(128, dtype=U8)[::2], torch.empty(8, 8, dtype=U8)):
        with pytest.raises(ReshardError, match=r"expected a contiguous bucket uint8\[bytes\]"):
            pack(table, tensors, bucket)


def test_a_table_outlives_its_tensors_and_takes_parameters() -> None:
    table = build([Box(0, 0, (4,), (1,), F32, 0, BF16)], [torch.empty(4, device="meta")], 8)
    bucket = torch.zeros(100, dtype=U8)
    for value in (1.0, 2.0):
        pack(table, [torch.nn.Parameter(torch.full((4,), value))], bucket)
        for way in ("", "reference"):
            parameter = torch.nn.Parameter(torch.zeros(4))
            unpack(table, bucket, [parameter], way=way)
            assert parameter.tolist() == [value] * 4


@pytest.fixture
def _forget() -> object:
    native._library.cache_clear()
    yield
    native._library.cache_clear()


@pytest.mark.usefixtures("_forget")
def test_without_the_compiled_kernel_torch_packs_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert packing.pick(CPU) == "reference"
    tensor, bucket = torch.ones(4, dtype=U8), torch.zeros(4, dtype=U8)
    table = build([Box(0, 0, (4,), (1,), U8, 0, U8)], [tensor], 4)
    pack(table, [tensor], bucket)
    assert bucket.tolist() == [1, 1, 1, 1]
    with pytest.raises(ReshardError, match="native cannot pack tensors on cpu: .*is not built, which needs a C\\+\\+ compiler"):
        pack(table, [tensor], bucket, way="native")
    (tmp_path / "_pack.cpython-312.so").write_bytes(b"no library")
    native._library.cache_clear()
    assert "does not load" in packing.problems(CPU)["native"]


@needs_native
@pytest.mark.usefixtures("_forget")
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native._library.cache_clear()
    built = native.INTERFACE
    monkeypatch.setattr(native, "INTERFACE", -1)
    assert f"is of another version ({built}, expected -1)" in packing.problems(CPU)["native"]


def test_the_ways_of_a_device() -> None:
    told = packing.problems(CPU)
    assert list(told) == list(packing.WAYS)
    assert told["reference"] == ""
    assert packing.pick(CPU) == ("reference" if told["native"] else "native")
    assert "on a GPU, not on cpu" in told["cuda"]
    assert "on a GPU, not on cpu" in told["triton"]
    assert packing.pick(torch.device("meta")) == "reference"


@pytest.mark.parametrize("dtype", [F8, torch.int8, BF16, F32])
def test_every_bit_pattern_of_a_byte_moves_unchanged(dtype: torch.dtype) -> None:
    data = torch.from_numpy(np.random.default_rng(0).permutation(256).astype(np.uint8))
    source, target = data.clone().view(dtype), torch.zeros(256, dtype=U8).view(dtype)
    table = build([Box(0, 0, (len(source),), (1,), dtype, 3, dtype)], [source], 259)
    bucket = torch.zeros(259, dtype=U8)
    pack(table, [source], bucket)
    unpack(table, bucket, [target])
    assert torch.equal(bucket[3:], data)
    assert torch.equal(target.view(U8), data)


def test_the_reference_is_per_box() -> None:
    tensor, bucket = torch.ones(4, dtype=U8), torch.zeros(4, dtype=U8)
    table = build([Box(0, at, (1,), (1,), U8, at, U8) for at in range(4)], [tensor], 4)
    assert torch_way.move(table, [tensor], bucket, pack=True, threads=1) == 4
    assert len(table.rows) == 1
