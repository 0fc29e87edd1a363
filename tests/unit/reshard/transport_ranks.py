"""Ranks of a transport, each a process of its own, and what they do: shared by the tests with and without GPUs."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moerl.errors import MoerlError, ReshardError
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.transport import Transport, open_transport, shelf
from moerl.reshard.transport.rooms import ROOMS
from tests.unit.reshard import fake_nccl

# Processes are forked from one that has loaded torch once, and never ran anything.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "moerl.reshard.transport.gloo"])


class Outcome(NamedTuple):
    """What a rank came to.

    Attributes:
        value: what its scenario returned; None if it failed or died.
        error: that it failed with.
        seconds: that the scenario took.
        exitcode: of the process.
    """

    value: Any
    error: BaseException | None
    seconds: float
    exitcode: int | None


@dataclass(frozen=True)
class Setting:
    """How the ranks are set up.

    Attributes:
        kind: of transport; "like-nccl" is NCCL's, over a fake of NCCL.
    """

    kind: str
    nodes: tuple[int, ...]
    bucket_bytes: int = 4096
    backend: str = "gloo"
    timeout_s: float = 20


class Bucket(NamedTuple):
    """One transfer; `pack_s` and `unpack_s` are how long its sender and its receiver take over it."""

    sender: int
    receiver: int
    nbytes: int
    pack_s: float = 0
    unpack_s: float = 0


def content(number: int, nbytes: int) -> torch.Tensor:
    """The bytes of bucket `number`: uint8[nbytes], different for each number and each place."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def run(setting: Setting, scenario: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Let every rank run `scenario(transport, rank, setting, *args)`, and return what became of them."""
    store = sync_group.open_store("127.0.0.1", len(setting.nodes), Deadline("test", 20))
    pipes, processes = [], []
    for rank in range(len(setting.nodes)):
        ours, theirs = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=_rank, args=(rank, setting, store.port, theirs, scenario, args), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    end = time.monotonic() + 60
    try:
        found = [_hear(pipe, end) for pipe in pipes]
        for pipe in pipes:
            pipe.close()  # ranks stay until then, with all that they hold, so that nobody's end is taken for another's close
        for process in processes:
            process.join(20)
        return [Outcome(*outcome, process.exitcode) for outcome, process in zip(found, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What all ranks returned; the first error is raised."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.exitcode == 0
    return [outcome.value for outcome in outcomes]


def _hear(pipe, end: float) -> tuple[Any, BaseException | None, float]:
    assert pipe.poll(max(0.0, end - time.monotonic())), "a rank hangs"
    try:
        return pipe.recv()
    except EOFError:
        return None, None, 0.0


def _rank(rank: int, setting: Setting, port: int, pipe, scenario: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    if setting.backend == "nccl":
        torch.cuda.set_device(rank)
    world = len(setting.nodes)
    store = sync_group.reach_store("127.0.0.1", port, world, Deadline("test", 20))
    group = sync_group.join(store, "test", setting.backend, world, Deadline("test", 20), rank=rank)
    value = error = None
    start = time.monotonic()
    try:
        if setting.kind == "like-nccl":
            transport = fake_nccl.transport_over(group, rank, setting.bucket_bytes)
        else:
            transport = open_transport(setting.kind, group, rank, setting.bucket_bytes, setting.nodes)
        value = scenario(transport, rank, setting, *args)
    except (MoerlError, AssertionError) as failure:
        error = failure
    pipe.send((value, error, time.monotonic() - start))
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


# Scenarios.


def exchange(transport: Transport, rank: int, setting: Setting, buckets: Sequence[Bucket], close: bool = False) -> dict[str, Any]:
    """Send or receive this rank's part of `buckets`, in their order.

    Returns:
        found: (number, whether content and header are right) of what was received, in order; addresses of rooms; fallbacks; bytes
        sent by kind of transport; this process's maps.
    """
    deadline, found, places = Deadline("test", setting.timeout_s), [], set()
    for number, bucket in enumerate(buckets):
        if bucket.sender == rank:
            room = transport.room(bucket.receiver, deadline)
            places.add(room.data_ptr())
            room.fill_(0xEE)
            time.sleep(bucket.pack_s)
            room[: bucket.nbytes].copy_(content(number, bucket.nbytes))
            transport.send(bucket.receiver, (number, bucket.nbytes, -number, 2**63 - 1 - number), bucket.nbytes, deadline)
    transport.flush(deadline)
    mine = [(number, bucket) for number, bucket in enumerate(buckets) if bucket.receiver == rank]
    for _, bucket in mine[:ROOMS]:
        transport.expect(bucket.sender)
    for turn, (number, bucket) in enumerate(mine):
        header, payload = transport.take(deadline)
        places.add(payload.data_ptr())
        time.sleep(bucket.unpack_s)
        exact = torch.equal(payload.cpu(), content(number, bucket.nbytes))
        found.append((header[0], exact and header == [number, bucket.nbytes, -number, 2**63 - 1 - number]))
        transport.done()
        if turn + ROOMS < len(mine):
            transport.expect(mine[turn + ROOMS][1].sender)
    if close:
        transport.close()
    maps = Path("/proc/self/maps").read_text()
    return {"found": found, "places": places, "fallbacks": transport.fallbacks, "sent": dict(transport.sent_nbytes), "maps": maps}


def exchange_without(transport: Transport, rank: int, setting: Setting, buckets: Sequence[Bucket], blind: int) -> dict[str, Any]:
    """`exchange`, but rank `blind` finds another file than the one that it is offered."""
    if rank == blind:
        shelf.os = _OtherFiles()
    return exchange(transport, rank, setting, buckets)


class _OtherFiles:
    """The module `os`, with other files under /proc."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def stat(self, path: str) -> os.stat_result:
        assert path.startswith("/proc/")
        return os.stat("/proc/self/exe")


def exchange_with_little_memory(transport: Transport, rank: int, setting: Setting, buckets: Sequence[Bucket], poor: int) -> dict[str, Any]:
    """`exchange`, but rank `poor` cannot have shared memory."""
    if rank == poor:
        shelf.os = NoMemory()
        transport = open_transport(setting.kind, transport._group, rank, setting.bucket_bytes, setting.nodes)
    return exchange(transport, rank, setting, buckets)


class NoMemory:
    """The module `os`, with no memory to give."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def posix_fallocate(self, *_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exchange_with_gloo(transport: Transport, rank: int, setting: Setting, buckets: Sequence[Bucket], far: int) -> dict[str, Any]:
    """`exchange`, but rank `far` was opened as gloo."""
    if rank == far:
        transport = open_transport("gloo", transport._group, rank, setting.bucket_bytes, setting.nodes)
    return exchange(transport, rank, setting, buckets)


def weigh(transport: Transport, rank: int, setting: Setting, count: int) -> int:
    """Rank 0 sends `count` full buckets to rank 1. Returns the bytes of memory of its own that a rank came to use by it."""
    deadline, before = Deadline("test", setting.timeout_s), _own_bytes()
    if rank == 0:
        for number in range(count):
            transport.room(1, deadline).fill_(number)
            transport.send(1, (number, 0, 0, 0), setting.bucket_bytes, deadline)
        transport.flush(deadline)
        return _own_bytes() - before
    for _ in range(ROOMS):
        transport.expect(0)
    for number in range(count):
        _, payload = transport.take(deadline)
        assert int(payload.min()) == int(payload.max()) == number
        transport.done()
        if number + ROOMS < count:
            transport.expect(0)
    return _own_bytes() - before


def wait_for(transport: Transport, rank: int, setting: Setting, waiting: int, peer: int, side: str) -> None:
    """One rank waits for another, which does nothing."""
    deadline = Deadline("test", setting.timeout_s)
    if rank != waiting:
        return
    if side == "take":
        transport.expect(peer)
        transport.take(deadline)
    for number in range(ROOMS + 1 if side == "room" else ROOMS):
        transport.room(peer, deadline)
        transport.send(peer, (number, 0, 0, 0), 100, deadline)
    transport.flush(deadline)


def leave(transport: Transport, rank: int, setting: Setting, leaver: int, how: str) -> float:
    """Rank 0 sends to rank 1 until the leaver goes, in the middle of a bucket; returns when, on the clock that all processes share."""
    deadline = Deadline("test", setting.timeout_s)
    try:
        for number in range(1000):
            if rank == 0:
                transport.room(1, deadline)
                transport.send(1, (number, 0, 0, 0), setting.bucket_bytes, deadline)
            else:
                transport.expect(0)
                transport.take(deadline)
                transport.done()
            if rank == leaver and number == 3:
                if rank == 1:
                    transport.expect(0)
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                transport.close()
                return time.monotonic()
    except ReshardError as error:
        transport.close()
        raise ReshardError(f"{time.monotonic()}|{error}") from None
    raise AssertionError("nobody left")


def unpack_late(transport: Transport, rank: int, setting: Setting, count: int) -> list[bool]:
    """Like `weigh`, on a GPU that is busy: packing and unpacking are queued behind other work when `send` and `done` are called."""
    deadline = Deadline("test", setting.timeout_s)
    if rank == 0:
        for number in range(count):
            room = transport.room(1, deadline)
            torch.cuda._sleep(20_000_000)
            room.fill_(number)
            transport.send(1, (number, 0, 0, 0), setting.bucket_bytes, deadline)
        transport.flush(deadline)
        return []
    kept = []
    for number in range(count):
        if number == 0:
            transport.expect(0)
        if number + 1 < count:
            transport.expect(0)
        _, payload = transport.take(deadline)
        torch.cuda._sleep(20_000_000)
        kept.append(payload.clone())
        transport.done()
    return [bool((payload == number).all()) for number, payload in enumerate(kept)]


def interrupt(transport: Transport, rank: int, setting: Setting) -> None:
    """Another thread of the same rank closes the transport while one waits."""
    if rank == 0:
        time.sleep(3)
        return
    transport.expect(0)
    threading.Timer(0.2, transport.close).start()
    transport.take(Deadline("test", setting.timeout_s))


def only_open(transport: Transport, rank: int, setting: Setting) -> str:
    transport.close()
    transport.close()
    return transport.name


def open_of_size(transport: Transport, rank: int, setting: Setting) -> str:
    """Another transport over the same kind of group, with buckets of another size."""
    open_transport(setting.kind, transport._group, rank, setting.bucket_bytes + rank, setting.nodes)
    return transport.name


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
