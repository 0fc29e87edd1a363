"""One long-lived torchrun rank: trains the same model on the same microbatches under several parallel layouts.

    torchrun --nproc-per-node N layout_worker.py MODEL_FOLDER OUT_FOLDER CASE...      CASE = name:tp=2,ep=2,recompute=1

Rank 0 writes OUT_FOLDER/<name>.npz with everything gathered to whole tensors, so that layouts compare array by array.
"""

import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.models.shard import Shard
from moerl.routing.replay import RouteReplay
from moerl.routing.trace import Layout
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch
from moerl.train.forward import compute_logprobs, forward_backward

MULTIPLE = 8
PASSES = {"temperature": 0.7, "fp32_head": True}


def microbatches(spec, count: int = 4) -> list[Microbatch]:
    """The same packed microbatches on every rank; forced routes are random, so nothing but replay produces them."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(count):
        lengths = rng.integers(3, 20, size=4)
        padded = -(-lengths // MULTIPLE) * MULTIPLE
        boundaries = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
        total = int(boundaries[-1])
        positions = np.arange(total) - np.repeat(boundaries[:-1], padded)
        real = positions < np.repeat(lengths, padded)
        routes = rng.random((total, len(spec.moe_layers), spec.experts)).argsort(-1)[..., : spec.topk]
        made.append(
            Microbatch(
                tokens=rng.integers(0, spec.vocab_size, total),
                labels=rng.integers(0, spec.vocab_size, total),
                positions=positions,
                cu_seqlens=boundaries,
                loss_mask=real.astype(np.float32),
                routes=routes.astype(np.uint8),
                real=real,
                columns={"advantages": rng.standard_normal(total).astype(np.float32)},
            )
        )
    return made


def loss(outputs, rows):
    each = -outputs.logprobs * rows.columns["advantages"] - 0.01 * outputs.entropy
    total = (each * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {"loss": total, "entropy": (outputs.entropy * rows.loss_mask).sum()}


def whole(shards: list[Shard]) -> dict[str, np.ndarray] | None:
    """HF name -> full tensor on rank 0, from the shards of all ranks; replicas must be equal bit for bit."""
    mine = [(shard.entry.hf, shard.entry.param.tp_axis, shard.index, shard.parts, shard.tensor.float().numpy()) for shard in shards]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() != 0:
        return None
    pieces: dict[str, dict[int, np.ndarray]] = {}
    axes = {}
    for names, axis, index, parts, array in (item for rank in everyone for item in rank):
        for name, part in zip(names, np.split(array, len(names)), strict=True):
            axes[name] = (axis, parts)
            known = pieces.setdefault(name, {}).setdefault(index, part)
            assert np.allclose(known, part, rtol=1e-5, atol=1e-9), f"replicas of {name}[{index}] differ by {np.abs(known - part).max()}"
    full = {}
    for name, held in pieces.items():
        axis, parts = axes[name]
        assert sorted(held) == list(range(parts)), f"{name}: found parts {sorted(held)} of {parts}"
        full[name] = held[0] if parts == 1 else np.concatenate([held[i] for i in range(parts)], axis=axis)
    return full


def gradients(model, spec, ranks) -> dict[str, np.ndarray] | None:
    items = [item for item in weights.placed(model, spec, ranks) if item.tensor.requires_grad]
    return whole([Shard(item.entry, weights.cut_padding(item, item.tensor.main_grad), item.index, item.parts) for item in items])


def reduce_everywhere(model) -> None:
    """Let every data-parallel rank hold whole gradients, which the distributed optimizer doesn't need but comparison does."""
    from megatron.core.distributed import finalize_model_grads

    for chunk in model:
        chunk.config.finalize_model_grads_func = lambda *args, **kwargs: finalize_model_grads(
            *args, **(kwargs | {"force_all_reduce": True})
        )


def summed(results, name: str, ranks) -> float:
    """A metric's sum over all rows, of the last stage of every data- and context-parallel rank."""
    counts = ranks.tp[0] == 0 and ranks.last_stage
    value = torch.tensor([sum(float(result[name]) for result in results) if counts else 0.0], dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def run(folder: str, sizes: dict[str, int], *, recompute: bool) -> dict[str, np.ndarray] | None:
    spec = read_spec(folder)
    native = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    train = {"dtype": "float32", "device": "cpu", "lr": 1e-3, "grad_clip": 0.5}
    config = Config(model={"path": folder}, train=train, parallel=sizes | {"timeout_s": 60}, megatron=native)
    ranks = megatron.initialise(config.parallel, config.train, seed=3)
    try:
        model = megatron.build_model(spec, config, ranks)
        weights.load_hf(model, spec, folder, ranks)
        reduce_everywhere(model)
        optimizer = megatron.build_optimizer(model, config)
        replay = RouteReplay(model, Layout(spec.moe_layers, spec.experts, spec.topk))
        everything = microbatches(spec)
        share = everything[ranks.dp[0] :: ranks.dp[1]]
        out: dict[str, np.ndarray] = {}

        def keep(prefix: str, tensors) -> None:
            if ranks.rank == 0:
                out.update({f"{prefix}/{name}": tensor for name, tensor in tensors.items()})

        keep("weights", whole(weights.local_shards(model, spec, ranks)) or {})
        natural = compute_logprobs(model, share, ranks, recorder=replay, **PASSES)
        forced = compute_logprobs(model, share, ranks, replay=replay, **PASSES)
        keep("first", {"natural": natural[0][0], "routes": natural[0][1], "forced": forced[0][0]})
        for name, use in (("off", None), ("on", replay)):
            results = forward_backward(model, share, ranks, loss_fn=loss, replay=use, **PASSES)
            keep(name, {metric: summed(results, metric, ranks) for metric in ("loss", "entropy")})
            keep(f"grad_{name}", gradients(model, spec, ranks) or {})
        decisions = torch.tensor([replay.agreement.agreeing, replay.agreement.total])
        dist.all_reduce(decisions)
        keep("agreement", {"agreeing": decisions[0].numpy(), "total": decisions[1].numpy()})
        keep("norm", {"value": megatron.optimizer_step(optimizer, 1e-3)})
        keep("stepped", whole(weights.local_shards(model, spec, ranks)) or {})
        return out if ranks.rank == 0 else None
    finally:
        megatron.shutdown()


def main() -> None:
    folder, out, *cases = sys.argv[1:]
    for case in cases:
        name, sizes = case.split(":")
        options = {key: int(value) for key, value in (pair.split("=") for pair in sizes.split(",") if pair)}
        recompute = bool(options.pop("recompute", 0))
        try:
            result = run(folder, options, recompute=recompute)
        except Exception:
            Path(out, f"{name}.error").write_text(traceback.format_exc())
            raise
        if result is not None:
            np.savez(Path(out, f"{name}.npz"), **result)


if __name__ == "__main__":
    main()
