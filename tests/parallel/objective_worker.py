"""One torchrun rank: the update's loss, metrics and gradients under objectives that look at whole sequences.

    torchrun --nproc-per-node N objective_worker.py MODEL_FOLDER OUT.npz PARALLEL.json OBJECTIVES.json

Rank 0 writes arrays named objective/metric/name and objective/grad/name, gathered to whole tensors.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moerl.config.schema import Config, Objective
from moerl.train import megatron, trainer
from moerl.train.forward import LocalMicrobatch
from moerl.train.objective import sequence_ids
from tests.parallel.layout_job import Job, build, gradients, settings


def with_policies(rows: LocalMicrobatch) -> LocalMicrobatch:
    """Columns that depend on a row's place in the microbatch only: one advantage per sequence, and the other policies near the live one."""
    ids, place = sequence_ids(rows.packing.cu_seqlens_q, rows.packing.local_rows), rows.packing.local_rows.float()
    rows = rows.with_column("advantages", torch.sin(1.0 + ids))
    rows = rows.with_column("engine_logprobs", -2.8 + 0.2 * torch.sin(3 * place))
    return rows.with_column("old_logprobs", -2.8 + 0.2 * torch.sin(5 * place))


def update(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    objective = Objective(**options)
    built = replace(job.trainer, config=job.config.model_copy(update={"objective": objective}))
    with job.forced():
        metrics = trainer._forward_backward(built, [with_policies(rows) for rows in job.local], None)
    return {f"metric/{name}": value for name, value in metrics.items()} | {f"grad/{name}": one for name, one in gradients(job).items()}


def main() -> None:
    folder, out, parallel, objectives = sys.argv[1:]
    case = {"parallel": json.loads(parallel), "megatron": {}, "dtype": "float32"}
    config: Config = settings(folder, case, "frozen")
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    job = build(folder, case, "frozen", ranks)
    found = {f"{name}/{key}": value for name, options in json.loads(objectives).items() for key, value in update(job, options).items()}
    if ranks.rank == 0:
        np.savez(out, **found)
    megatron.shutdown()


if __name__ == "__main__":
    main()
