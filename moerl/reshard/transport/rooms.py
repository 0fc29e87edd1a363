"""Whose turn each of the rooms of a side is, and how large they are: the bookkeeping that all transports share.

Invariants: rooms are used in turn; a room is sent only after it was opened for the same peer; at most `ROOMS` buckets are expected and
not done; a bucket is taken only after the one before it is done. A call out of order is a ReshardError, not a wrong weight.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moerl.errors import ReshardError
from moerl.reshard.group import SyncGroup
from moerl.reshard.transport import HEADER_WORDS

ROOMS = 4
"""On each side: while one bucket is packed or unpacked, others travel, from or to different peers, so that a wire is busy even where one
peer's part of it is slower than the whole."""


@dataclass
class Turns:
    """Attributes:
    rank: this rank.
    world: ranks in the group.
    """

    rank: int
    world: int
    bucket_bytes: int
    _opened: int | None = None
    _sent: int = 0
    _expected: deque[int] = field(default_factory=deque)
    _taken: int = 0
    _held: int | None = None

    def open(self, peer: int) -> int:
        """Number of the room for the next bucket, which goes to `peer`."""
        self._check_peer(peer)
        self._opened = peer
        return self._sent % ROOMS

    def send(self, peer: int, header: Sequence[int], nbytes: int) -> int:
        """Number of the room that is sent now."""
        if peer != self._opened:
            raise ReshardError(f"a bucket is sent to rank {peer}, but the last room was opened for {_name(self._opened)}")
        if len(header) != HEADER_WORDS:
            raise ReshardError(f"a header has {HEADER_WORDS} words, not {len(header)}")
        if not 0 <= nbytes <= self.bucket_bytes:
            raise ReshardError(f"a bucket holds 0 to {self.bucket_bytes} bytes, not {nbytes}")
        self._opened, room = None, self._sent % ROOMS
        self._sent += 1
        return room

    def oldest(self) -> list[int]:
        """Numbers of the rooms to send, in the order in which they were last used."""
        return [(self._sent + turn) % ROOMS for turn in range(ROOMS)]

    def expect(self, peer: int) -> int:
        """Number of the room for the next bucket that is received, which comes from `peer`."""
        self._check_peer(peer)
        busy = len(self._expected) + (self._held is not None)
        if busy == ROOMS:
            raise ReshardError(f"{ROOMS} buckets are expected already; another can be expected when one of them is done")
        room = (self._taken + len(self._expected)) % ROOMS
        self._expected.append(peer)
        return room

    def take(self) -> int:
        """Number of the room with the oldest bucket; call `hold` when it is there."""
        if self._held is not None:
            raise ReshardError("the bucket that was taken last is not done")
        if not self._expected:
            raise ReshardError("no bucket is expected; call expect() first")
        return self._taken % ROOMS

    def hold(self) -> None:
        """The oldest bucket is there and in use."""
        self._held = self._taken % ROOMS
        self._expected.popleft()
        self._taken += 1

    def done(self) -> int:
        """Number of the room whose bucket is not used any more."""
        if self._held is None:
            raise ReshardError("no bucket is taken, so none can be done")
        room, self._held = self._held, None
        return room

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.world or peer == self.rank:
            raise ReshardError(f"rank {self.rank} of {self.world} cannot exchange buckets with rank {peer}")


def agree_on_size(group: SyncGroup, bucket_bytes: int) -> None:
    """Compare `bucket_bytes` with what the first rank to come here said.

    Raises:
        ReshardError: they differ, or the store is gone.
    """
    try:
        said = int(group.store.compare_set(f"{group.name}/bucket_bytes", "", str(bucket_bytes)))
    except RuntimeError as error:
        raise ReshardError(f"the store of the weight-sync group {group.name} does not answer: {error}") from error
    if said != bucket_bytes:
        raise ReshardError(f"this rank has buckets of {bucket_bytes} bytes, but others of the group {group.name} have {said}")


def _name(peer: int | None) -> str:
    return "nobody" if peer is None else f"rank {peer}"
