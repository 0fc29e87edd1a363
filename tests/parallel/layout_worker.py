"""One long-lived torchrun rank: trains the same model on the same microbatches under several parallel layouts.

    torchrun --nproc-per-node N layout_worker.py FOLDER_OF_MODELS OUT_FOLDER CASES.json

CASES.json maps names to {"model": name in the folder, "parallel": settings, "megatron": settings, "dtype": of the weights,
"checks": [names in CHECKS]}. Rank 0
writes OUT_FOLDER/<name>.npz with arrays named check/kind/name, gathered to whole tensors, so that layouts compare array by array.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from moerl.report import capture as recording
from moerl.reshard.gather import gather_hf
from moerl.rollout.sample import Sample
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.replay import moe_layers
from moerl.routing.trace import Trace
from moerl.train import capture, megatron, trainer, weights
from moerl.train.assemble import whole_logprobs
from moerl.train.batch import Microbatch, cut
from moerl.train.forward import LocalMicrobatch, compute_logprobs, forward_backward
from tests.parallel.dispatch_probe import Dispatched, watched
from tests.parallel.layout_job import (
    Job,
    build,
    everywhere,
    gradients,
    microbatches,
    of_replicas,
    parameters,
    reduce_everywhere,
    routes_of,
    settings,
    summed,
)

PASSES = {"temperature": 0.7, "fp32_head": True}
PERTURBATION = 0.5
"""Standard deviation of what is added to routers, as a multiple of their weights' own."""
STEP = 1e-2
"""Of finite differences."""

Arrays = dict[str, Any]


# Passes.


def loss(outputs: Any, rows: LocalMicrobatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    each = -outputs.logprobs * rows.columns["advantages"] - 0.01 * outputs.entropy
    total = (each * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {"loss": total, "entropy": (outputs.entropy * rows.loss_mask).sum()}


def policy_loss(outputs: Any, rows: LocalMicrobatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = -(outputs.logprobs * rows.columns["advantages"] * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {}


def logprobs(job: Job) -> list[np.ndarray]:
    """float32[n] per microbatch of all replicas, without the rows that pipeline parallelism added."""
    found = whole_logprobs(compute_logprobs(job.model, job.local, job.ranks, **PASSES), job.local, job.ranks)
    return [one[:size] for one, size in zip(of_replicas(found, job.ranks), job.sizes, strict=True)]


def policy_loss_of(job: Job, found: Sequence[np.ndarray]) -> float:
    """`policy_loss` over the trained tokens of all microbatches, added up in float64, from `logprobs`."""
    advantages = of_replicas([one.columns["advantages"].astype(np.float64) * one.loss_mask for one in job.whole], job.ranks)
    tokens = sum(of_replicas([float(one.loss_mask.sum()) for one in job.whole], job.ranks))
    return -sum(float(one @ scale[: len(one)]) for one, scale in zip(found, advantages, strict=True)) / tokens


# Checks: each returns the arrays that the tests look at.


def follow(job: Job, dispatched: Dispatched) -> Arrays:
    """What the dispatchers received, and what was forced, for every row (padding included), layer and microbatch; experts ascending."""
    rows, found = [len(one.real) for one in job.local], {}
    for number, (routes, real) in enumerate(of_replicas([(one.routes, one.real) for one in job.whole], job.ranks)):
        found |= {f"trace/{number}": np.sort(routes, axis=-1), f"real/{number}": real}
    for again in (False, True) if any(everywhere(dispatched.recomputes)) else (False,):
        which = "recomputed" if again else "forward"
        for number, one in enumerate(routes_of(job, dispatched.cuts(recomputed=again, rows=rows, topk=job.trainer.layout.topk))):
            found[f"dispatched_{which}/{number}"] = np.sort(one, axis=-1)
        found[f"received_{which}"] = received(job, dispatched, again)
    return found


def received(job: Job, dispatched: Dispatched, recomputed: bool) -> np.ndarray:
    """Rows float64[moe_layer, expert] that reached each expert, over all ranks; expert-tensor-parallel ranks all get them."""
    layout, counts = job.trainer.layout, np.zeros((len(job.trainer.layout.layers), job.trainer.layout.experts))
    for rank in everywhere({number: calls.received for number, calls in dispatched.layers.items()}):
        for number, experts in rank.items():
            for (expert, again), rows in experts.items():
                if again == recomputed:
                    counts[layout.layers.index(number), expert] += rows
    return counts / job.ranks.etp[1]


def check_forward(job: Job) -> Arrays:
    """Weights as loaded, and passes without gradients."""
    return {f"weights/{name}": tensor for name, tensor in parameters(job).items()} | _without_gradients(job)


def _without_gradients(job: Job) -> Arrays:
    """Log-probabilities of a pass that chooses and of one that is forced; the choice itself, and what was followed instead of it."""
    with job.trainer.replay.recorded([rows.real for rows in job.local]) as own:
        natural = logprobs(job)
    chosen = routes_of(job, [own.ids(number).numpy() for number in range(len(job.local))])
    with job.forced(), watched(job.model) as dispatched:
        forced = logprobs(job)
    found = {"loss/natural": policy_loss_of(job, natural), "loss/forced": policy_loss_of(job, forced)} | follow(job, dispatched)
    for number, size in enumerate(job.sizes):
        found |= {f"natural/{number}": natural[number], f"forced/{number}": forced[number]}
        found[f"chosen/{number}"] = np.sort(chosen[number][:size], axis=-1)
    return found


def check_natural(job: Job) -> Arrays:
    """Loss and gradients of a pass that chooses."""
    return _trained(job, nullcontext())


def check_replay(job: Job) -> Arrays:
    """Loss and gradients under replay, and what the dispatchers received meanwhile."""
    with watched(job.model) as dispatched:
        found = _trained(job, job.forced())
    agreement = everywhere((job.trainer.replay.agreement.agreeing, job.trainer.replay.agreement.total))
    return found | follow(job, dispatched) | {"agreeing": sum(one for one, _ in agreement), "decisions": sum(all_ for _, all_ in agreement)}


def _trained(job: Job, routing: AbstractContextManager[None]) -> Arrays:
    with routing:
        results = forward_backward(job.model, job.local, job.ranks, loss_fn=loss, **PASSES)
    found: Arrays = {f"loss/{metric}": summed(results, metric, job.ranks) for metric in ("loss", "entropy")}
    return found | {f"grad/{name}": tensor for name, tensor in gradients(job).items()}


def check_capture(job: Job) -> Arrays:
    """What a capture of two of every three sequences holds: joined on rank 0, written, and read again."""
    everything = microbatches(job.trainer.layout, job.trainer.spec.vocab_size)
    samples = {number: sample_of(everything, number, job.trainer.layout) for number in range(4 * len(everything)) if number % 3}
    parts = [cut(one, job.trainer.place, samples) for one in job.whole]
    recorder = job.trainer.recorder(parts)
    trainer.natural_pass(job.trainer, job.local, recorder)
    trainer.forced_pass(job.trainer, job.local, recorder)
    meta = capture.describe(job.config, job.trainer.spec, job.model, step=0, version=0, source="training")
    with TemporaryDirectory() as folder:
        capture.write(Path(folder), recorder, samples if job.ranks.rank == 0 else None, meta, {"trainer_bias": recorder.bias})
        if job.ranks.rank > 0:
            return {}
        (path,) = recording.list_steps(folder).values()
        rows, biases = recording.concatenate(recording.read(path)), recording.read_biases(path)
    rows = rows.take(np.lexsort((rows.position, rows.sample)))
    found = {name: getattr(rows, name) for name in ("sample", "position", "engine_ids", "margin", "flipped_mass")}
    found |= {name: getattr(rows, name)[rows.response] for name in ("natural_logprob", "replay_logprob")}
    found |= {f"numbers/{number}": one.numbers for number, one in enumerate(everything)}
    return found | {"trainer_ids": np.sort(rows.trainer_ids, axis=-1), "trainer_bias": biases["trainer_bias"]}


def sample_of(everything: list[Microbatch], number: int, layout: Layout) -> Sample:
    """A sequence of `microbatches` as an engine would have answered it, after a prompt of one token."""
    (one,) = (one for one in everything if number in one.numbers)
    rows = one.numbers == number
    tokens = np.append(one.tokens[rows], 0)
    record = Trace.of(one.routes[rows], layout, tokens[:-1], [VersionRun(0, 0, int(rows.sum()))]).to_bytes()
    logprobs = np.zeros(len(tokens) - 1, "<f4").tobytes()
    return Sample(0, number, tokens[:1].tolist(), tokens[1:].tolist(), logprobs, record, [], "", "stop")


def check_perturbed(job: Job) -> Arrays:
    """The same passes without gradients, with other routers."""
    with perturbed_routers(job):
        return _without_gradients(job)


@contextmanager
def perturbed_routers(job: Job):
    held = [(layer.layer_number, router, router.weight.detach().clone()) for layer, router in moe_layers(job.model)]
    for number, router, weight in held:
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        router.weight.data.add_(PERTURBATION * weight.std() * noise)
    yield
    for _, router, weight in held:
        router.weight.data.copy_(weight)


def check_differences(job: Job) -> Arrays:
    """The router's gradient under replay, at its largest element in each MoE layer, and the finite difference there."""
    with job.forced():
        forward_backward(job.model, job.local, job.ranks, loss_fn=policy_loss, **PASSES)
    gradient, found = gradients(job), {}
    held = {layer.layer_number - 1: router for layer, router in moe_layers(job.model)}
    for number in job.trainer.layout.layers:
        of_router = gradient[f"model.layers.{number}.mlp.gate.weight"]
        place = divmod(int(np.abs(of_router).argmax()), of_router.shape[1])
        losses = []
        for shift in (STEP, -STEP):
            with shifted(held.get(number), place, shift), job.forced():
                losses.append(policy_loss_of(job, logprobs(job)))
        found |= {f"slope/{number}": (losses[0] - losses[1]) / (2 * STEP), f"gradient/{number}": of_router[place]}
    return found


@contextmanager
def shifted(router: torch.nn.Module | None, place: tuple[int, int], shift: float):
    """One weight of a router moved; does nothing where the layer is on another rank."""
    if router is None:
        yield
        return
    weight = router.weight.detach()
    before = weight[place].item()
    weight[place] += shift
    yield
    weight[place] = before


def check_optimizer(job: Job) -> Arrays:
    """The first step, from the gradients under replay."""
    with job.forced():
        forward_backward(job.model, job.local, job.ranks, loss_fn=loss, **PASSES)
    norm = megatron.optimizer_step(job.trainer.optimizer, job.config.train.lr)
    return {"norm": norm} | {f"stepped/{name}": tensor for name, tensor in parameters(job).items()}


def check_bias(job: Job) -> Arrays:
    """What the correction bias's statistics count under replay, and the bias after one forward and backward."""
    layout, counts = job.trainer.layout, {}

    def count() -> None:
        for layer, router in moe_layers(job.model):
            counts[layer.layer_number - 1] = router.local_tokens_per_expert.clone().numpy()

    reduce_everywhere(job, before=count)
    with job.forced():
        forward_backward(job.model, job.local, job.ranks, loss_fn=loss, **PASSES)
    found: Arrays = {f"bias/{name}": tensor for name, tensor in parameters(job).items() if name.endswith("correction_bias")}
    ranks = everywhere(counts)
    for number in layout.layers:
        found[f"counts/{number}"] = sum(rank[number] for rank in ranks if number in rank)
    return found


def check_gathered(job: Job) -> Arrays:
    """Whole tensors, as an export or an update of engines gets them."""
    shards = weights.local_shards(job.model, job.trainer.spec, job.ranks)
    return {f"weights/{name}": tensor.clone().numpy() for name, tensor in gather_hf(shards, job.trainer.spec, dtype=torch.float32)}


CHECKS: dict[str, tuple[str, Callable[[Job], Arrays]]] = {
    "gathered": ("frozen", check_gathered),
    "forward": ("frozen", check_forward),
    "capture": ("frozen", check_capture),
    "natural": ("frozen", check_natural),
    "replay": ("frozen", check_replay),
    "perturbed": ("frozen", check_perturbed),
    "differences": ("frozen", check_differences),
    "optimizer": ("frozen", check_optimizer),
    "bias_native": ("native", check_bias),
    "bias_replayed": ("replayed", check_bias),
}
"""Name -> (`replay.expert_bias` that it needs, what is done). Those of one mode share a model, in this order."""


def run(folder: str, case: dict[str, Any]) -> Arrays | None:
    """What the case's checks found, on rank 0."""
    config = settings(folder, case, "frozen")
    ranks = megatron.initialise(config.parallel, config.train, seed=3)
    try:
        jobs: dict[str, Job] = {}
        found: Arrays = {}
        for name, (bias, check) in CHECKS.items():
            if name in case["checks"]:
                if bias not in jobs:
                    jobs = {bias: build(folder, case, bias, ranks)}
                found |= {f"{name}/{array}": value for array, value in check(jobs[bias]).items()}
        return found if ranks.rank == 0 else None
    finally:
        megatron.shutdown()


def main(work: Callable[[str, dict[str, Any]], Arrays | None]) -> None:
    """Do every case, on this rank; rank 0 writes what it found, and any rank why it failed."""
    models, out, cases = sys.argv[1:]
    for name, case in json.loads(Path(cases).read_text()).items():
        try:
            found = work(f"{models}/{case['model']}", case)
        except Exception:
            Path(out, f"{name}.rank{os.environ['RANK']}.error").write_text(traceback.format_exc())
            raise
        if found is not None:
            np.savez(Path(out, f"{name}.npz"), **found)


if __name__ == "__main__":
    main(run)
