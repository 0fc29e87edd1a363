"""NCCL as `NcclTransport` sees it, without a GPU: a queue of operations that run strictly one after another, over gloo.

What it keeps of NCCL: nothing runs before all that was posted earlier has ended, on either side, and sizes must match exactly. So an
order of operations that would hang NCCL hangs here too. Packing and unpacking take no time on a device, so events are not tested.
"""

import queue
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from moerl.reshard.group import SyncGroup
from moerl.reshard.transport import Transport, nccl, wire

_LIMIT = timedelta(seconds=30)
_current = SimpleNamespace(stream=None)


class Work:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        _current.stream.behind = self


class Backend:
    """One communicator."""

    def __init__(self, group: SyncGroup):
        self._group, self._open, self._failure = group, None, ""
        self.options = SimpleNamespace(_timeout=_LIMIT)
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def size(self) -> int:
        return self._group.backend.size()

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def set_timeout(self, timeout: timedelta) -> None:
        assert timeout > timedelta(days=1)

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self._failure or "SUCCESS")

    def abort(self) -> None:
        wire.hang_up(self._group)

    def _start_coalescing(self) -> None:
        assert self._open is None
        self._open = Work()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._queue.put((self._open, "send", tensors[0], peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._queue.put((self._open, "recv", tensors[0], peer))

    def _end_coalescing(self) -> Work:
        work, self._open = self._open, None
        return work

    def _run(self) -> None:
        while True:
            work, kind, tensor, peer = self._queue.get()
            try:
                start = getattr(self._group.backend, kind)
                size = torch.tensor([tensor.nbytes])
                start([size], peer, 1).wait(_LIMIT)
                if size.item() != tensor.nbytes:
                    self._failure = f"a message of {size.item()} bytes where {tensor.nbytes} were expected"
                start([tensor], peer, 1).wait(_LIMIT)
            except RuntimeError as error:
                self._failure = str(error)
            work.ended.set()


class Stream:
    def __init__(self, device: torch.device | None = None):
        self.behind: Work | None = None

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...


class Event:
    def record(self, stream: Stream) -> None:
        self._behind = stream.behind

    def query(self) -> bool:
        return self._behind is None or self._behind.is_completed()


@contextmanager
def stream(entered: Stream):
    before, _current.stream = _current.stream, entered
    yield
    _current.stream = before


def transport_over(group: SyncGroup, rank: int, bucket_bytes: int) -> Transport:
    """An `NcclTransport` over a group of gloo."""
    nccl.cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=stream, current_stream=Stream)
    nccl.NcclTransport._head = _head
    serial: Any = SimpleNamespace(name=group.name, device=group.device, store=group.store, backend=Backend(group))
    return nccl.NcclTransport(serial, rank, bucket_bytes)


def _head(self: nccl.NcclTransport) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros(nccl.HEADER_WORDS + 1, dtype=torch.int64)
    return words, words  # a copy that is queued behind a message would show it at once
