"""The report's numbers against the same numbers written out as plain loops over the raw rows."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from moerl.report import capture, chunk
from moerl.report.chunk import prepare
from moerl.report.stats import bands, half_bins, implied_error, log_edges, middles_of
from moerl.report.summary import report_run
from tests.unit.report.router_model import World, record

WORLD = World(prompts=5, group=3, noise=6e-3, old_samples=0.4, seed=3)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    run = tmp_path_factory.mktemp("run")
    meta, rows, biases = record(WORLD)
    half = len(rows) // 2 // 39 * 39
    capture.write(run / capture.FOLDER, meta, rows, biases)
    capture.write(run / capture.FOLDER, capture.Meta(**{**vars(meta), "step": 8}), rows.take(slice(0, half)))
    return report_run(run)


def raw() -> list[dict]:
    """All rows of both steps as dictionaries."""
    _, rows, _ = record(WORLD)
    half = len(rows) // 2 // 39 * 39
    found = []
    for i in [*range(len(rows)), *range(half)]:
        entry = {name: getattr(rows, name)[i].item() for name in capture.SCALARS}
        entry["engine"] = [set(ids.tolist()) for ids in rows.engine_ids[i]]
        entry["trainer"] = [set(ids.tolist()) for ids in rows.trainer_ids[i]]
        entry["flips"] = [layer for layer in range(6) if entry["engine"][layer] != entry["trainer"][layer]]
        entry["margin"] = rows.margin[i].tolist()
        entry["mass"] = rows.flipped_mass[i].tolist()
        found.append(entry)
    return found


def test_flips(report) -> None:
    rows = raw()
    count = len(rows)
    assert report["rows"] == count
    assert report["flip_share"] == pytest.approx(sum(len(row["flips"]) for row in rows) / count / 6)
    assert report["tokens_with_flip"] == pytest.approx(sum(bool(row["flips"]) for row in rows) / count)
    for i, found in enumerate(report["flips"]["by_layer"]):
        jaccard = sum(len(row["engine"][i] & row["trainer"][i]) / len(row["engine"][i] | row["trainer"][i]) for row in rows) / count
        assert found["share"] == pytest.approx(sum(i in row["flips"] for row in rows) / count) == report["flip_share_by_layer"][i]
        assert found["jaccard"] == pytest.approx(jaccard)
        assert found["first_share"] == pytest.approx(sum(row["flips"][:1] == [i] for row in rows) / count)
    for found in report["flips"]["by_position"]:
        here = [row for row in rows if found["from"] <= row["position"] <= found["to"]]
        assert (found["rows"], found["share"]) == (len(here), pytest.approx(sum(len(row["flips"]) for row in here) / len(here) / 6))
    heat = report["flips"]["heat"]
    place = heat["edges"].index(12)
    here = [row for row in rows if heat["edges"][place] <= row["position"] < heat["edges"][place + 1]]
    assert heat["share"][2][place] == pytest.approx(sum(2 in row["flips"] for row in here) / len(here))
    for found in report["flips"]["by_kind"]:
        here = [row for row in rows if row["response"] == (found["kind"] == "response")]
        assert (found["rows"], found["share"]) == (len(here), pytest.approx(sum(len(row["flips"]) for row in here) / len(here) / 6))
    for found in report["flips"]["by_lag"]:
        here = [row for row in rows if WORLD.version - row["version"] == found["lag"]]
        assert (found["rows"], found["share"]) == (len(here), pytest.approx(sum(len(row["flips"]) for row in here) / len(here) / 6))
    occurrences = Counter(row["token"] for row in rows)
    for found in report["flips"]["by_frequency"]:
        here = [row for row in rows if found["from"] <= occurrences[row["token"]] <= found["to"]]
        assert (found["rows"], found["share"]) == (len(here), pytest.approx(sum(len(row["flips"]) for row in here) / len(here) / 6))
    assert {found["layers"]: found["rows"] for found in report["flips"]["flipped_layers"]} == Counter(len(row["flips"]) for row in rows)


@pytest.mark.parametrize("mode", capture.MODES)
def test_gap(report, mode: str) -> None:
    d = [row[f"{mode}_logprob"] - row["engine_logprob"] for row in raw() if row["response"]]
    weights = [math.exp(x) for x in d]
    count, suffix = len(d), "" if mode == "natural" else f"_{mode}"
    found = report["gap"]["modes"][mode]
    assert found["tokens"] == count == report["tokens"]
    assert report[f"kl_{mode}"] == found["kl"]["value"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / count, rel=1e-6)
    assert report[f"k1_{mode}"] == pytest.approx(-sum(d) / count)
    assert report[f"abs_diff_{mode}"] == pytest.approx(sum(map(abs, d)) / count)
    assert report[f"ess_{mode}"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / count)
    assert report[f"wide_share{suffix}"] == pytest.approx(sum(abs(x) > math.log(1.2) for x in d) / count)
    for tau in ("1.2", "2", "5", "10"):
        assert found["extreme"][tau]["value"] == pytest.approx(sum(abs(x) > math.log(float(tau)) for x in d) / count)
    assert sum(report["gap"]["histogram"][mode]) == pytest.approx(1)
    steps = report["gap"]["steps"]
    assert [step["step"] for step in steps] == [7, 8]
    weighted = sum(step["modes"][mode]["kl"]["value"] * step["tokens"] for step in steps) / count
    assert weighted == pytest.approx(found["kl"]["value"])


def test_cost_adds_up_and_is_that_of_its_tokens(report) -> None:
    by_count = defaultdict(list)
    for row in raw():
        if row["response"]:
            by_count[len(row["flips"])].append(row["natural_logprob"] - row["engine_logprob"])
    for found in report["cost"]["by_flipped_layers"]:
        d = [x for count in range(found["from"], found["to"] + 1) for x in by_count[count]]
        assert found["tokens"] == len(d)
        assert found["abs_diff"] == pytest.approx(sum(map(abs, d)) / len(d))
    assert sum(found["kl_share"] for found in report["cost"]["by_flipped_layers"]) == pytest.approx(1)
    worst = sorted((abs(row["natural_logprob"] - row["engine_logprob"]) for row in raw() if row["response"]), reverse=True)
    shown = [abs(token["natural_logprob"] - token["engine_logprob"]) for token in report["cost"]["worst_tokens"]]
    np.testing.assert_allclose(shown, worst[: len(shown)])
    samples = defaultdict(list)
    for row in raw()[: len(record(WORLD)[1])]:
        if row["response"]:
            samples[row["prompt_id"], row["sample"]].append(row["natural_logprob"] - row["engine_logprob"])
    worst_sample = max(samples, key=lambda key: sum(math.exp(x) - 1 - x for x in samples[key]))
    first = report["cost"]["worst_samples"][0]
    assert (first["prompt_id"], first["sample"]) == worst_sample


def test_causes(report) -> None:
    rows = raw()
    for i, found in enumerate(report["causes"]["by_layer"]):
        flipped = [row for row in rows if i in row["flips"]]
        groups = [len({e // 8 for e in row["engine"][i] | row["trainer"][i]}) > 4 for row in flipped]
        assert found["group_share"] == pytest.approx(sum(groups) / len(groups))
        assert found["flipped_mass"] == pytest.approx(sum(row["mass"][i] for row in flipped) / len(flipped))
        median = float(np.median([row["margin"][i] for row in rows]))
        assert found["median_margin"] == pytest.approx(median, rel=0.15)  # the middle of a bin: a sixteenth of a decade
        inside = [row["margin"][i] for row, grouped in zip(flipped, groups, strict=True) if not grouped]
        far = sum(margin > median for margin in inside) / len(inside)
        assert found["far_flip_share"] == pytest.approx(far, abs=0.1)
        assert found["bias_diff"] == 0
    for expert in report["causes"]["experts"][:4]:
        i = WORLD.layers.index(expert["layer"])
        assert expert["engine"] == sum(expert["expert"] in row["engine"][i] for row in rows)
        assert expert["trainer"] == sum(expert["expert"] in row["trainer"][i] for row in rows)
        assert expert["gained"] == sum(expert["expert"] in row["engine"][i] - row["trainer"][i] for row in rows)


def test_soundness(report) -> None:
    rows = raw()
    sound = report["soundness"]
    assert {entry["version"]: entry["rows"] for entry in sound["versions"]} == Counter(row["version"] for row in rows)
    for side in ("engine", "trainer"):
        load = Counter(expert for row in rows for expert in row[side][3])
        counts = np.array([load[expert] for expert in range(64)])
        np.testing.assert_allclose(sound[side]["load"][3], counts / counts.sum())
        entry = sound[side]["by_layer"][3]
        assert entry["imbalance"] == pytest.approx(counts.max() / counts.mean())
        shares = counts[counts > 0] / counts.sum()
        assert entry["entropy"] == pytest.approx(-(shares * np.log(shares)).sum() / math.log(64))
        ranks = counts.reshape(4 if side == "engine" else 2, -1).sum(axis=1)
        assert entry["rank_imbalance"] == pytest.approx(ranks.max() / ranks.mean())


def test_how_rows_are_cut_into_chunks_changes_nothing(report, tmp_path, monkeypatch) -> None:
    meta, rows, biases = record(WORLD)
    capture.write(tmp_path / capture.FOLDER, meta, rows, biases)
    whole = report_run(tmp_path)
    monkeypatch.setattr(chunk, "ROWS", 53)
    cut = report_run(tmp_path)
    for part in ("gap", "flips", "soundness", "cost"):
        same(whole[part], cut[part], part)
    assert whole["findings"] == cut["findings"]


@pytest.mark.parametrize(
    "change",
    [
        {"topk": 1, "groups": 1, "group_topk": 1},
        {"topk": 5, "experts": 320, "groups": 1, "group_topk": 1, "layers": (0,)},
        {"prompts": 1, "group": 1, "response_tokens": 1},
        {"prompt_tokens": 1},
    ],
)
@pytest.mark.parametrize("kind", ["whole", "no rows", "one side", "no logprobs"])
def test_odd_sizes_give_a_report_of_finite_numbers(tmp_path, change: dict, kind: str) -> None:
    meta, rows, _ = record(replace(WORLD, **{"prompts": 2, "old_samples": 0.0, **change}))
    if kind == "no rows":
        rows = rows.take(slice(0, 0))
    elif kind == "one side":
        rows = capture.without(rows, "trainer_ids", "margin", "flipped_mass")
    elif kind == "no logprobs":
        rows = replace(rows, **{f"{mode}_logprob": np.full(len(rows), np.nan) for mode in capture.MODES})
    capture.write(tmp_path / capture.FOLDER, meta, rows)
    found = report_run(tmp_path)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["rows"] == len(rows)
    assert (found["flips"] is None) == (kind in ("no rows", "one side"))
    assert (found["kl_natural"] is None) == (kind in ("no rows", "no logprobs"))


def same(a: object, b: object, where: str) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}[{i}]")
    else:
        assert a == (pytest.approx(b) if isinstance(b, float) else b), where


def test_a_band_is_that_of_whole_samples() -> None:
    """Tokens of a sample are equal here, so the band must be that of the samples, not of the tokens."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(400)
    sums = np.stack([values * 50, np.full(400, 50.0)], axis=1)
    (band,) = bands(sums, lambda s: (s[..., 0] / s[..., 1])[..., None])
    assert band["value"] == pytest.approx(values.mean())
    assert (band["high"] - band["low"]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.15)
    (single,) = bands(sums[:1], lambda s: (s[..., 0] / s[..., 1])[..., None])
    assert (single["low"], single["high"]) == (None, None)


def test_the_implied_error_is_the_one_that_was_put_in() -> None:
    rng = np.random.default_rng(1)
    edges = log_edges(1e-7, 1, 16)
    margin = np.abs(0.02 * rng.standard_normal(200_000)).astype(np.float16)
    flipped = margin + 1e-3 * rng.standard_normal(len(margin)) < 0
    counts = np.bincount(half_bins(edges)[margin.view(np.uint16)], minlength=len(edges))
    assert implied_error(counts, flipped.sum(), middles_of(edges)) == pytest.approx(1e-3, rel=0.05)


def test_infinite_logprobs_and_missing_sides_are_no_figures() -> None:
    meta, rows, _ = record(WORLD)
    natural = rows.natural_logprob.copy()
    response = np.flatnonzero(rows.response)
    natural[response[0]], natural[response[1]] = -np.inf, np.nan
    found = prepare(meta, capture.Rows(**{**vars(rows), "natural_logprob": natural}))
    assert found.unusable["natural"] == 1
    assert found.measured["natural"].sum() == len(response) - 2
    alone = prepare(meta, capture.without(rows, "trainer_ids", "margin", "flipped_mass"))
    assert alone.flipped is None
    assert not alone.flips.any()
