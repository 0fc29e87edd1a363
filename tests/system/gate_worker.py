"""One long-lived torchrun rank of the exact gate: the same recorded rollouts under several parallel layouts, right and wrong.

    torchrun --nproc-per-node N gate_worker.py MODEL_FOLDER ROLLOUT_FOLDER OUT_FOLDER CASE...      CASE = name:tp=2,ep=2

The rollouts hold step `RECORDED`, every row with its routes, and step `WITHOUT_PROMPT`, the same samples of which prompt rows have
none. Rank 0 writes OUT_FOLDER/<name>.json: figures over all ranks, see `figures`.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config, Replay
from moerl.errors import ReplayError
from moerl.models import read_spec
from moerl.rollout.sample import Group
from moerl.rollout.store import load_step, make_header
from moerl.routing.chooser import Chooser
from moerl.routing.compare import differing, k3
from moerl.routing.replay import moe_layers
from moerl.train import megatron
from moerl.train.assemble import whole_logprobs, whole_routes
from moerl.train.batch import Microbatch, pack
from moerl.train.forward import compute_logprobs
from moerl.train.processes import stop_with_parent
from moerl.train.samples import sequences
from moerl.train.trainer import Trainer, build
from tests.passes import local_rows, run_logprobs

RECORDED, WITHOUT_PROMPT = 0, 1
UNFORCED_LAYER = 2
TOKENS_PER_MICROBATCH = 1024  # several microbatches per rank, so that one could be given another's routes

Change = Callable[[np.ndarray], np.ndarray]
"""Routes integer[row, moe_layer, k] of one sequence -> other routes of that shape."""


@dataclass(frozen=True)
class Forced:
    """What a forced pass did.

    Attributes:
        logprobs: float32[n] per microbatch of this rank's data-parallel replica.
        used: integer[n, moe_layer, k] likewise, from the maps that the routers returned.
        decisions: those that replay counted on all ranks of all replicas; None where it refused the pass on some rank.
        errors: why it did, one per rank that refused.
    """

    logprobs: list[np.ndarray]
    used: list[np.ndarray]
    decisions: int | None
    errors: list[str]


def packed(trainer: Trainer, groups: list[Group], missing: str, change: Change | None = None) -> list[Microbatch]:
    """This rank's replica's whole microbatches; which rows are where depends on nothing but the sequences' lengths."""
    items, _ = sequences(groups, trainer.layout, np.zeros_like, Replay(missing=missing))
    if change is not None:
        items = [replace(item, routes=change(item.routes)) for item in items]
    ranks = trainer.ranks
    shares = pack(
        items,
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        dp=ranks.dp[1],
        multiple=ranks.sequence_multiple,
        rounds=ranks.microbatch_multiple,
        layout=trainer.layout,
    )
    return shares[ranks.dp[0]]


def forced(trainer: Trainer, micro: list[Microbatch]) -> Forced:
    """One forward pass under replay. Where replay refuses it, its outputs are looked at all the same."""
    ranks, local, error = trainer.ranks, local_rows(micro, trainer.ranks, trainer.replay), None
    with watched(trainer) as maps:
        try:
            with trainer.replay.forced([rows.routes for rows in local]):
                found = compute_logprobs(trainer.model, local, ranks, **trainer.passes)
        except ReplayError as refusal:  # raised when the pass has ended; some ranks may have nothing to complain of
            error = str(refusal)
    cuts = [np.stack([seen[number] for seen in maps], axis=1) for number in range(len(local))]
    logprobs, used = whole_logprobs(found, local, ranks), whole_routes(cuts, local, trainer.place, trainer.layout, ranks)
    errors = [text for text in everyone(error) if text is not None]
    decisions = None if errors else sum(everyone(trainer.replay.agreement.total))
    return Forced(_fitted(logprobs, micro), _fitted(used, micro), decisions, errors)


def _fitted(whole: list[np.ndarray], micro: list[Microbatch]) -> list[np.ndarray]:
    """Without the rows that made microbatches equally long."""
    return [rows[: one.size] for rows, one in zip(whole, micro, strict=True)]


@contextmanager
def watched(trainer: Trainer) -> Iterator[list[list[np.ndarray]]]:
    """Yields, per MoE layer of this rank and per microbatch, the experts in the router's returned map: int64[n_router, k]."""
    seen, handles = [], []
    for _, router in moe_layers(trainer.model):
        maps: list[np.ndarray] = []

        def look(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor], maps: list[np.ndarray] = maps) -> None:
            maps.append(output[1].nonzero()[:, 1].reshape(len(output[1]), trainer.layout.topk).numpy())

        seen.append(maps)
        handles.append(router.register_forward_hook(look))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def one_layer_unforced(layer: int) -> Any:
    """Context manager: the router of `layer` goes on choosing by itself, as if Megatron ignored its routes."""
    as_forced = Chooser.get_replay_topk

    def choose(self: Chooser, scores: torch.Tensor, *limits: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *numbers, own = limits
        return own(scores, *numbers) if self.layer == layer else as_forced(self, scores, *limits)

    return mock.patch.object(Chooser, "get_replay_topk", choose)


def everyone(mine: Any) -> list[Any]:
    """What each rank brings, in rank order."""
    brought = [None] * dist.get_world_size()
    dist.all_gather_object(brought, mine)
    return brought


def replicas(trainer: Trainer, mine: Any) -> list[Any]:
    """What each data-parallel replica brings, of which all ranks hold the same."""
    return list(dict(everyone((trainer.ranks.dp[0], mine))).values())


def gap_k3(trainer: Trainer, micro: list[Microbatch], logprobs: list[np.ndarray]) -> tuple[float, int]:
    """(mean k3 between trainer and engine, over how many response tokens), of all replicas."""
    mine = [(found - one.columns["engine_logprobs"])[one.loss_mask > 0] for found, one in zip(logprobs, micro, strict=True)]
    gap = np.concatenate(replicas(trainer, np.concatenate(mine))).astype(np.float64)
    return float(k3(gap).mean()), len(gap)


def differences(trainer: Trainer, a: list[np.ndarray], b: list[np.ndarray], rows: list[np.ndarray]) -> tuple[int, int]:
    """(decisions in which routes a and b name other sets, all of them) over the chosen rows of all replicas.

    Args:
        a, b: integer[n, moe_layer, k] per microbatch.
        rows: bool[n] per microbatch.
    """
    found = [differing(x[chosen], y[chosen]) for x, y, chosen in zip(a, b, rows, strict=True)]
    shares = replicas(trainer, (sum(int(one.sum()) for one in found), sum(one.size for one in found)))
    differ, decisions = zip(*shares, strict=True)
    return sum(differ), sum(decisions)


def figures(trainer: Trainer, recorded: list[Group], without_prompt: list[Group]) -> dict[str, Any]:
    """All that is measured in one layout: natural and replayed, then each kind of wrong routes. Pairs are (differing, all) decisions."""
    micro = packed(trainer, recorded, "error")
    routes, real = [one.routes for one in micro], [one.real for one in micro]
    answers = run_logprobs(trainer.model, micro, trainer.ranks, recorder=trainer.replay, **trainer.passes)
    natural, tokens = gap_k3(trainer, micro, [logprobs for logprobs, _ in answers])
    own = [chosen for _, chosen in answers]
    replayed = forced(trainer, micro)
    return {
        "tokens": tokens,
        "natural_k3": natural,
        "natural_flips": differences(trainer, own, routes, real),
        "replayed_k3": gap_k3(trainer, micro, replayed.logprobs)[0],
        "replayed_strays": differences(trainer, replayed.used, routes, real),
        "replayed_decisions": replayed.decisions,
        "errors": replayed.errors,
        "shifted_position_k3": shifted_k3(trainer, recorded, lambda routes: np.roll(routes, 1, axis=0)),
        "shifted_layer_k3": shifted_k3(trainer, recorded, lambda routes: np.roll(routes, 1, axis=1)),
        "unforced": unforced(trainer, micro),
        "missing": missing(trainer, micro, own, without_prompt),
    }


def shifted_k3(trainer: Trainer, groups: list[Group], change: Change) -> float:
    micro = packed(trainer, groups, "error", change)
    return gap_k3(trainer, micro, forced(trainer, micro).logprobs)[0]


def unforced(trainer: Trainer, micro: list[Microbatch]) -> dict[str, Any]:
    with one_layer_unforced(UNFORCED_LAYER):
        found = forced(trainer, micro)
    return {"k3": gap_k3(trainer, micro, found.logprobs)[0], "errors": found.errors}


def missing(trainer: Trainer, micro: list[Microbatch], own: list[np.ndarray], groups: list[Group]) -> dict[str, Any]:
    """Prompt rows without routes. No later row reaches them, so they must choose exactly what they choose in a natural pass."""
    bare = packed(trainer, groups, "native")
    length = len(groups[0].samples[0].prompt_tokens)
    prompt = [one.real & (one.positions < length) for one in micro]
    response = [one.real & (one.positions >= length) for one in micro]
    routes, found = [one.routes for one in micro], forced(trainer, bare)
    return {
        "decisions": found.decisions,
        "errors": found.errors,
        "prompt_flips": differences(trainer, own, routes, prompt),
        "prompt_strays": differences(trainer, found.used, own, prompt),
        "response_strays": differences(trainer, found.used, routes, response),
    }


def run(folder: str, rollouts: str, sizes: dict[str, int]) -> dict[str, Any]:
    train = {"dtype": "float32", "device": "cpu"}
    config = Config(model={"path": folder}, train=train, parallel=sizes | {"timeout_s": 60.0})
    header = make_header(folder, step=0, version=0)
    recorded, without_prompt = (load_step(rollouts, step, header)[1] for step in (RECORDED, WITHOUT_PROMPT))
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    try:
        return figures(build(config, read_spec(folder), ranks), recorded, without_prompt)
    finally:
        megatron.shutdown()


def main() -> None:
    stop_with_parent()
    folder, rollouts, out, *cases = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for case in cases:
        name, sizes = case.split(":")
        try:
            found = run(folder, rollouts, {key: int(value) for key, value in (pair.split("=") for pair in sizes.split(",") if pair)})
        except Exception:
            Path(out, f"{name}-{rank}.error").write_text(traceback.format_exc())
            raise
        if rank == 0:
            Path(out, f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
