"""The process group that trainer rank 0 shares with the engines' ranks: rank 0 broadcasts, the engines receive.

    trainer rank 0 --TCPStore (free port)--> address --HTTP--> engines: rank = offset + tensor-parallel rank

The other side is SGLang's own group (`/init_weights_update_group`), so backend, store prefixes and ranks must match it. Here
the backend object is used directly: torch's registry of groups would keep file descriptors and threads of every group that
was ever made, and a run that replaces engines makes several.

Invariants: rank 0 hosts the store and picks the port, so no port is reserved beforehand and lost; no call outlasts its
deadline, even when an engine never joins; a group that failed is never used again.
"""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from moerl.errors import ReshardError
from moerl.reshard.deadline import Deadline

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_BACKEND_GRACE_S = 1.0


@dataclass(frozen=True)
class SyncGroup:
    """A joined group of 1 + (engine ranks) members.

    Attributes:
        name: unique; engines know the group by it.
        device: where broadcast tensors must live.
        backend: gloo's or NCCL's process group.
        store: kept alive as long as the group.
    """

    name: str
    device: torch.device
    backend: dist.Backend
    store: TCPStore


def open_store(host: str, world_size: int, deadline: Deadline) -> TCPStore:
    """Host the rendezvous on a port that the system chooses; read it from `.port`.

    Raises:
        ReshardError: the address cannot be listened on.
    """
    try:
        return TCPStore(
            host,
            0,
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout(deadline),
        )
    except RuntimeError as error:
        raise ReshardError(f"{deadline.what}: cannot host the rendezvous on {host}: {error}") from error


def reach_store(host: str, port: int, world_size: int, deadline: Deadline) -> TCPStore:
    """The rendezvous that another process hosts.

    Raises:
        ReshardError: it cannot be reached.
    """
    try:
        return TCPStore(host, port, world_size, False, timeout=timeout(deadline))
    except RuntimeError as error:
        raise ReshardError(f"{deadline.what}: cannot reach the rendezvous at {host}:{port}: {error}") from error


def timeout(deadline: Deadline) -> timedelta:
    """What is left of a deadline."""
    return timedelta(seconds=deadline.left("members of the weight-sync group"))


def unique_name() -> str:
    """A group name that no engine has seen."""
    return f"moerl-sync-{uuid.uuid4().hex[:12]}"


def join(
    store: TCPStore,
    name: str,
    backend: str,
    world_size: int,
    deadline: Deadline,
    *,
    rank: int = 0,
    interrupt: Callable[[], None] | None = None,
) -> SyncGroup:
    """Meet the other members; blocks until all are there.

    Args:
        backend: "gloo" or "nccl".
        interrupt: called while waiting; raises to give up early (an engine refused or died).

    Raises:
        WaitTimeout: somebody did not join in time.
        ReshardError: the backend failed.
    """
    found: list[dist.Backend] = []
    failures: list[BaseException] = []
    limit = timeout(deadline)

    def meet() -> None:
        try:
            found.append(_make(PrefixStore(name, store), name, backend, rank, world_size, limit))
        except RuntimeError as error:
            failures.append(error)

    # The constructors block, up to `timeout`; a daemon thread lets this call give up earlier.
    thread = threading.Thread(target=meet, name=f"join {name}", daemon=True)
    thread.start()

    def joined() -> bool:
        if interrupt is not None and thread.is_alive():
            interrupt()
        return not thread.is_alive()

    deadline.poll(joined, f"{world_size - 1} others to join the weight-sync group at port {store.port}")
    if failures:
        raise ReshardError(f"{deadline.what}: joining the weight-sync group of {world_size} failed: {failures[0]}") from failures[0]
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return SyncGroup(name, device, found[0], store)


def _make(store: PrefixStore, name: str, backend: str, rank: int, world_size: int, limit: timedelta) -> dist.Backend:
    # The two inner prefixes are those that torch puts around a group's name and device.
    store = PrefixStore(f"{_DEVICES[backend]}/", PrefixStore(f"{name}/", store))
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def broadcast(group: SyncGroup, tensor: torch.Tensor, deadline: Deadline, interrupt: Callable[[], None] | None = None) -> None:
    """Broadcast `tensor` (on `group.device`) from rank 0; on other ranks it is filled.

    Raises:
        WaitTimeout: not everybody took part in time. ReshardError: the connection failed. The group is unusable after either.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    # Slightly later than our own deadline, which names the wait; it frees the buffer of an operation that was given up.
    options.timeout = timedelta(seconds=deadline.left("a broadcast to the engines") + _BACKEND_GRACE_S)
    work = group.backend.broadcast([tensor], options)

    def done() -> bool:
        if not work.is_completed() and interrupt is not None:
            interrupt()
        return work.is_completed()

    deadline.poll(done, f"{group.backend.size() - 1} engine ranks to take part in a broadcast of {tensor.nbytes} bytes")
    try:
        work.wait()
    except RuntimeError as error:
        raise ReshardError(f"{deadline.what}: the broadcast to the engines failed: {error}") from error


def close(group: SyncGroup) -> None:
    """Abort pending operations; the last reference to the group closes its connections."""
    group.backend.abort()
