"""Whole microbatches from what the ranks of a replica hold: for comparisons and diagnosis, not for training.

Collective over all ranks; the result is the same on all ranks of a data-parallel replica.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.routing import shard
from moerl.routing.layout import Layout
from moerl.train.forward import LocalMicrobatch
from moerl.train.megatron import Ranks


def whole_logprobs(logprobs: Sequence[torch.Tensor], local: Sequence[LocalMicrobatch], ranks: Ranks) -> list[np.ndarray]:
    """float32[n] per microbatch from `compute_logprobs` of all ranks."""
    holds = ranks.last_stage and ranks.tp[0] == 0
    pairs = zip(local, logprobs, strict=True) if holds else ()
    mine = [(rows.packing.local_rows.cpu().numpy(), found.cpu().numpy()) for rows, found in pairs]
    held = [parts for parts in _of_replica(mine, ranks) if parts]
    answers = []
    for number in range(len(local)):
        placed, values = (np.concatenate(pieces) for pieces in zip(*(parts[number] for parts in held), strict=True))
        whole = np.empty_like(values)
        whole[placed] = values
        answers.append(whole)
    return answers


def whole_routes(
    cuts: Sequence[np.ndarray], local: Sequence[LocalMicrobatch], place: shard.Place, layout: Layout, ranks: Ranks
) -> list[np.ndarray]:
    """uint8|uint16[n, moe_layer, k] per microbatch from each rank's integer[n_router, layers here, k]."""
    replica = _of_replica((place, list(cuts)), ranks)
    return [
        shard.join([(other, parts[number]) for other, parts in replica], rows.packing.cu_seqlens_q.cpu().numpy(), layout)
        for number, rows in enumerate(local)
    ]


def _of_replica(mine: Any, ranks: Ranks) -> list[Any]:
    """What every rank of this rank's data-parallel replica brought."""
    everyone: list[Any] = [(ranks.dp[0], mine)]
    if ranks.world > 1:
        everyone = [None] * ranks.world
        dist.all_gather_object(everyone, (ranks.dp[0], mine))
    return [brought for replica, brought in everyone if replica == ranks.dp[0]]
