"""One torchrun rank: what training the layer for multi-token prediction does under parallel layouts, to itself and to all else.

    torchrun --nproc-per-node N mtp_worker.py FOLDER_OF_MODELS OUT_FOLDER CASES.json

CASES.json maps names to {"model": name in the folder, "parallel": settings, "megatron": settings, "dtype": of the weights}. Rank 0 writes
OUT_FOLDER/<name>.npz with arrays named kind/name, gathered to whole tensors:

    loaded, grad, stepped   of the layer, by HF name; stepped is what an export holds after one step
    loss                    "all", "ahead", "tokens": sums over all ranks
    disturbed               how many elements of all other gradients differ from those of a model without the layer; of which there are "of"
"""

from typing import Any

import numpy as np
import torch

from moerl.reshard.gather import gather_hf
from moerl.train import megatron, weights
from moerl.train.forward import forward_backward
from tests.parallel.layout_job import Job, build, everywhere, gradients, settings, summed
from tests.parallel.layout_worker import PASSES, loss, main

WEIGHT = 0.3


def backward(job: Job, weight: float) -> dict[str, float]:
    with job.forced():
        results = forward_backward(job.model, job.local, job.ranks, loss_fn=loss, mtp_weight=weight, **PASSES)
    return {name: summed(results, name, job.ranks) for name in ("loss", *(("mtp_loss", "mtp_tokens") if weight else ()))}


def own_gradients(job: Job) -> dict[str, torch.Tensor]:
    """This rank's, of all weights but the layer's, by name in Megatron."""
    items = weights.placed(job.model, job.trainer.spec, job.ranks)
    return {
        f"{item.entry.megatron} {item.name}": item.tensor.main_grad.clone()
        for item in items
        if item.tensor.requires_grad and item.entry.param.layers != "mtp"
    }


def ahead(job: Job) -> dict[str, np.ndarray]:
    """HF name -> weight of the layer, as an export gets it."""
    spec, names = job.trainer.spec, {name for entry in job.trainer.spec.mtp_entries() for name in entry.hf}
    whole = gather_hf(weights.local_shards(job.model, spec, job.ranks), spec, dtype=torch.float32, mtp=True)
    return {name: tensor.clone().numpy() for name, tensor in whole if name in names}


def run(folder: str, case: dict[str, Any]) -> dict[str, Any] | None:
    config = settings(folder, case, "frozen")
    ranks = megatron.initialise(config.parallel, config.train, seed=3)
    try:
        without, job = build(folder, case, "frozen", ranks), build(folder, case, "frozen", ranks, mtp="trained", mtp_loss_weight=WEIGHT)
        found: dict[str, Any] = {f"loaded/{name}": one for name, one in ahead(job).items()}
        plain, sums = backward(without, 0.0), backward(job, WEIGHT)
        found |= {"loss/all": [plain["loss"], sums["loss"]], "loss/ahead": sums["mtp_loss"], "loss/tokens": sums["mtp_tokens"]}
        left, right = own_gradients(without), own_gradients(job)
        assert left.keys() == right.keys()
        here = (sum(int((left[name] != right[name]).sum()) for name in left), sum(one.numel() for one in left.values()))
        found["disturbed"], found["of"] = (sum(counts) for counts in zip(*everywhere(here), strict=True))
        names = {name for entry in job.trainer.spec.mtp_entries() for name in entry.hf}
        found |= {f"grad/{name}": one for name, one in gradients(job).items() if name in names}
        megatron.optimizer_step(job.trainer.optimizer, config.train.lr)
        found |= {f"stepped/{name}": one for name, one in ahead(job).items()}
        return found if ranks.rank == 0 else None
    finally:
        megatron.shutdown()


if __name__ == "__main__":
    main(run)
