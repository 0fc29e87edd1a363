"""What a transfer plan costs, in numbers that can be printed."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from moerl.reshard.plan import Plan


class Summary(msgspec.Struct, frozen=True):
    """Costs of one transfer. `str()` gives a table.

    Attributes:
        nbytes: on the wire.
        bytes_ratio: `nbytes` by the bytes of all engine parameters without padding: 1 if nothing is sent in vain.
        pairs: (sender, receiver) pairs that exchange anything.
        pair_bytes_max, pair_bytes_mean: bytes per such pair.
        receiver_bytes_max: the largest inflow of one engine rank.
        sender_max_over_mean: highest load of a trainer rank by the mean over all.
        sender_bound_over_mean: the same for the best choice of senders there could be: above 1 where some ranks alone hold more than
            their share, as in uneven pipeline stages.
        same_node_share: part of the bytes that stays on one machine.
        launches: one to pack and one to unpack each bucket.
        launches_per_rank: of the busiest rank.
    """

    senders: int
    receivers: int
    nbytes: int
    bytes_ratio: float
    pairs: int
    pair_bytes_max: int
    pair_bytes_mean: float
    receiver_bytes_max: int
    sender_max_over_mean: float
    sender_bound_over_mean: float
    same_node_share: float
    blocks: int
    buckets: int
    steps: int
    launches: int
    launches_per_rank: int

    def __str__(self) -> str:
        lines = {
            "ranks": f"{self.senders} trainer → {self.receivers} engine, {self.pairs} pairs",
            "bytes": f"{_size(self.nbytes)}, {self.bytes_ratio:.3f} of the minimum; {self.same_node_share:.1%} within a node",
            "per pair": f"{_size(self.pair_bytes_mean)} on average, {_size(self.pair_bytes_max)} at most",
            "per receiver": f"{_size(self.receiver_bytes_max)} at most",
            "sender load": f"max/mean {self.sender_max_over_mean:.3f} (at best {self.sender_bound_over_mean:.3f})",
            "buckets": f"{self.buckets} in {self.steps} steps, of {self.blocks} blocks",
            "launches": f"{self.launches}, {self.launches_per_rank} on the busiest rank",
        }
        return "\n".join(f"{name:<13} {text}" for name, text in lines.items())


def pair_bytes(plan: "Plan") -> np.ndarray:
    """int64[sender, receiver] bytes."""
    found = np.zeros((plan.senders, plan.receivers), dtype=np.int64)
    np.add.at(found, (plan.buckets["sender"], plan.buckets["receiver"]), plan.buckets["nbytes"])
    return found


def summarise(plan: "Plan") -> Summary:
    """Summary of a whole plan."""
    matrix = pair_bytes(plan)
    node = np.array(plan.nodes)
    near = node[: plan.senders, None] == node[None, plan.senders :]
    total, pairs = int(matrix.sum()), int((matrix > 0).sum())
    mean = total / plan.senders
    launches = max(np.bincount(plan.buckets[side]).max() for side in ("sender", "receiver"))
    return Summary(
        senders=plan.senders,
        receivers=plan.receivers,
        nbytes=total,
        bytes_ratio=total / plan.minimum_bytes,
        pairs=pairs,
        pair_bytes_max=int(matrix.max()),
        pair_bytes_mean=total / pairs,
        receiver_bytes_max=int(matrix.sum(axis=0).max()),
        sender_max_over_mean=float(matrix.sum(axis=1).max() / mean),
        sender_bound_over_mean=plan.sender_bound_bytes / mean,
        same_node_share=float(matrix[near].sum() / total),
        blocks=len(plan.blocks),
        buckets=len(plan.buckets),
        steps=len(np.unique(plan.buckets["step"])),
        launches=2 * len(plan.buckets),
        launches_per_rank=int(launches),
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
