"""Each known cause, planted in a recording, is the first finding; a clean recording has none of them."""

from dataclasses import replace

import numpy as np
import pytest

from moerl.report import capture
from moerl.report.summary import report_run
from tests.unit.report.router_model import World, plant, record

FAULTS = {
    "missing-layers", "zero-rows", "repeated-ids", "repeated-rows", "moved-layers", "moved-positions", "swapped-experts", "bias-apart",
    "newer-rows", "stale-rows", "bad-logprobs", "router-precision", "one-way-flips", "clear-flips", "odd-samples", "other-gap",
    "extreme-ratios",
}  # fmt: skip


def found(tmp_path, meta, rows, biases=None) -> list[dict]:
    capture.write(tmp_path / capture.FOLDER, meta, rows, biases)
    return report_run(tmp_path)["findings"]


@pytest.mark.parametrize(("seed", "noise"), [(0, 4e-4), (5, 4e-4), (1, 2e-3)])
def test_a_clean_recording_has_no_fault(tmp_path, seed: int, noise: float) -> None:
    findings = found(tmp_path, *record(World(seed=seed, noise=noise)))
    assert not FAULTS & {finding["id"] for finding in findings}
    assert "sound" in {finding["id"] for finding in findings}
    assert "replay-works" in {finding["id"] for finding in findings}


@pytest.mark.parametrize(
    ("fault", "identity", "words"),
    [
        ("layer", "moved-layers", ["1 layer(s) too late", "2 fits 1"]),
        ("position", "moved-positions", ["shifted by 1 position(s) in 64 of 64 samples", "i-1"]),
        ("zero", "zero-rows", ["of the rows carry no routes"]),
        ("swap", "swapped-experts", ["in layer 3"]),
        ("missing", "missing-layers", ["layer 5"]),
        ("twice", "repeated-ids", ["name an expert twice"]),
        ("copies", "repeated-rows", ["repeat the row before"]),
    ],
)
def test_a_planted_fault_is_the_first_finding(tmp_path, fault: str, identity: str, words: list[str]) -> None:
    meta, rows, biases = record(World(seed=5))
    first = found(tmp_path, meta, plant(rows, fault, np.random.default_rng(1)), biases)[0]
    assert (first["severity"], first["id"]) == ("error", identity)
    for word in words:
        assert word in first["title"] + first["evidence"]


def test_two_swapped_experts_are_named(tmp_path) -> None:
    meta, rows, _ = record(World(prompts=40, seed=2))
    ids = rows.engine_ids.copy()
    busy = np.bincount(ids[:, 4].ravel(), minlength=64).argsort()[-2:]
    ids[:, 4] = np.select([ids[:, 4] == busy[0], ids[:, 4] == busy[1]], [busy[1], busy[0]], ids[:, 4])
    first = found(tmp_path, meta, replace(rows, engine_ids=ids))[0]
    assert first["id"] == "swapped-experts"
    assert f"{min(busy)} -> {max(busy)}" in first["evidence"]
    assert "layer 5" in first["title"]


@pytest.mark.parametrize("recorded", [True, False])
def test_an_unsynced_bias_is_named_with_its_layer_and_version(tmp_path, recorded: bool) -> None:
    meta, rows, biases = record(World(stale_layers=((3, 0.02),)))
    first = found(tmp_path, meta, rows, biases if recorded else None)[0]
    assert first["id"] == ("bias-apart" if recorded else "one-way-flips")
    assert "layer 4" in first["title"]
    assert "version 11" in first["title"]
    assert "bias" in first["title"] + first["advice"]


def test_rows_of_older_weights_are_named(tmp_path) -> None:
    first = found(tmp_path, *record(World(old_samples=0.3)))[0]
    assert (first["severity"], first["id"]) == ("warning", "stale-rows")
    assert "Versions 10;" in first["evidence"]


def test_lag_alone_is_no_fault(tmp_path) -> None:
    meta, rows, _ = record(World())
    findings = found(tmp_path, replace(meta, trainer_version=12), rows)
    assert {finding["severity"] for finding in findings if finding["id"] == "stale-rows"} == {"note"}


def test_versions_that_run_backwards_are_an_error(tmp_path) -> None:
    meta, rows, _ = record(World())
    findings = found(tmp_path, replace(meta, trainer_version=10), rows)
    assert findings[0]["id"] == "newer-rows"


@pytest.mark.parametrize("stated", [True, False])
def test_a_router_in_bfloat16_is_named(tmp_path, stated: bool) -> None:
    meta, rows, biases = record(World(coarse=not stated))
    first = found(tmp_path, replace(meta, router_dtype="bfloat16" if stated else ""), rows, biases)[0]
    assert (first["severity"], first["id"]) == ("warning", "router-precision")
    assert ("bfloat16" if stated else "exactly 0") in first["evidence"]


def test_a_gap_that_replay_leaves_is_named(tmp_path) -> None:
    meta, rows, _ = record(World())
    shift = np.float32(0.2) * np.random.default_rng(0).standard_normal(len(rows)).astype(np.float32)
    moved = {f"{mode}_logprob": getattr(rows, f"{mode}_logprob") + shift for mode in capture.MODES}
    assert found(tmp_path, meta, replace(rows, **moved))[0]["id"] == "other-gap"


def test_samples_of_another_request_are_named(tmp_path) -> None:
    meta, rows, _ = record(World(seed=3))
    few = (rows.prompt_id == 4) & (rows.sample < 3)
    ids = rows.engine_ids.copy()
    ids[few] = ids[(rows.prompt_id == 9) & (rows.sample < 3)]
    findings = found(tmp_path, meta, replace(rows, engine_ids=ids))
    assert "odd-samples" in {finding["id"] for finding in findings}
