"""The process at the other end of the ways that need no engine: it takes buckets and drops them, and holds a Megatron model to refit.

trainer rank 0 --a word through a pipe--> receive | refit | differing | stop --its result--> trainer rank 0
"""

import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import xxhash

from moerl.bench.sync_refit import Refit
from moerl.config.schema import Config, Parallel
from moerl.models import read_spec
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.transport import Transport
from moerl.reshard.transport.gloo import GlooTransport
from moerl.reshard.transport.rooms import ROOMS

HOST, GROUP = "127.0.0.1", "transport"
TIMEOUT_S = 600.0
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Bucket(msgspec.Struct, frozen=True):
    """A message of the plan, in its order."""

    sender: int
    nbytes: int


def send(transport: Transport, buckets: Sequence[Bucket], peer: int, deadline: Deadline, *, fill: bool) -> None:
    """Send messages of these sizes; `fill` writes to the memory first, which nobody has touched before the first round."""
    for bucket in buckets:
        room = transport.room(peer, deadline)
        if fill:
            room.fill_(1)
        transport.send(peer, (0, 0, 0, 0), bucket.nbytes, deadline)
    transport.flush(deadline)


def receive(transport: Transport, buckets: Sequence[Bucket], deadline: Deadline) -> None:
    """Take messages from the ranks that send them, as far ahead as an engine does."""
    for bucket in buckets[:ROOMS]:
        transport.expect(bucket.sender)
    for number in range(len(buckets)):
        transport.take(deadline)
        transport.done()
        if number + ROOMS < len(buckets):
            transport.expect(buckets[number + ROOMS].sender)


class Peer:
    """This process as trainer rank 0 sees it."""

    def __init__(self, process: Any, connection: Connection):
        self._process, self._connection = process, connection

    def start(self, word: str) -> None:
        self._connection.send(word)

    def result(self) -> Any:
        """Of what was started last.

        Raises:
            RuntimeError: it failed, with its traceback.
        """
        fine, result = self._connection.recv()
        if not fine:
            raise RuntimeError(f"the benchmark's other process failed:\n{result}")
        return result

    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self._connection.close()  # which ends it
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


def start(port: int, config: Config, buckets: Sequence[Bucket], bucket_bytes: int, senders: int) -> Peer:
    """Start the process; it is ready when the first `result` has come."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (there, port, config.model_dump_json(), list(buckets), bucket_bytes, senders)
    process = context.Process(target=run, args=arguments, name="sync peer", daemon=True)
    process.start()
    there.close()
    return Peer(process, here)


def run(connection: Connection, port: int, settings: str, buckets: list[Bucket], bucket_bytes: int, senders: int) -> None:
    """The process: do what the words say, until the pipe is closed."""
    for name in _LAUNCHER:  # of the trainer's rank, whose world this process must not join
        os.environ.pop(name, None)
    try:
        actions = _prepare(port, Config.model_validate_json(settings), buckets, bucket_bytes, senders)
        connection.send((True, None))
        while True:
            try:
                word = connection.recv()
            except EOFError:
                return
            connection.send((True, actions[word]()))
    except Exception:  # noqa: BLE001 - whatever it is, trainer rank 0 waits for an answer
        connection.send((False, traceback.format_exc()))


def _prepare(port: int, config: Config, buckets: list[Bucket], bucket_bytes: int, senders: int) -> dict[str, Callable[[], Any]]:
    from moerl.train import megatron, weights

    spec = read_spec(config.model.path)
    ranks = megatron.initialise(Parallel(), config.train, config.run.seed)
    chunks = megatron.build_model(spec, config.model_copy(update={"parallel": Parallel()}), ranks, trainable=False)
    weights.load_hf(chunks, spec, config.model.path, ranks)
    (model,) = chunks
    expected = _hashes(model)
    for parameter in model.parameters():
        parameter.zero_()
    deadline = Deadline("joining the trainer", TIMEOUT_S)
    store = sync_group.reach_store(HOST, port, senders + 1, deadline)
    group = sync_group.join(store, GROUP, "gloo", senders + 1, deadline, rank=senders)
    transport = GlooTransport(group, senders, bucket_bytes)
    refit = Refit(model, store, senders, senders + 1, senders, TIMEOUT_S)

    def differing() -> list[str]:
        """Parameters that are not those of the model's folder."""
        found = _hashes(model)
        return [name for name in expected if found[name] != expected[name]]

    return {"receive": lambda: receive(transport, buckets, Deadline("receiving", TIMEOUT_S)), "refit": refit.run, "differing": differing}


def _hashes(model: torch.nn.Module) -> dict[str, int]:
    named = ((name, parameter.detach().contiguous()) for name, parameter in model.named_parameters())
    return {name: xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy()) for name, tensor in named}
