"""Moves packed buckets between trainer ranks and engine ranks, which share one group.

    sender:    room(peer) --pack into it--> send(peer, header, nbytes)          flush at the end
    receiver:  expect(peer) ... --> take() -> header, bytes --verify, unpack--> done()

A bucket travels with a header of `HEADER_WORDS` numbers that only sender and receiver understand. Memory beyond the model: `rooms.ROOMS`
buckets of `bucket_bytes` on each side, whatever the number of peers.

Invariants: buckets from one rank to another arrive in the order in which they were sent; every wait ends at its deadline with an error
that names the peer; after an error the transport, and the group below it, are of no more use.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from moerl.errors import ReshardError
from moerl.reshard.deadline import Deadline
from moerl.reshard.group import SyncGroup

HEADER_WORDS = 4

LOST = "the connection to rank"
"""Part of every error of a rank that only lost another: whoever looks for a cause should look there."""
KINDS = ("nccl", "shared_memory", "gloo")


class Transport(Protocol):
    """One rank's end.

    Attributes:
        name: "gloo", "nccl" or "shared_memory".
        device: where buckets live.
        fallbacks: why a slower way is taken than the transport's own: by peer, or under this rank's own number if to all.
        sent_nbytes: that have left, by kind of transport: those to peers on this machine may be shared memory, others gloo.
    """

    name: str
    device: torch.device
    fallbacks: dict[int, str]
    sent_nbytes: Counter[str]

    def room(self, peer: int, deadline: Deadline) -> torch.Tensor:
        """uint8[bucket_bytes] for the next bucket to rank `peer`; waits until what lay there before has left."""

    def send(self, peer: int, header: Sequence[int], nbytes: int, deadline: Deadline) -> None:
        """Send the header and the first `nbytes` of the last room to `peer`; the bytes travel while the next bucket is packed."""

    def flush(self, deadline: Deadline) -> None:
        """Return when everything has left."""

    def expect(self, peer: int) -> None:
        """The bucket after those expected so far comes from rank `peer`. At most `ROOMS` may be expected and not done."""

    def take(self, deadline: Deadline) -> tuple[list[int], torch.Tensor]:
        """(header, uint8[nbytes]) of the oldest bucket that is expected and was not taken; the bytes are valid until `done`."""

    def done(self) -> None:
        """The bucket that was taken last has been used."""

    def close(self) -> None:
        """Give up what is under way. Peers that wait for this rank fail at once."""


def open_transport(kind: str, group: SyncGroup, rank: int, bucket_bytes: int, nodes: Sequence[int]) -> Transport:
    """Open this rank's end; every rank of the group opens the same kind, with the same `bucket_bytes`.

    Args:
        kind: one of `KINDS`, or "auto": NCCL over a group of NCCL; else shared memory where a peer is on the same machine, else gloo.
        nodes: number of the machine of each rank.

    Raises:
        ReshardError: this kind cannot be used with this group, or another rank has buckets of another size.
    """
    if kind == "auto":
        kind = "nccl" if group.device.type == "cuda" else "shared_memory" if _near(rank, nodes) else "gloo"
    if why := problem(kind, group):
        raise ReshardError(f"the transport {kind!r} cannot be used: {why}")
    if kind == "nccl":
        from moerl.reshard.transport.nccl import NcclTransport

        return NcclTransport(group, rank, bucket_bytes)
    from moerl.reshard.transport.gloo import GlooTransport

    return GlooTransport(group, rank, bucket_bytes, _near(rank, nodes) if kind == "shared_memory" else ())


def problem(kind: str, group: SyncGroup) -> str:
    """Why a kind of transport cannot be used with a group; empty if it can."""
    if kind not in KINDS:
        return f"there are {', '.join(KINDS)}, and auto"
    cuda = group.device.type == "cuda"
    if cuda == (kind == "nccl"):
        return ""
    if cuda:
        return "trainer and engines share a group of NCCL, so buckets are on GPUs; use nccl or auto"
    return "trainer and engines share a group of gloo, so buckets are on CPUs; use gloo, shared_memory or auto"


def _near(rank: int, nodes: Sequence[int]) -> list[int]:
    return [peer for peer, node in enumerate(nodes) if node == nodes[rank] and peer != rank]
