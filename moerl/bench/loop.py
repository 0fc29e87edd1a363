"""`moerl bench loop`: what generating beside training gains, as ratios within one run.

    max_lag 0:  generate | train, sync | generate | train, sync ...     both sides are slowed down, so that they take equally long
    max_lag 2:  generate   generate   generate ...
                    train, sync   train, sync ...

One run of the real loop on a tiny DeepSeek-V3: a real SGLang engine, real Megatron, real weight updates. First it takes turns, then it goes
on with a lag. No loop can take less time for a step than the longer of generation and training, which are measured while they take
turns; with both equal, that is half of what taking turns takes.

What is slowed down, and why: engine and trainer have devices of their own, but here they share a few cores, and beside each other would
measure those. So each sleeps for most of a step: the engine in every forward pass, by SGLang's own switch, and the trainer before its last
optimizer update, for what is missing until it has worked as long as generation took alone. Waits, calls, transfers and updates are not
touched; they are what the loop can lose time by. (Beside training, slots of completions that end early are filled at once, so that
generation itself takes a little less than alone.)

Beside it, the simulator with lengths that have a long tail, where taking turns leaves most slots idle.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.buffer.simulate import Cluster, Outcome, simulate
from moerl.config.schema import Buffer, Config

if TYPE_CHECKING:
    from moerl.train.run import Run

MAX_LAG, SIM_MAX_LAG = 2, 4
FREE_STEPS, SYNC_STEPS, ASYNC_STEPS = 3, 5, 12
RAMP_STEPS = 3
"""Steps that are not counted: at the start, and after the change to a lag, whose first groups are generated while nothing is trained."""
LEAST_S, TIMES = 3.0, 3.0
"""Generation is to take so many times what the slower side takes by itself, and at least so many seconds."""
_GROUPS, _SIZE, _NEW_TOKENS = 8, 4, 32
_MODEL = {"hidden": 64, "layers": 3, "experts": 16, "topk": 4, "groups": 4, "group_topk": 2}

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
"""256 slots for 1024 completions a step, the longest of which takes as long as two steps at full speed; the 95th percentile of the lengths
is 8 times their median. Training is as expensive as generation."""


@dataclass(frozen=True)
class Pace:
    """Means over some steps.

    Attributes:
        step_s: seconds from one step to the next.
        waits_s: of them, in which the trainer waits for groups; work_s: in which it does anything else, the update included; after_s: of
            those, after the optimizer's update.
        busy: share of the engine's slots that were in use.
        paused_s: seconds a step in which the engine was paused for the update.
        lag: highest that was trained.
        dropped: groups that were generated and not trained, in all.
    """

    step_s: float
    waits_s: float
    work_s: float
    after_s: float
    busy: float
    paused_s: float
    lag: int
    dropped: int


def main(*, as_json: bool = False) -> int:
    """Measure and print the result."""
    turns, ahead = measure()
    paced, alternating = simulate(replace(LONG_TAIL, buffer=Buffer(max_lag=SIM_MAX_LAG))), simulate(LONG_TAIL)
    found = figures(turns, ahead, paced, alternating)
    for name, pace in (("taking turns", turns), (f"max lag {MAX_LAG}", ahead)):
        print(
            f"{name:<14}{pace.step_s:6.2f} s a step: trainer waits {pace.waits_s:.2f} s and works {pace.work_s:.2f} s; "
            f"engine busy {pace.busy:.2f}, paused {pace.paused_s:.2f} s"
        )
    bound_s = max(turns.waits_s, turns.work_s)
    print(f"max lag {MAX_LAG} is x {found['async_over_sync']:.2f} of taking turns; the bound is {bound_s:.2f} s a step")
    print(f"simulated, long tail: {alternating.share:.3f} of the bound taking turns, {paced.share:.3f} at max lag {SIM_MAX_LAG}")
    if as_json:
        print(json.dumps(found))
    return 0


def figures(turns: Pace, ahead: Pace, paced: Outcome, alternating: Outcome) -> dict[str, float]:
    """The result: of the run taking turns and with a lag, and of the simulation with a lag and taking turns."""
    return {
        "async_over_sync": round(turns.step_s / ahead.step_s, 3),
        "share_of_bound": round(max(turns.waits_s, turns.work_s) / ahead.step_s, 3),
        "sim_share_of_bound": round(paced.share, 4),
        "sim_sync_share_of_bound": round(alternating.share, 4),
        "max_lag_allowed": MAX_LAG,
        "max_lag_seen": ahead.lag,
        "groups_dropped": ahead.dropped + int(paced.figures["buffer/refused_groups"]),
    }


def measure() -> tuple[Pace, Pace]:
    """(taking turns, with a lag), one after the other with one engine, in this process, which becomes a Megatron process."""
    from moerl.convert.tiny import tiny_config, write_tiny
    from moerl.models import read_spec
    from moerl.train import platform
    from moerl.train.launch import Options

    platform.quiet()
    platform.install(platform.pick_device("cpu"))
    from moerl.train.loop import push
    from moerl.train.run import open_run

    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        write_tiny(Path(folder) / "model", tiny_config(**_MODEL))
        config = Config.model_validate(_settings(Path(folder)))
        with open_run(config, read_spec(config.model.path), Options(overwrite=True)) as run:
            push(run)
            _steps(run, RAMP_STEPS)
            free = _steps(run, FREE_STEPS)
            target_s = max(LEAST_S, TIMES * free.waits_s, TIMES * free.work_s)
            run.source.pool.call("slow_down", forward_s=(target_s - free.waits_s) / (_NEW_TOKENS + 1))
            slowed = _steps(run, FREE_STEPS)
            _stretch(run, slowed.waits_s - slowed.after_s)
            turns = _steps(run, SYNC_STEPS)
            with _ahead(run, Path(folder) / "ahead"):
                _steps(run, RAMP_STEPS)
                return turns, _steps(run, ASYNC_STEPS)


def _stretch(run: "Run", seconds: float) -> None:
    """From now on a step takes so long at least from its groups' arrival to the optimizer's update."""
    phase, began = run.phase, 0.0

    @contextmanager
    def slower(name: str) -> Iterator[None]:
        nonlocal began
        with phase(name):
            if name == "pack":
                began = time.perf_counter()
            elif name == "optimizer":
                time.sleep(max(0.0, began + seconds - time.perf_counter()))
            yield

    run.phase = slower


def _steps(run: "Run", count: int) -> Pace:
    """Train so many steps."""
    from moerl.train.loop import step_once

    first, start = run.progress.step, time.perf_counter()
    for _ in range(count):
        step_once(run)
    step_s = (time.perf_counter() - start) / count
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["step"] >= first]
    waits_s = sum(record["time/rollout"] for record in records) / count
    return Pace(
        step_s=step_s,
        waits_s=waits_s,
        work_s=step_s - waits_s,
        after_s=sum(record["time/sync"] + record["time/checkpoint"] for record in records) / count,
        busy=sum(record["buffer/engines_busy_share"] for record in records) / count,
        paused_s=sum(record.get("engine/0/paused_s", 0.0) for record in records) / count,
        lag=int(max(record["buffer/lag_highest"] for record in records)),
        dropped=int(sum(record["buffer/refused_groups"] for record in records)),
    )


@contextmanager
def _ahead(run: "Run", folder: Path) -> Iterator[None]:
    """The run goes on where it is, with the same engine, but with a lag."""
    from moerl.cluster.streamed import Streamed
    from moerl.train.source import sampling

    config, live, at = run.config.model_copy(update={"buffer": Buffer(max_lag=MAX_LAG)}), run.source, run.progress
    live.stream.stop()
    with Streamed(config, live.task.train, sampling(config, run.spec), folder, step=at.step, position=at.position) as stream:
        stream.use(live.pool.actors)
        stream.published(at.version)
        run.config, run.trainer = config, replace(run.trainer, config=config)
        run.source = replace(live, config=config, stream=stream)
        yield


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
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
        "train": {"device": "cpu", "steps": 10_000, "lr": 1e-9, "tokens_per_microbatch": 4096},
        "sync": {"bucket_mib": 8.0},
        "checkpoint": {"at_end": False, "export_hf": False},
        "diagnostics": {"evaluate": False, "mismatch_every_steps": 0},
        "observe": {"console": False},
    }
