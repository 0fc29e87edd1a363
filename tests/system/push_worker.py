"""One long-lived torchrun rank: real Megatron models under several parallel layouts push their weights into real SGLang servers.

    torchrun --nproc-per-node N push_worker.py JOB.json OUT_FOLDER

JOB.json: {"old": folder, "new": folder, "engines": {name: {"url", "tp"}}, "cases": {name: {"parallel": sizes, "way", "versions": [2]}}}.
Each case gives every engine OLD, as the first version, and then NEW. Rank 0 writes OUT_FOLDER/<case>.json: what each engine then was.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.reshard.sync import SyncReport
from moerl.train import megatron, weights
from moerl.train.processes import stop_with_parent
from tests.system.sync_harness import ClientLink, make_sync, topology

STAGES = ("old", "new")


def run(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """{engine: {"old" and "new": what it was after that push}}; empty on other ranks than 0."""
    spec = read_spec(job["new"])
    train = {"dtype": "float32", "device": "cpu"}
    config = Config(model={"path": job["new"]}, train=train, parallel=case["parallel"] | {"timeout_s": 120.0})
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    links, syncs, found = {}, {}, {}
    try:
        model = megatron.build_model(spec, config, ranks)
        for name, engine in job["engines"].items():
            links[name] = ClientLink([engine["url"]], engine["tp"]) if ranks.rank == 0 else None
            engines = topology(engine["tp"])
            syncs[name] = make_sync(spec, links[name], engines=engines, parallel=config.parallel, way=case["way"])
        for stage, version in zip(STAGES, case["versions"], strict=True):
            weights.load_hf(model, spec, job[stage], ranks)
            for name, sync in syncs.items():
                report = sync.push(weights.local_shards(model, spec, ranks), version)
                if ranks.rank == 0:
                    found.setdefault(name, {})[stage] = observed(links[name], report)
        for sync in syncs.values():
            sync.close()
    finally:
        for link in filter(None, links.values()):
            link.close()
        megatron.shutdown()
    return found


def observed(link: ClientLink, report: SyncReport) -> dict[str, Any]:
    return {
        "attempts": report.attempts,
        "digest": report.digest,
        "received": report.moved.received,
        "seconds": report.seconds,
        "version": link.each("version")[0],
        "checksums": link.each("checksums")[0],
        "answers": link.answers(report.version),
    }


def main() -> None:
    stop_with_parent()
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, case in job["cases"].items():
        try:
            found = run(job, case)
        except Exception:
            (out / f"{name}-{os.environ['RANK']}.error").write_text(traceback.format_exc())
            raise
        if found:
            (out / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
