"""The smallest `EngineLink`: engines that this process started, reached from an event loop in a thread of its own."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moerl.errors import MoerlError
from moerl.reshard.deadline import Deadline
from moerl.rollout.client import EngineClient
from moerl.rollout.server import EngineServer

_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Calls:
    """`reshard.link.Replies`."""

    futures: Sequence[concurrent.futures.Future]

    def check(self) -> None:
        for future in self.futures:
            if future.done():
                future.result()

    def wait(self, deadline: Deadline) -> list[Any]:
        return [future.result(deadline.left("an engine")) for future in self.futures]

    def failures(self, deadline: Deadline) -> list[str]:
        concurrent.futures.wait(self.futures, deadline.left("the engines"))
        errors = (future.exception() for future in self.futures if future.done())
        return [str(error) for error in errors if isinstance(error, MoerlError)]


class ClientLink:
    """See `reshard.link.EngineLink`. Nothing is generated here, so that nothing has to be fenced."""

    host, backend, epoch = "127.0.0.1", "gloo", 0

    def __init__(self, clients: Sequence[EngineClient], tp: int, loop: asyncio.AbstractEventLoop):
        self.names, self.tp = [client.url for client in clients], tp
        self._clients, self._loop = clients, loop

    def start(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> Calls:
        return Calls([self._submit(getattr(client, method)(**given)) for client, given in zip(self._clients, arguments, strict=True)])

    def fence(self) -> None: ...

    def publish(self, version: int) -> None: ...

    def _submit(self, coroutine: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


@contextmanager
def connect(servers: Sequence[EngineServer], timeout_s: float):
    """A `ClientLink` to servers that are healthy; `timeout_s` limits each request."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="engine clients", daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_CLOSE_TIMEOUT_S)

    clients = [run(EngineClient(server.url, timeout_s, timeout_s).__aenter__()) for server in servers]
    try:
        yield ClientLink(clients, servers[0].engine.tp, loop)
    finally:
        for client in clients:
            run(client.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT_S)
        loop.close()
