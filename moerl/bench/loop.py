"""`moerl bench loop`: what generating beside training gains, as ratios within one run.

    max_lag 0:  generate | train, sync | generate | train, sync ...     the engine is slowed down until both take as long
    max_lag 2:  generate   generate   generate ...
                    train, sync   train, sync ...

Both runs are the real loop on a tiny DeepSeek-V3: a real SGLang engine, real Megatron, real weight updates. The engine is throttled with
its own switch (every forward pass sleeps), since on a few cores engine and trainer would otherwise compete for them. No loop can take
less time for a step than the longer of generation and training, which were measured one at a time; with both equal, that is half of
what taking turns takes. Beside it, the simulator with lengths that have a long tail, where taking turns leaves most slots idle.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moerl.buffer.simulate import Cluster, simulate
from moerl.config.schema import Buffer, Config

MAX_LAG, SIM_MAX_LAG = 2, 4
WARM_STEPS, SYNC_STEPS, ASYNC_STEPS = 3, 8, 16
_GROUPS, _SIZE, _NEW_TOKENS = 8, 8, 24

LONG_TAIL = Cluster(
    engines=4,
    slots=64,
    prompts_per_step=128,
    group_size=8,
    max_new_tokens=16_000,
    length_median=1000,
    length_p95=8000,
    steps=80,
    prompts=2000,
    decode_base_s=0.015,
    decode_per_running_s=1e-4,
    train_s_per_token=8e-5,
)
"""Training as expensive as generation; the 95th percentile of the lengths is 8 times their median."""


@dataclass(frozen=True)
class Found:
    """Attributes:
    generation_s, training_s: median seconds of each for one step, taking turns; training includes the update of the engine.
    sync_step_s, async_step_s: median seconds of a whole step.
    lag: highest that was trained.
    dropped: groups that were generated and not trained.
    """

    generation_s: float
    training_s: float
    sync_step_s: float
    async_step_s: float
    lag: int
    dropped: int


def main(*, as_json: bool = False) -> int:
    """Measure and print the result."""
    found = measure()
    bound = max(found.generation_s, found.training_s)
    paced = simulate(replace(LONG_TAIL, buffer=Buffer(max_lag=SIM_MAX_LAG)))
    turns = simulate(LONG_TAIL)
    print(f"generation {found.generation_s:.2f} s and training {found.training_s:.2f} s a step, one at a time")
    print(f"taking turns      {found.sync_step_s:.2f} s a step")
    gain = found.sync_step_s / found.async_step_s
    print(f"max lag {MAX_LAG}         {found.async_step_s:.2f} s a step, x {gain:.2f}; the bound is {bound:.2f} s")
    print(f"simulated, long tail: {turns.share:.3f} of the bound taking turns, {paced.share:.3f} at max lag {SIM_MAX_LAG}")
    if as_json:
        figures = {
            "async_over_sync": round(gain, 3),
            "share_of_bound": round(bound / found.async_step_s, 3),
            "sim_share_of_bound": round(paced.share, 4),
            "sim_sync_share_of_bound": round(turns.share, 4),
            "max_lag_allowed": MAX_LAG,
            "max_lag_seen": found.lag,
            "groups_dropped": found.dropped + int(paced.figures["buffer/refused_groups"]),
        }
        print(json.dumps(figures))
    return 0


def measure() -> Found:
    """Both runs, one after the other, in this process, which becomes a Megatron process."""
    from moerl.convert.tiny import tiny_config, write_tiny
    from moerl.train import platform

    platform.quiet()
    platform.install(platform.pick_device("cpu"))
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        root = Path(folder)
        write_tiny(root / "model", tiny_config())
        generation, training, throttle, sync = _taking_turns(root)
        steps, records = _run(root / "async", MAX_LAG, WARM_STEPS + ASYNC_STEPS, throttle)
    return Found(
        generation_s=generation,
        training_s=training,
        sync_step_s=sync,
        async_step_s=statistics.median(steps[WARM_STEPS:]),
        lag=int(max(record["buffer/lag_highest"] for record in records)),
        dropped=int(sum(record["buffer/refused_groups"] for record in records)),
    )


def _taking_turns(root: Path) -> tuple[float, float, float, float]:
    """(seconds of generation and of training for a step, seconds that each forward pass of the engine must sleep, seconds of a step)."""
    _, free = _run(root / "free", 0, WARM_STEPS + 3, 0.0)
    passes = _NEW_TOKENS + 1
    generation, training = _halves(free[WARM_STEPS:])
    throttle = max(0.001, (training - generation) / passes)
    steps, records = _run(root / "sync", 0, WARM_STEPS + SYNC_STEPS, throttle)
    return *_halves(records[WARM_STEPS:]), throttle, statistics.median(steps[WARM_STEPS:])


def _halves(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Median seconds of waiting for groups, and of everything else."""
    times = [{name: value for name, value in record.items() if name.startswith("time/")} for record in records]
    return tuple(
        statistics.median(sum(value for name, value in one.items() if (name == "time/rollout") == waits) for one in times)
        for waits in (True, False)
    )


def _run(folder: Path, max_lag: int, steps: int, throttle_s: float) -> tuple[list[float], list[dict[str, Any]]]:
    """(seconds of each step, its metrics)"""
    from moerl.models import read_spec
    from moerl.train.launch import Options
    from moerl.train.loop import push, step_once
    from moerl.train.run import open_run

    config = Config.model_validate(_settings(folder, max_lag, steps))
    seconds = []
    with open_run(config, read_spec(config.model.path), Options(overwrite=True)) as run:
        run.source.pool.call("slow_down", forward_s=throttle_s)
        push(run)
        for _ in range(steps):
            start = time.perf_counter()
            step_once(run)
            seconds.append(time.perf_counter() - start)
    return seconds, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _settings(folder: Path, max_lag: int, steps: int) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder)},
        "model": {"path": str(folder.parent / "model")},
        "task": {
            "options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            "strip_question": "(State the final answer to the following arithmetic problem:)|(\\s)",
            "prompts": 500,
            "heldout_prompts": 0,
            "reward": "exact_integer",
        },
        "rollout": {
            "prompts_per_step": _GROUPS,
            "group_size": _SIZE,
            "max_prompt_tokens": 16,
            "max_new_tokens": _NEW_TOKENS,
            "save": False,
        },
        "engine": {"device": "cpu", "max_running_requests": _GROUPS * _SIZE, "max_total_tokens": 8192},
        # Nothing is to be learned: a model that learned to stop would be quicker at the end than at the beginning.
        "train": {"device": "cpu", "steps": steps, "lr": 1e-9, "tokens_per_microbatch": 1024},
        "objective": {"epochs_per_batch": 2},
        "buffer": {"max_lag": max_lag},
        "sync": {"bucket_mib": 8.0},
        "checkpoint": {"at_end": False, "export_hf": False},
        "diagnostics": {"evaluate": False},
        "observe": {"console": False},
    }
