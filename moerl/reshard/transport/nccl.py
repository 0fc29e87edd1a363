"""Buckets between GPUs over NCCL.

    sender:    pack on the caller's stream --event--> wire stream: head, content --> room is free when both have left
    receiver:  wire stream: head --host reads the size--> content --> unpack on the caller's stream --event--> room is free

Every bucket is two messages, because NCCL wants the receiver to name the exact size: a head, int64[HEADER_WORDS + 1] with the size last,
and the content. NCCL runs the operations of a group one after another, so a message that is posted too early blocks all that follow:
the head of bucket n + 1 is posted after the content of n, on both sides. With a plan's order of buckets there is then always one that
can go. Content n + 1 starts when `expect`, `take` or `done` finds that its head is there.

Messages are posted as coalesced groups of one, which NCCL runs in the communicator of the whole group; else torch would make one more
communicator for every pair. It is made when the transport is opened, by all ranks together.

Waits poll, so that they end at their deadlines; nothing here waits for the device. A rank that closes says so in the group's store, where
the others look while they wait. A rank that is killed cannot: its peers notice when NCCL does, or at their deadline.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import cuda

from moerl.errors import ReshardError
from moerl.reshard.deadline import Deadline
from moerl.reshard.group import SyncGroup
from moerl.reshard.transport import HEADER_WORDS
from moerl.reshard.transport.rooms import ROOMS, Turns, agree_on_size

_POLL_S = 50e-6
_LOOK_S = 0.1
"""How often a waiting rank looks whether its peer has left."""
_NEVER = timedelta(days=7)


@dataclass
class _Coming:
    """A bucket that is expected: first its head is posted, then its content, when the head told the size."""

    number: int
    peer: int
    head: dist.Work | None = None
    told: cuda.Event | None = None
    words: list[int] | None = None
    content: dist.Work | None = None

    @property
    def posted(self) -> bool:
        return self.words is not None and (self.content is not None or self.words[-1] == 0)


class NcclTransport:
    """See `Transport`."""

    name = "nccl"

    def __init__(self, group: SyncGroup, rank: int, bucket_bytes: int):
        agree_on_size(group, bucket_bytes)
        _connect(group)
        # Torch ends the whole process when an operation takes longer than the group's timeout; deadlines are kept here.
        group.backend.set_timeout(_NEVER)
        self.device, self.fallbacks, self.sent_nbytes = group.device, {}, Counter()
        self._group, self._rank, self._bytes = group, rank, bucket_bytes
        self._turns = Turns(rank, group.backend.size(), bucket_bytes)
        self._wire = cuda.Stream(self.device)
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}  # made when needed: most ranks only send or only receive
        self._heads = {side: [self._head() for _ in range(ROOMS)] for side in ("out", "in")}
        self._leaving: list[tuple[int, list[dist.Work]]] = [(rank, [])] * ROOMS
        self._coming: deque[_Coming] = deque()
        self._free: list[cuda.Event | None] = [None] * ROOMS

    def room(self, peer: int, deadline: Deadline) -> torch.Tensor:
        number = self._turns.open(peer)
        self._empty(number, deadline)
        return self._room("out", number)

    def send(self, peer: int, header: Sequence[int], nbytes: int, deadline: Deadline) -> None:
        number = self._turns.send(peer, header, nbytes)
        pinned, head = self._heads["out"][number]
        pinned.copy_(torch.tensor([*header, nbytes], dtype=torch.int64))
        self._wire.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self._wire):
            head.copy_(pinned, non_blocking=True)
            works = [self._post(self._group.backend.send, head, peer)]
            if nbytes:
                works.append(self._post(self._group.backend.send, self._room("out", number)[:nbytes], peer))
        self._leaving[number] = peer, works
        self.sent_nbytes["nccl"] += nbytes

    def flush(self, deadline: Deadline) -> None:
        for number in self._turns.oldest():
            self._empty(number, deadline)

    def expect(self, peer: int) -> None:
        self._coming.append(_Coming(self._turns.expect(peer), peer))
        self._advance()

    def take(self, deadline: Deadline) -> tuple[list[int], torch.Tensor]:
        number = self._turns.take()
        coming = self._coming[0]

        def here() -> bool:
            self._advance()
            return coming.posted and (coming.content is None or coming.content.is_completed())

        self._wait(here, coming.peer, f"rank {coming.peer} to send a bucket", deadline)
        self._coming.popleft()
        self._turns.hold()
        return coming.words[:-1], self._room("in", number)[: coming.words[-1]]

    def done(self) -> None:
        number = self._turns.done()
        self._free[number] = cuda.Event()
        self._free[number].record(cuda.current_stream(self.device))
        self._advance()

    def close(self) -> None:
        with suppress(RuntimeError):  # if the store's host is gone, its other clients notice by themselves
            self._group.store.set(self._farewell(self._rank), "")
        self._group.backend.abort()

    def _advance(self) -> None:
        """Post what can be posted by now, in the order of the buckets."""
        for coming in self._coming:
            pinned, head = self._heads["in"][coming.number]
            if coming.head is None:
                with cuda.stream(self._wire):
                    coming.head = self._post(self._group.backend.recv, head, coming.peer)
                    coming.head.wait()  # makes the stream wait, not this thread
                    pinned.copy_(head, non_blocking=True)
                    coming.told = cuda.Event()
                    coming.told.record(self._wire)
            if coming.words is None:
                if not coming.told.query():
                    return
                coming.words = self._checked(pinned.tolist(), coming.peer)
            if not coming.posted:
                if (free := self._free[coming.number]) is not None:
                    self._wire.wait_event(free)
                with cuda.stream(self._wire):
                    content = self._room("in", coming.number)[: coming.words[-1]]
                    coming.content = self._post(self._group.backend.recv, content, coming.peer)

    def _checked(self, words: list[int], peer: int) -> list[int]:
        if not 0 <= words[-1] <= self._bytes:
            raise ReshardError(f"rank {peer} announced a bucket of {words[-1]} bytes, but buckets have at most {self._bytes}")
        return words

    def _empty(self, number: int, deadline: Deadline) -> None:
        """Wait until what lies in a room to send has left."""
        peer, works = self._leaving[number]
        self._wait(lambda: all(work.is_completed() for work in works), peer, f"rank {peer} to take a bucket", deadline)
        self._leaving[number] = self._rank, []

    def _post(self, start: Callable, tensor: torch.Tensor, peer: int) -> dist.Work:
        backend = self._group.backend
        try:
            backend._start_coalescing()
            start([tensor], peer, 0)
            return backend._end_coalescing()
        except RuntimeError as error:
            raise ReshardError(f"NCCL cannot exchange a bucket with rank {peer}: {error}") from error

    def _wait(self, ready: Callable[[], bool], peer: int, waiting_for: str, deadline: Deadline) -> None:
        look = time.monotonic() + _LOOK_S
        try:
            while not ready():
                deadline.left(waiting_for)
                if time.monotonic() > look:
                    self._look_for(peer, waiting_for, deadline)
                    look = time.monotonic() + _LOOK_S
                time.sleep(_POLL_S)
            error = self._group.backend.get_error()
        except RuntimeError as failure:
            if isinstance(failure, ReshardError):
                raise
            raise ReshardError(
                f"{deadline.what}: waited for {waiting_for}: the connection to rank {peer} is broken: {failure}"
            ) from failure
        if error.name != "SUCCESS":  # an operation that failed counts as completed
            raise ReshardError(f"{deadline.what}: waited for {waiting_for}: NCCL reports {error.name}; look in the log of rank {peer}")

    def _look_for(self, peer: int, waiting_for: str, deadline: Deadline) -> None:
        if self._group.store.check([self._farewell(peer)]):
            raise ReshardError(
                f"{deadline.what}: waited for {waiting_for}: the connection to rank {peer} is broken; look in the log of that rank for why "
                "it stopped (it has left the group)"
            )

    def _farewell(self, rank: int) -> str:
        return f"{self._group.name}/left/{rank}"

    def _room(self, side: str, number: int) -> torch.Tensor:
        if (side, number) not in self._rooms:
            self._rooms[side, number] = torch.empty(self._bytes, dtype=torch.uint8, device=self.device)
        return self._rooms[side, number]

    def _head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same words in pinned memory and on the device."""
        pinned = torch.zeros(HEADER_WORDS + 1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return pinned, pinned.to(self.device, copy=True)


def _connect(group: SyncGroup) -> None:
    """Make the group's communicator; returns when all ranks do so.

    Raises:
        WaitTimeout: they did not within the group's timeout. ReshardError: NCCL failed.
    """
    deadline = Deadline("opening the NCCL transport", group.backend.options._timeout.total_seconds())
    failures: list[RuntimeError] = []

    def connect() -> None:
        try:
            group.backend.eager_connect_single_device(group.device)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=connect, name="connect NCCL", daemon=True)
    thread.start()
    deadline.poll(lambda: not thread.is_alive(), f"all {group.backend.size()} ranks to open it")
    if failures:
        raise ReshardError(f"NCCL cannot connect {group.backend.size()} ranks: {failures[0]}") from failures[0]
