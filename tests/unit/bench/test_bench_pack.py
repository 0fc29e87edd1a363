"""The packing benchmark: its bucket holds what it says, its ways move it, its output is as agreed."""

import json

import pytest
import torch

from moerl import cli
from moerl.bench import pack as bench
from moerl.reshard.pack import build

TINY = bench.Sizes(hidden=64, expert_ffn=32, experts=2, heads=8, q_rank=16, kv_rank=8, vocabulary=64, routed=16)


def test_the_bucket_holds_an_engine_ranks_share() -> None:
    boxes, shapes, nbytes = bench.boxes(TINY, torch.float32)
    assert sum(box.nbytes for box in boxes) == nbytes
    gate, up, down = boxes[:3]
    assert shapes[:2] == [(64, 64), (64, 32)]
    assert (gate.tensor, gate.offset, gate.sizes) == (0, 4 * 64, (4, 64))
    assert (up.tensor, up.offset, up.sizes) == (0, (32 + 4) * 64, (4, 64))
    assert (down.tensor, down.offset, down.sizes, down.strides) == (1, 4, (64, 4), (32, 1))
    build(boxes, [torch.empty(shape, device="meta") for shape in shapes], nbytes)


def test_the_size_that_is_measured() -> None:
    boxes, shapes, nbytes = bench.boxes(bench.Sizes(), torch.bfloat16)
    assert 256 << 20 <= nbytes <= 512 << 20
    assert sum(shape.numel() for shape in shapes) * 2 < 3 << 29
    assert {len(box.sizes) for box in boxes} == {2}


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = bench.measure
    monkeypatch.setattr(bench, "measure", lambda sizes: measure(TINY, rounds=2))
    assert cli.main(["bench", "pack", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"pack_vs_memcpy", "unpack_vs_memcpy", "pack_cast_vs_memcpy", "vs_torch_loop", "launches_per_bucket"}
    assert all(value > 0 for value in found.values())


def test_memcpy_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.arange(101, dtype=torch.uint8), torch.zeros(101, dtype=torch.uint8)
    with bench.ThreadPoolExecutor(3) as pool:
        bench._memcpy(target, source, pool, 3)
    assert torch.equal(source, target)
