"""Made-up runs and results of an analysis for the tests of the page: of any number of steps, with everything or as little as can be."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from moerl.config.schema import Config
from moerl.report import capture

MODES = ("natural", "r2", "replay")
TOKENS = 60
"""Of the vocabulary."""

MARKUP = "</script><img src=x onerror=alert(1)>"
"""A token's text that must stay text."""


def figure(value: float) -> dict[str, float]:
    return {"value": value, "low": 0.8 * value, "high": 1.25 * value}


def write_run(folder: Path, steps: int, *, capture_steps: int = 0, model: str = "runs/models/tiny", layers: int = 4) -> Path:
    """A run folder with `steps` lines of metrics, and recordings of evenly spread ones of them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate({"model": {"path": model}, "buffer": {"max_lag": 2}})
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    lines = [json.dumps({"step": -1, "heldout_accuracy": 0.4, "heldout_greedy_accuracy": 0.6, "time/sync": 0.3})]
    lines += [json.dumps({"step": step, **metrics(rng, step, steps)}) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in np.linspace(0, steps - 1, capture_steps).round().astype(int):
        write_recording(folder / capture.FOLDER, int(step), rng, model, layers)
    return folder


def metrics(rng: np.random.Generator, step: int, steps: int) -> dict[str, Any]:
    """One step's metrics, under the names that training gives them."""
    done, noise = step / max(1, steps - 1), rng.normal(size=8)
    found: dict[str, Any] = {
        "reward": 0.4 + 0.4 * done + 0.02 * noise[0], "solved_share": 0.35 + 0.4 * done + 0.02 * noise[1],
        "uniform_groups_share": 0.2 + 0.2 * done, "response_length": 300 + 100 * done + 8 * noise[2],
        "truncated_share": 0.02, "samples": 256,
        "response_tokens": 76800, "masked_share": 0.0, "clip_share": 0.01, "loss": 0.1 - 0.05 * done, "entropy": 0.6 - 0.2 * done,
        "grad_norm": 0.4 + 0.05 * abs(noise[3]), "lr": 1e-6, "kl_natural": 1e-3 * np.exp(0.2 * noise[4]),
        "kl_replay": 2e-5 * np.exp(0.2 * noise[5]), "ess_replay": 0.999, "natural_flip_share": 0.13 + 0.005 * noise[6],
        "buffer/engines_busy_share": 0.9, "buffer/engines_paced_share": 0.05, "buffer/trainer_busy_share": 0.7,
        "buffer/trainer_sync_share": 0.06,
        "buffer/lag_mean": 1.2, "buffer/lag_highest": 2.0, "buffer/lag_0": 4.0, "buffer/lag_1": 8.0, "buffer/lag_2": 4.0,
        "buffer/refused_groups": float(step % 50 == 7), "buffer/wasted_late_tokens": 900.0 * (step % 50 == 7), "buffer/wasted_tokens": 0.0,
        "kl_lag0": 1e-5, "kl_lag1": 1e-4, "ess_lag0": 1.0, "ess_lag1": 0.99, "fresh/kl_natural": 1e-3, "fresh/kl_replay": 1e-5,
        "fresh/natural_flip_share": 0.13, "engine/0/tokens_per_s": 900.0, "engine/1/tokens_per_s": 880.0, "engine/0/paused_s": 0.1,
        "sync_way": "direct", "sync_attempts": 2 if step % 97 == 5 else 1, "sync_bytes": 223_600_000, "sync_bytes_ratio": 1.0,
        "sync_changed_share": 0.012, "versions_consistent": True, "version": step + 1, "time/rollout": 12.0 + noise[7], "time/pack": 0.2,
        "time/natural": 1.0, "time/forward_backward": 20.0, "time/optimizer": 0.8, "time/sync": 0.9 + 0.05 * abs(noise[0]), "alarms": 0,
    }  # fmt: skip
    if step % 10 == 9:
        found["heldout_accuracy"], found["heldout_greedy_accuracy"] = 0.4 + 0.4 * done, 0.6 + 0.2 * done
    if step % 50 == 7:
        found["buffer/refused_late"] = 1.0
    return found


def write_recording(folder: Path, step: int, rng: np.random.Generator, model: str, layers: int) -> None:
    """A step in which engine and trainer differ in a fifth of the decisions."""
    samples, length = 8, 60
    rows, experts, k = samples * length, 16, 4
    engine = np.argsort(rng.random((rows, layers, experts)), axis=-1)[..., :k]
    trainer = engine.copy()
    flip = rng.random((rows, layers)) < 0.2
    trainer[flip, 0] = (engine[flip].max(axis=-1) + 1) % experts
    token = rng.integers(0, TOKENS, rows)
    position = np.tile(np.arange(length), samples)
    response = position >= 10
    logprob = np.where(response, -rng.exponential(1.0, rows), np.nan)
    gap = rng.normal(size=rows) * np.exp(rng.normal(size=rows) - 4) * (1 + 20 * flip.any(axis=1))
    columns: dict[str, Any] = {
        "prompt_id": np.repeat(np.arange(samples) // 4, length), "sample": np.repeat(np.arange(samples) % 4, length), "position": position,
        "token": token, "next_token": np.r_[token[1:], 0], "response": response, "version": np.full(rows, step),
        "reward": np.repeat(rng.integers(0, 2, samples), length).astype(np.float32), "engine_logprob": logprob,
        "natural_logprob": logprob + gap, "r2_logprob": logprob + gap * 0.8, "replay_logprob": logprob + gap * 0.1,
        "engine_ids": engine, "trainer_ids": trainer, "margin": rng.exponential(0.01, flip.shape),
    }  # fmt: skip
    meta = capture.Meta(step=step, layers=tuple(range(1, layers + 1)), experts=experts, topk=k, trainer_version=step, model=model)
    capture.write(folder, meta, capture.Rows(**columns))


def result(steps: int, *, layers: int = 4, experts: int = 64, seed: int = 0) -> dict[str, Any]:
    """What the analysis of a run of `steps` recorded steps could be, with everything measured."""
    rng = np.random.default_rng(seed)
    names, size = list(range(1, layers + 1)), {"natural": 1e-3, "r2": 9e-4, "replay": 2e-5}
    found: dict[str, Any] = {
        "schema": 1, "name": "runs/made-up", "kind": "run", "sides": ["engine", "trainer"], "against": None,
        "meta": {
            "steps": list(range(steps)), "layers": names, "experts": experts, "topk": 8, "groups": 8, "group_topk": 4,
            "ep": 2, "engine_ep": 1,
            "trainer_dtype": "bfloat16", "engine_dtype": "bfloat16", "router_dtype": "float32", "sources": ["training"],
            "model": "runs/models/tiny", "trainer_versions": list(range(steps)), "engine_versions": list(range(steps)),
        },
        "rows": 1000 * steps, "samples": 32 * steps, "tokens": 800 * steps, "steps": steps, "replay_removes": 0.98, "flip_share": 0.13,
        "tokens_with_flip": 0.4, "score_error": 1.3e-4, "stale_share": 0.0, "zero_rows": 0, "repeated_ids": 0, "dead_experts": 3,
        "max_imbalance": 2.4, "bad_logprobs": 0, "flip_share_by_layer": rng.uniform(0.05, 0.2, layers).tolist(),
        "gap": _gap(rng, steps, size), "flips": _flips(rng, names), "causes": _causes(rng, names), "cost": _cost(),
        "soundness": _soundness(rng, names, experts, steps), "findings": _findings(),
    }  # fmt: skip
    for mode, kl in size.items():
        found |= {f"kl_{mode}": kl, f"k1_{mode}": kl / 3, f"abs_diff_{mode}": kl**0.5 / 4, f"ess_{mode}": 1 - kl}
    return found


def _gap(rng: np.random.Generator, steps: int, size: dict[str, float]) -> dict[str, Any]:
    edges = np.r_[-np.logspace(1, -4, 21), np.logspace(-4, 1, 21)]
    shares = np.exp(-(np.linspace(-3, 3, len(edges) - 1) ** 2))

    def of(kl: float) -> dict[str, Any]:
        extreme = {tau: figure(kl * 10 / float(tau)) for tau in ("1.2", "2", "5", "10")}
        return {
            "tokens": 800,
            "kl": figure(kl),
            "k1": figure(kl / 3),
            "abs_diff": figure(kl**0.5 / 4),
            "ess": figure(1 - kl),
            "extreme": extreme,
        }

    def at(kl: float) -> dict[str, Any]:
        known = of(kl * float(np.exp(0.2 * rng.normal())))
        return {name: known[name] for name in ("kl", "abs_diff", "ess")} | {
            "extreme": known["extreme"]["2"],
            "wide": known["extreme"]["1.2"],
        }

    each = [
        {
            "step": step, "trainer_version": step, "rows": 1000, "samples": 32, "tokens": 800, "flip_share": figure(rng.uniform(0.1, 0.15)),
            "tokens_with_flip": figure(rng.uniform(0.35, 0.45)), "modes": {mode: at(size[mode]) for mode in MODES},
        }
        for step in range(steps)
    ]  # fmt: skip
    histogram = {"edges": edges.tolist(), **{mode: (shares / shares.sum()).tolist() for mode in MODES}}
    parts = {"routing": figure(size["natural"] - size["replay"]), "remainder": figure(size["replay"])}
    return {"modes": {mode: of(kl) for mode, kl in size.items()}, "parts": parts, "steps": each, "histogram": histogram}


def _flips(rng: np.random.Generator, layers: list[int]) -> dict[str, Any]:
    edges = [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    rows = {"rows": 500, "share": 0.13, "tokens_with_flip": 0.4}
    return {
        "by_layer": [{"layer": layer, "share": rng.uniform(0.05, 0.2), "jaccard": 0.95, "first_share": 0.05} for layer in layers],
        "heat": {"edges": edges, "share": rng.uniform(0, 0.3, (len(layers), len(edges) - 1)).tolist()},
        "by_position": [{"from": a, "to": b - 1, **rows} for a, b in itertools.pairwise(edges)],
        "by_kind": [{"kind": kind, **rows} for kind in ("prompt", "response")],
        "by_lag": [{"lag": lag, **rows, "tokens": 400, "kl_natural": 1e-3 * (1 + lag), "kl_replay": 1e-4 * (1 + lag)} for lag in range(3)],
        "by_version": [{"version": v, "rows": 500, "share": 0.1, "by_layer": rng.uniform(0, 0.2, len(layers)).tolist()} for v in range(6)],
        "by_frequency": [{"from": 4**i, "to": 4 ** (i + 1) - 1, "token_ids": 30, "rows": 400, "share": 0.2 - 0.03 * i} for i in range(4)],
        "flipped_layers": [{"layers": n, "rows": 100, "share": 0.6 if n == 0 else 0.4 / len(layers)} for n in range(len(layers) + 1)],
    }  # fmt: skip


def _causes(rng: np.random.Generator, layers: list[int]) -> dict[str, Any]:
    edges = np.logspace(-6, 0, 31)
    middle = np.linspace(-3, 3, 30)
    same, flipped = np.exp(-((middle - 1) ** 2)), np.exp(-((middle + 1.5) ** 2))
    by_layer = [
        {
            "layer": layer, "score_error": rng.uniform(1e-4, 3e-4), "median_margin": 3e-3, "median_margin_flipped": 4e-4, "ties": 0.001,
            "far_flip_share": 0.01, "group_share": 0.1, "flipped_mass": 0.08, "direction": 0.1, "bias_diff": 0.0,
        }
        for layer in layers
    ]  # fmt: skip
    match = np.full((len(layers), len(layers)), 0.15) + 0.8 * np.eye(len(layers))
    return {
        "margin": {
            "edges": edges.tolist(), "same": (0.87 * same / same.sum()).tolist(), "flipped": (0.13 * flipped / flipped.sum()).tolist(),
            "flip_share": (0.5 / (1 + np.exp(2 * middle))).tolist(), "expected": (0.5 / (1 + np.exp(2.2 * middle))).tolist(),
        },
        "by_layer": by_layer, "flipped_mass": {"edges": [0, 0.1, 0.2, 0.4, 1.0], "share": [0.7, 0.2, 0.08, 0.02], "mean": 0.08},
        "group_share": 0.12,
        "bias": [{"step": step, "engine_version": step, "layer": 2, "max_diff": 0.0, "expert": 3} for step in range(3)],
        "experts": [{"layer": 2, "expert": 7, "engine": 40, "trainer": 90, "gained": 60, "lost": 10}],
        "layer_match": match.tolist(), "position_match": {"-2": 0.15, "-1": 0.2, "0": 0.96, "1": 0.2, "2": 0.15},
    }  # fmt: skip


def _cost() -> dict[str, Any]:
    token = {
        "step": 0, "prompt_id": 3, "sample": 1, "position": 17, "version": 0, "token": 5, "next_token": 9, "text": MARKUP,
        "before": "12+7=",
        "engine_logprob": -0.7, "natural_logprob": -3.1, "r2_logprob": -2.9, "replay_logprob": -0.72, "flipped_layers": [1, 3],
    }  # fmt: skip
    sample = {
        "step": 0, "prompt_id": 3, "sample": 1, "reward": 1.0, "tokens": 40, "abs_diff": 0.2, "kl": 0.03, "replay_kl": 1e-4,
        "flip_share": 0.3, "text": MARKUP, "token_ids": [5, 9],
    }  # fmt: skip
    same = {"tokens": 500, "token_share": 0.25, "kl_share": 0.25, "replay_abs_diff": 0.01, "replay_kl": 1e-4}
    return {
        "by_flipped_layers": [{"from": n, "to": n, "abs_diff": 0.01 * 2**n, "kl": 1e-4 * 4**n, **same} for n in range(4)],
        "by_first_layer": [{"layer": layer, "tokens": 100, "abs_diff": 0.01, "kl": 1e-3} for layer in (1, 2, 3, 4, None)],
        "worst_tokens": [token] * 10,
        "worst_samples": [sample] * 5,
    }


def _soundness(rng: np.random.Generator, layers: list[int], experts: int, steps: int) -> dict[str, Any]:
    def side() -> dict[str, Any]:
        load = rng.dirichlet(np.full(experts, 4.0), len(layers))
        each = [
            {
                "layer": layer,
                "imbalance": float(row.max() * experts),
                "entropy": 0.97,
                "dead": [3] if layer == 2 else [],
                "rank_imbalance": 1.1,
            }
            for layer, row in zip(layers, load, strict=True)
        ]
        return {"by_layer": each, "load": load.tolist()}

    return {
        "versions": [{"version": v, "rows": 1000, "share": 1 / steps} for v in range(steps)],
        "lags": [{"lag": lag, "rows": 300, "share": 0.3} for lag in range(3)],
        "mixed_samples": 0, "decreasing_samples": 0, "newer_rows": 0, "zero_rows": 0, "repeated_ids": 0, "repeated_rows": 0.002,
        "padding_share": None,
        "missing_layers": [], "engine": side(), "trainer": side(),
    }  # fmt: skip


def _findings() -> list[dict[str, str]]:
    return [
        {"severity": "warning", "id": "flips", "title": "13 % of the decisions flip", "evidence": f"In layer 2 {MARKUP}",
         "advice": 'Keep `replay.actor = "rollout"`.'},
        {"severity": "good", "id": "replay", "title": "Replay removes 98 % of the gap", "evidence": "KL 1e-3 to 2e-5", "advice": ""},
    ]  # fmt: skip


def one_sided(steps: int) -> dict[str, Any]:
    """What remains where the routes of one side were recorded, and no logprobs of the trainer."""
    found = result(steps)
    for name in [name for name in found if name.split("_")[0] in ("kl", "k1", "abs", "ess")]:
        found[name] = None
    empty = {
        "histogram": {"edges": found["gap"]["histogram"]["edges"], **dict.fromkeys(MODES)},
        "parts": None,
        "modes": dict.fromkeys(MODES),
    }
    nothing = {"flip_share": None, "tokens_with_flip": None, "modes": dict.fromkeys(MODES)}
    empty["steps"] = [one | nothing for one in found["gap"]["steps"]]
    found |= {"gap": empty, "flips": None, "causes": None, "sides": ["engine", None], "flip_share": None, "tokens_with_flip": None}
    found |= {"replay_removes": None, "score_error": None, "findings": []}
    found["cost"] = {"by_flipped_layers": [], "by_first_layer": [], "worst_tokens": [], "worst_samples": []}
    found["soundness"]["trainer"] = None
    return found
