"""Run by test_cluster.py as a driver of its own: one engine, its death and revival, then generation until it is stopped.

    python cluster_driver.py MODEL_FOLDER RUN_FOLDER through-death|at-once

Prints one JSON object per line: what happened, at the end {"generating": …} with the ids of all processes that it started.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from moerl.cluster.engines import EnginePool
from moerl.cluster.runtime import ray_running
from moerl.config.schema import Config, Engine, Model
from moerl.errors import EngineError
from moerl.models import read_spec
from moerl.models.shard import Shard
from moerl.reshard.sync import WeightSync
from moerl.rollout.sample import Prompt

PROMPTS = [Prompt(i, "", [3 + i, 13, 4 + i, 15], "0") for i in range(4)]


def say(**facts):
    print(json.dumps(facts), flush=True)


def descendants():
    """Ids of all living processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, front = [], [os.getpid()]
    while front:
        front = [pid for pid, parent in parents.items() if parent in front]
        found += front
    return found


def engine_processes():
    return [pid for pid in descendants() if b"sglang" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main(model, folder, mode):
    config = Config(
        model=Model(path=model),
        engine=Engine(device="cpu", max_running_requests=8, max_total_tokens=4096, start_timeout_s=400),
    )
    spec = read_spec(model)
    weights = load_file(Path(model) / "model.safetensors")
    shards = [Shard(entry, torch.cat([weights[name] for name in entry.hf]), 0, 1) for entry in spec.entries()]

    def generate(pool, tokens):
        return pool.generate(PROMPTS, group_size=2, max_new_tokens=tokens, temperature=1.0)

    with ray_running(None) as runtime, EnginePool(config, spec, runtime, log_dir=Path(folder)) as pool:
        sync = WeightSync(spec, dtype=torch.bfloat16, bucket_mib=1.0, verify=True, timeout_s=120, link=pool)
        if mode == "through-death":
            sync.push(shards, 1)
            groups = generate(pool, 8)
            say(
                prompts=[group.prompt_id for group in groups],
                versions=groups[0].samples[0].versions,
                traces=len(groups[0].samples[0].trace),
            )
            (server,) = (pid for pid in engine_processes() if b"launch_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.killpg(server, signal.SIGKILL)
            start = time.monotonic()
            try:
                generate(pool, 8)
            except EngineError as error:
                say(died=str(error), seconds=time.monotonic() - start)
            say(restarted=pool.restart_dead(), version=pool.version)
            say(versions=sync.push(shards, 2).engine_versions)
        say(generating=descendants())
        while True:
            generate(pool, 64)


if __name__ == "__main__":
    main(*sys.argv[1:])
