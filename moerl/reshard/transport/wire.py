"""Messages over a group of gloo, and how to find out that the other end is gone.

A message that is shorter than the buffer it is received in is fine, so a receiver need not know the size beforehand: what it expects
travels while it is busy with something else. A longer one would end its process, so all ranks must agree on the size of buckets before
the first one.

Gloo's works cannot be polled: each is waited for, once, with the time that the deadline leaves. When a connection breaks, gloo wakes
those who wait to receive a message of which nothing has come yet; who waits for a message under way, in either direction, sleeps on until
its time is over. So wait for a short message which follows a long one, and only then for the long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil

import torch
import torch.distributed as dist

from moerl.errors import ReshardError
from moerl.reshard.deadline import Deadline
from moerl.reshard.group import SyncGroup
from moerl.reshard.transport import LOST

_HANG_UP_TAG = 7919
_HANG_UP_WAIT = timedelta(milliseconds=1)  # 0 would mean for ever


@dataclass(frozen=True)
class Posted:
    """A message under way.

    Attributes:
        memory: what is sent or filled; gloo reads or writes it as long as the work lives.
        peer: the rank at the other end.
        waiting_for: as it reads in an error: "rank 3 to send a bucket".
    """

    work: dist.Work
    memory: torch.Tensor
    peer: int
    waiting_for: str


def send(group: SyncGroup, memory: torch.Tensor, peer: int, tag: int, waiting_for: str) -> Posted:
    """Start to send a contiguous tensor, which must stay as it is until the work is finished."""
    return _post(group.backend.send, memory, peer, tag, waiting_for)


def receive(group: SyncGroup, memory: torch.Tensor, peer: int, tag: int, waiting_for: str) -> Posted:
    """Start to receive at most as many bytes as `memory` has; messages of one peer and tag come in the order in which they were sent."""
    return _post(group.backend.recv, memory, peer, tag, waiting_for)


def finish(posted: Posted, deadline: Deadline) -> torch.Tensor:
    """Wait for a message; returns its memory.

    Raises:
        WaitTimeout: the deadline passed. ReshardError: the connection broke. The group is unusable after either.
    """
    left_ms = ceil(deadline.left(posted.waiting_for) * 1000) + 1  # gloo counts whole milliseconds, and takes 0 for no limit
    try:
        posted.work.wait(timedelta(milliseconds=left_ms))
    except RuntimeError as error:
        deadline.left(posted.waiting_for)
        raise ReshardError(f"{deadline.what}: waited for {posted.waiting_for}: {_broken(posted.peer, error)}") from error
    return posted.memory


def hang_up(group: SyncGroup) -> None:
    """Close all connections of this rank, whoever still holds the group; peers that wait for it fail at once.

    Gloo has no call for it: `abort` leaves them open until the last work and the group are gone. But a wait that times out closes them.
    """
    byte = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.backend.size()):
        if peer != group.backend.rank():
            try:
                group.backend.recv([byte], peer, _HANG_UP_TAG).wait(_HANG_UP_WAIT)
            except RuntimeError:
                continue  # its time was over, as intended, or this connection was broken already


def words(numbers: Sequence[int]) -> torch.Tensor:
    """Numbers as a message, int64[n]."""
    return torch.tensor(numbers, dtype=torch.int64)


def _post(start, memory: torch.Tensor, peer: int, tag: int, waiting_for: str) -> Posted:
    try:
        return Posted(start([memory], peer, tag), memory, peer, waiting_for)
    except RuntimeError as error:
        raise ReshardError(f"cannot wait for {waiting_for}: {_broken(peer, error)}") from error


def _broken(peer: int, error: Exception) -> str:
    reason = str(error).partition(". This is typically")[0]  # gloo goes on with advice and a greeting
    return f"{LOST} {peer} is broken; look in the log of that rank for why it stopped ({reason})"
