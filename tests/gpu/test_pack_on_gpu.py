"""Packing on a GPU: the CUDA kernel and the Triton kernel give the reference's bits, in one launch, on the current stream.

Run on a machine with an NVIDIA GPU: `bash tools/test.sh tests/gpu`.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moerl.reshard import pack as packing
from moerl.reshard.pack import Box, build, pack, unpack
from tests.unit.reshard.pack_cases import BF16, F32, Case, agree, cases

GPU = torch.device("cuda", 0)
SEEN = torch.backends.cuda.is_built() and torch.cuda.is_available()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SEEN, reason="no NVIDIA GPU is visible to torch")]


@pytest.fixture(params=["cuda", "triton"])
def way(request: pytest.FixtureRequest) -> str:
    if why := packing.problems(GPU)[request.param]:
        pytest.skip(f"{request.param} cannot be used: {why}")
    return request.param


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_a_kernel_agrees_with_the_reference(way: str, case: Case) -> None:
    agree(case, packing._module(way).move, device="cuda")


@pytest.mark.parametrize(("dtype", "bucket_dtype"), [(BF16, BF16), (F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("skew", [0, 1, 8])
def test_a_large_bucket(way: str, dtype: torch.dtype, bucket_dtype: torch.dtype, skew: int) -> None:
    boxes = (
        Box(0, 32, (9001, 1024), (1088, 1), dtype, skew, bucket_dtype),
        Box(1, 0, (333, 777), (1, 400), dtype, skew + 9001 * 1024 * bucket_dtype.itemsize, bucket_dtype),
    )
    case = Case(boxes, (9001 * 1088, 400 * 777), (dtype, dtype), (0, 0), 0, boxes[-1].end, seed=1)
    agree(case, packing._module(way).move, device="cuda")


def test_it_follows_the_current_stream_and_tensors_that_move(way: str) -> None:
    tensors = [torch.full((1 << 20,), float(value), device=GPU) for value in range(3)]
    table = build([Box(0, 0, (1 << 20,), (1,), F32, 0, BF16)], tensors[:1], 2 << 20)
    stream = torch.cuda.Stream(GPU)
    buckets = [torch.zeros(2 << 20, dtype=torch.uint8, device=GPU) for _ in tensors]
    torch.cuda.synchronize(GPU)
    with torch.cuda.stream(stream):
        for tensor, bucket in zip(tensors, buckets, strict=True):
            tensor.add_(1)
            assert pack(table, [tensor], bucket, way=way) == 1
            tensor.zero_()
            assert unpack(table, bucket, [tensor], way=way) == 1
    stream.synchronize()
    for value, (tensor, bucket) in enumerate(zip(tensors, buckets, strict=True)):
        assert (bucket.view(BF16) == value + 1).all()
        assert (tensor == value + 1).all()


def test_a_launch_is_captured_in_a_graph(way: str) -> None:
    tensor = torch.zeros(1000, device=GPU)
    bucket = torch.zeros(2000, dtype=torch.uint8, device=GPU)
    table = build([Box(0, 0, (1000,), (1,), F32, 0, BF16)], [tensor], 2000)
    pack(table, [tensor], bucket, way=way)  # descriptors and addresses reach the device here
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack(table, [tensor], bucket, way=way)
    tensor.fill_(3)
    graph.replay()
    torch.cuda.synchronize(GPU)
    assert (bucket.view(BF16) == 3).all()


def test_the_cuda_kernel_comes_first_where_it_was_built() -> None:
    told = packing.problems(GPU)
    assert packing.pick(GPU) == next(name for name in ("cuda", "triton", "reference") if not told[name])
    assert "on a CPU, not on cuda" in told["native"]
