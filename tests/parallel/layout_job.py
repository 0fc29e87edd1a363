"""One layout on one rank: its trainer, its rows of the microbatches that all layouts share, and what ranks hold put together.

Everything but `microbatches` is collective over all ranks, and what is gathered is the same on all of them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.models.shard import Shard, windows
from moerl.routing.layout import Layout
from moerl.train import megatron, trainer, weights
from moerl.train.assemble import whole_routes
from moerl.train.batch import Microbatch, cut, equalise
from moerl.train.forward import LocalMicrobatch, localise

MULTIPLE = 8
"""Sequences are padded to a multiple of this, which every layout can cut."""
MICROBATCHES = 4


@dataclass(frozen=True)
class Job:
    """One case on this rank.

    Attributes:
        whole: this replica's microbatches as they are run: of one size under pipeline parallelism.
        sizes: of all microbatches, before that.
        local: this rank's rows of `whole`.
    """

    config: Config
    trainer: trainer.Trainer
    whole: list[Microbatch]
    sizes: list[int]
    local: list[LocalMicrobatch]

    @property
    def ranks(self) -> megatron.Ranks:
        return self.trainer.ranks

    @property
    def model(self) -> list[torch.nn.Module]:
        return self.trainer.model

    def forced(self) -> AbstractContextManager[None]:
        return self.trainer.replay.forced([rows.routes for rows in self.local])


def microbatches(layout: Layout, vocabulary: int) -> list[Microbatch]:
    """The same packed microbatches on every rank; forced routes are random, so nothing but replay produces them."""
    rng = np.random.default_rng(5)
    made = []
    for number in range(MICROBATCHES):
        lengths = rng.integers(3, 20, size=4)
        padded = -(-lengths // MULTIPLE) * MULTIPLE
        boundaries = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
        total = int(boundaries[-1])
        positions = np.arange(total) - np.repeat(boundaries[:-1], padded)
        real = positions < np.repeat(lengths, padded)
        routes = rng.random((total, len(layout.layers), layout.experts)).argsort(-1)[..., : layout.topk]
        made.append(
            Microbatch(
                tokens=rng.integers(0, vocabulary, total),
                labels=rng.integers(0, vocabulary, total),
                positions=positions,
                cu_seqlens=boundaries,
                loss_mask=real.astype(np.float32),
                routes=routes.astype(layout.dtype),
                real=real,
                columns={"advantages": rng.standard_normal(total).astype(np.float32)},
                numbers=np.where(real, 4 * number + np.repeat(np.arange(4), padded), -1),
            )
        )
    return made


def build(folder: str, case: dict[str, Any], bias: str, ranks: megatron.Ranks, **train: Any) -> Job:
    """The case's trainer with `replay.expert_bias = bias` and further settings of `[train]`, and this rank's rows."""
    config = settings(folder, case, bias, **train)
    made = trainer.build(config, read_spec(folder), ranks)
    everything = microbatches(made.layout, made.spec.vocab_size)
    share = everything[ranks.dp[0] :: ranks.dp[1]]
    if ranks.pp[1] > 1:
        share = equalise(share, ranks.sequence_multiple, made.layout)
    parts = [cut(one, made.place, ahead=config.train.mtp == "trained") for one in share]
    job = Job(config, made, share, [one.size for one in everything], localise(parts, ranks))
    reduce_everywhere(job)
    return job


def settings(folder: str, case: dict[str, Any], bias: str, **train: Any) -> Config:
    train = {"dtype": case["dtype"], "device": "cpu", "lr": 1e-3, "grad_clip": 0.5, "expert_bias_update_rate": 1e-3} | train
    parallel = case["parallel"] | {"timeout_s": 120}
    return Config(model={"path": folder}, train=train, parallel=parallel, megatron=case["megatron"], replay={"expert_bias": bias})


def reduce_everywhere(job: Job, before: Callable[[], None] = lambda: None) -> None:
    """Let every data-parallel rank hold whole gradients, which the distributed optimizer doesn't need but comparison does.

    Args:
        before: called when the last microbatch's backward is done.
    """
    from megatron.core.distributed import finalize_model_grads

    def finalise(*args: Any, **kwargs: Any) -> None:
        before()
        finalize_model_grads(*args, **(kwargs | {"force_all_reduce": True}))

    for chunk in job.model:
        chunk.config.finalize_model_grads_func = finalise


def everywhere(mine: Any) -> list[Any]:
    """What every rank brought, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def of_replicas(mine: Sequence[Any], ranks: megatron.Ranks) -> list[Any]:
    """One value per microbatch of this replica -> those of all replicas, in the order of `microbatches`."""
    replicas = dict(everywhere((ranks.dp[0], list(mine))))
    return [value for same in zip(*(replicas[number] for number in range(ranks.dp[1])), strict=True) for value in same]


def whole(shards: list[Shard]) -> dict[str, np.ndarray]:
    """HF name -> full tensor, from the shards of all ranks; replicas must be equal up to rounding."""
    mine = [(shard.entry, shard.index, shard.parts, shard.tensor.float().numpy()) for shard in shards]
    full: dict[str, np.ndarray] = {}
    for entry, index, parts, array in (item for rank in everywhere(mine) for item in rank):
        for window in windows(entry.param, index, parts):
            name, part = entry.hf[window.part], array[window.in_shard]
            target = full.setdefault(name, np.full(entry.param.part_shape(window.part), np.nan, np.float32))[window.in_hf]
            fresh = np.isnan(target)
            same = np.allclose(target[~fresh], part[~fresh], rtol=1e-5, atol=1e-9)
            assert same, f"replicas of {name} differ by {np.abs(target - part)[~fresh].max()}"
            target[fresh] = part[fresh]
    assert not (missing := [name for name, tensor in full.items() if np.isnan(tensor).any()]), f"only parts of {missing} were found"
    return full


def parameters(job: Job) -> dict[str, np.ndarray]:
    return whole(weights.local_shards(job.model, job.trainer.spec, job.ranks))


def gradients(job: Job) -> dict[str, np.ndarray]:
    items = [item for item in weights.placed(job.model, job.trainer.spec, job.ranks) if item.tensor.requires_grad]
    return whole([Shard(item.entry, weights.cut_padding(item, item.tensor.main_grad), item.index, item.parts) for item in items])


def summed(results: list[dict[str, torch.Tensor]], name: str, ranks: megatron.Ranks) -> float:
    """A metric's sum over all rows, of the last stage of every data- and context-parallel rank."""
    counts = ranks.tp[0] == 0 and ranks.last_stage
    value = torch.tensor([sum(float(result[name]) for result in results) if counts else 0.0], dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def routes_of(job: Job, cuts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """integer[n, moe_layer, k] per microbatch of all replicas; every row and layer must be held exactly once."""
    mine = whole_routes(cuts, job.local, job.trainer.place, job.trainer.layout, job.ranks)
    return of_replicas(mine, job.ranks)
