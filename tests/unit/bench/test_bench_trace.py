"""The codec benchmark: its figures are those of the formats, its shapes those of the models, its output as agreed."""

import json

import numpy as np
import pytest

from moerl import cli
from moerl.bench import trace as bench
from moerl.routing.trace import route_problem

FIELDS = {"narrow_bytes", "packed_bytes", "set_bytes", "sglang_bytes", "bound_bytes"}
FIELDS |= {"narrow_decode_speedup", "set_decode_speedup", "narrow_vs_memcpy"}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return {name: bench.measure(shape, rows=32, rounds=2) for name, shape in bench.SHAPES.items()}


@pytest.mark.parametrize(
    ("model", "sglang", "narrow", "packed", "sets", "bound"),
    [
        ("Qwen3-30B-A3B", 2048, 384, 336, 246, 242),
        ("DeepSeek-V3", 2603, 464, 464, 341, 352),
        ("Kimi-K2", 2603, 960, 540, 405, 400),
        ("Qwen3-Next", 2560, 960, 540, 414, 408),
    ],
)
def test_bytes_per_token(found: dict, model: str, sglang: int, narrow: int, packed: int, sets: int, bound: int) -> None:
    row = found[model]
    assert row["sglang_bytes"] == pytest.approx(sglang, rel=0.02)
    assert (row["narrow_bytes"], row["packed_bytes"], row["set_bytes"]) == (narrow, packed, sets)
    assert row["bound_bytes"] == pytest.approx(bound, abs=0.6)
    assert row["reachable_bound_bytes"] <= row["set_bytes"] < 1.03 * row["reachable_bound_bytes"]


def test_reachable_sets_against_counting() -> None:
    assert bench.reachable_sets(bench.Shape(2, 1, 8, 3, 4, 2)) == 24  # pairs of groups of two: 6 * C(4, 3), and no set in fewer
    assert bench.reachable_sets(bench.Shape(2, 1, 8, 3)) == 56


@pytest.mark.parametrize("model", bench.SHAPES)
def test_random_routes_are_routes_of_the_model(model: str) -> None:
    shape = bench.SHAPES[model]
    ids = bench.random_routes(shape, 20, np.random.default_rng(0))
    assert route_problem(ids, shape.layout) is None
    if shape.groups:
        groups = ids // (shape.experts // shape.groups)
        assert max(len(set(row)) for row in groups.reshape(-1, shape.topk).tolist()) == shape.group_topk


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = bench.measure
    monkeypatch.setattr(bench, "measure", lambda shape: measure(shape, rows=8, rounds=1))
    assert cli.main(["bench", "trace", "--json"]) == 0
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert models.keys() == {"Qwen3-30B-A3B", "DeepSeek-V3", "Kimi-K2", "Qwen3-Next"}
    assert all(row.keys() >= FIELDS for row in models.values())
