"""Buckets between CPUs: as messages over gloo, or in memory that both ends share where they are on one machine.

    far:   room --bytes, then head--> room               near:  room = part of the sender's shelf --head--> used where it lies
           free  <------- answer ---- taken                     free  <--------------------------- answer - done

Near buckets are packed into the memory that they are unpacked from: the wire copies nothing. A receiver that cannot map its sender's
shelf answers so; then this bucket and all that follow go the far way, and `fallbacks` says why.

A message has a head, int64[HEAD]: the caller's header, nbytes, place (0: the bytes came along; n: room n - 1 of the shelf), the shelf's
offer. The head comes last and is waited for first, as is an answer before the room is used again: see `wire` for why.

Memory: ROOMS rooms to send (on the shelf if any peer is near), ROOMS to receive, whose pages exist only once something comes the far way.
A bucket leaves its sender only when its receiver expects it, so nothing piles up between them.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from moerl.errors import ReshardError
from moerl.reshard.deadline import Deadline
from moerl.reshard.group import SyncGroup
from moerl.reshard.transport import HEADER_WORDS, wire
from moerl.reshard.transport.rooms import ROOMS, Turns, agree_on_size
from moerl.reshard.transport.shelf import OFFER_WORDS, Shelf, attach

HEAD = HEADER_WORDS + 2 + OFFER_WORDS
_BUCKET_TAG, _ANSWER_TAG = 1, 2
_AGAIN_TAG, _AGAIN_ANSWER_TAG = 3, 4
"""Of a bucket that is sent again, while others to the same peer are under way."""
_DONE = 0
_PAGE = 4096
_SHIFT = 32
"""Bytes by which rooms miss the boundary of a cache line: where a socket's bytes begin just before one, as gloo's do, AMD's Zen 3 copies
them out of the kernel less than half as fast to such a boundary as to any place 16 to 56 bytes behind it."""


@dataclass(frozen=True)
class _Leaving:
    """A bucket on its way out; `answer` comes when its room is free again, or with the errno for which it must be sent again."""

    header: Sequence[int]
    nbytes: int
    near: bool
    answer: wire.Posted
    content: wire.Posted
    head: wire.Posted


@dataclass(frozen=True)
class _Coming:
    content: wire.Posted
    head: wire.Posted


class GlooTransport:
    """See `Transport`.

    Args:
        near: ranks on this machine, to share memory with. Their choice may differ.
    """

    device = torch.device("cpu")

    def __init__(self, group: SyncGroup, rank: int, bucket_bytes: int, near: Collection[int] = ()):
        agree_on_size(group, bucket_bytes)
        self.name = "shared_memory" if near else "gloo"
        self.fallbacks: dict[int, str] = {}
        self.sent_nbytes: Counter[str] = Counter()
        self._group, self._rank, self._near, self._bytes = group, rank, frozenset(near), bucket_bytes
        self._turns = Turns(rank, group.backend.size(), bucket_bytes)
        self._stride = -(-bucket_bytes // _PAGE) * _PAGE
        self._shelf = self._open_shelf() if near else None
        self._out = self._parts(self._shelf.memory) if self._shelf else self._private()
        self._in = self._private()
        self._leaving: list[_Leaving | None] = [None] * ROOMS
        self._coming: list[_Coming | None] = [None] * ROOMS
        self._lender: int | None = None  # on whose shelf the bucket lies that was taken last
        self._attached: dict[int, tuple[list[int], torch.Tensor]] = {}
        # Answers under way, at most two to a bucket. Who sends one more than there are rooms has heard what became of the first.
        self._answers: dict[int, deque[wire.Posted]] = defaultdict(lambda: deque(maxlen=2 * ROOMS))

    def room(self, peer: int, deadline: Deadline) -> torch.Tensor:
        number = self._turns.open(peer)
        self._empty(number, deadline)
        return self._out[number]

    def send(self, peer: int, header: Sequence[int], nbytes: int, deadline: Deadline) -> None:
        number = self._turns.send(peer, header, nbytes)
        near = self._shelf is not None and peer in self._near and peer not in self.fallbacks
        self._leaving[number] = self._ship(number, peer, header, nbytes, _BUCKET_TAG, self._shelf.offer if near else ())

    def flush(self, deadline: Deadline) -> None:
        for number in self._turns.oldest():
            self._empty(number, deadline)

    def expect(self, peer: int) -> None:
        number = self._turns.expect(peer)
        self._coming[number] = self._await(number, peer, _BUCKET_TAG)

    def take(self, deadline: Deadline) -> tuple[list[int], torch.Tensor]:
        number = self._turns.take()
        coming = self._coming[number]
        peer, content = coming.head.peer, self._in[number]
        header, nbytes, place, offer = self._arrive(coming, deadline)
        if place and (shelf := self._attach(peer, offer, number, deadline)) is not None:
            self._lender, content = peer, self._parts(shelf)[place - 1]
        else:
            self._answer(peer, _DONE, _AGAIN_ANSWER_TAG if place else _ANSWER_TAG)
        self._coming[number] = None
        self._turns.hold()
        return header, content[:nbytes]

    def done(self) -> None:
        self._turns.done()
        if self._lender is not None:
            self._answer(self._lender, _DONE)
        self._lender = None

    def close(self) -> None:
        wire.hang_up(self._group)
        if self._shelf is not None:
            self._shelf.close()

    def _ship(self, number: int, peer: int, header: Sequence[int], nbytes: int, tag: int, offer: Sequence[int]) -> _Leaving:
        """Start to send what lies in a room; with an offer, only say that it lies there."""
        words = [*header, nbytes, number + 1 if offer else 0, *offer]
        words += [0] * (HEAD - len(words))
        content = self._out[number][: 1 if offer else max(nbytes, 1)]
        waiting_for = f"rank {peer} to take a bucket"
        answer_tag = _AGAIN_ANSWER_TAG if tag == _AGAIN_TAG else _ANSWER_TAG
        return _Leaving(
            header=header,
            nbytes=nbytes,
            near=bool(offer),
            answer=wire.receive(self._group, wire.words([0]), peer, answer_tag, waiting_for),
            content=wire.send(self._group, content, peer, tag, waiting_for),
            head=wire.send(self._group, wire.words(words), peer, tag, waiting_for),
        )

    def _empty(self, number: int, deadline: Deadline) -> None:
        """Wait until nobody needs what lies in a room to send."""
        if (leaving := self._leaving[number]) is None:
            return
        if (code := int(wire.finish(leaving.answer, deadline))) != _DONE:
            peer = leaving.answer.peer
            self.fallbacks[peer] = f"rank {peer} cannot map the memory of rank {self._rank}: {os.strerror(code)}"
            leaving = self._ship(number, peer, leaving.header, leaving.nbytes, _AGAIN_TAG, ())
            wire.finish(leaving.answer, deadline)
        wire.finish(leaving.content, deadline)
        wire.finish(leaving.head, deadline)
        self.sent_nbytes["shared_memory" if leaving.near else "gloo"] += leaving.nbytes
        self._leaving[number] = None

    def _await(self, number: int, peer: int, tag: int) -> _Coming:
        waiting_for = f"rank {peer} to send a bucket"
        content = wire.receive(self._group, self._in[number], peer, tag, waiting_for)
        return _Coming(content, wire.receive(self._group, wire.words([0] * HEAD), peer, tag, waiting_for))

    def _arrive(self, coming: _Coming, deadline: Deadline) -> tuple[list[int], int, int, list[int]]:
        """Header, nbytes, place and offer of a bucket, when all of it is there."""
        words = wire.finish(coming.head, deadline).tolist()
        wire.finish(coming.content, deadline)
        nbytes, place = words[HEADER_WORDS : HEADER_WORDS + 2]
        if not (0 <= nbytes <= self._bytes and 0 <= place <= ROOMS):
            raise ReshardError(
                f"rank {coming.head.peer} announced a bucket of {nbytes} bytes at place {place}, but there are at most {self._bytes} bytes "
                f"and {ROOMS} places; does it run the same version of moerl?"
            )
        return words[:HEADER_WORDS], nbytes, place, words[HEADER_WORDS + 2 :]

    def _attach(self, peer: int, offer: list[int], number: int, deadline: Deadline) -> torch.Tensor | None:
        """The sender's shelf; or None, and then the bucket is in the room to receive after all."""
        known, shelf = self._attached.get(peer, ([], None))
        if known == offer:
            return shelf
        try:
            shelf = attach(offer, ROOMS * self._stride)
        except OSError as error:
            self.fallbacks[peer] = f"this rank cannot map the memory of rank {peer}: {error}"
            again = self._await(number, peer, _AGAIN_TAG)
            self._answer(peer, error.errno)
            self._arrive(again, deadline)
            return None
        self._attached[peer] = (offer, shelf)
        return shelf

    def _answer(self, peer: int, code: int, tag: int = _ANSWER_TAG) -> None:
        answer = wire.send(self._group, wire.words([code]), peer, tag, f"rank {peer} to hear what became of its bucket")
        self._answers[peer].append(answer)

    def _open_shelf(self) -> Shelf | None:
        try:
            return Shelf(ROOMS * self._stride)
        except OSError as error:
            self.fallbacks[self._rank] = f"this rank cannot allocate {ROOMS * self._stride} bytes of shared memory: {error}"
            return None

    def _parts(self, shelf: torch.Tensor) -> list[torch.Tensor]:
        return [shelf[number * self._stride :][: self._bytes] for number in range(ROOMS)]

    def _private(self) -> list[torch.Tensor]:
        return [torch.empty(_SHIFT + self._bytes, dtype=torch.uint8)[_SHIFT:] for _ in range(ROOMS)]
