"""Real SGLang servers for tests of weight sync, and the simplest way to reach them.

    Fleet.checkpoints(family) --> folders OLD, NEW --whole_shards--> what a trainer of one process holds --WeightSync--> ClientLink
    Fleet.get(family, (tp, number)) --> Loaded: a server that took NEW from disk, and what it then was

What a server is that loaded NEW itself is the truth which every server that was given NEW by a push must equal.
"""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import Engine, Parallel, Sync
from moerl.convert.tiny import tiny_config, tiny_qwen3_config, write_tiny
from moerl.models import ModelSpec, read_spec
from moerl.models.shard import Shard
from moerl.reshard import orders
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_boxes import EngineTopology, padded_vocabulary
from moerl.reshard.sync import WeightSync
from moerl.reshard.transport import Transport, open_transport
from moerl.rollout.client import EngineClient
from moerl.rollout.server import EngineServer

FAMILIES = {
    "deepseek": tiny_config(hidden=64, layers=3, experts=16, topk=4, groups=4, group_topk=2, initializer_range=0.1),
    "qwen3": tiny_qwen3_config(hidden=64, layers=3, experts=16, topk=4, initializer_range=0.1),
}
PROMPTS = [[3 + (7 * i + j * j) % 16 for j in range(40 + i)] for i in range(4)]
"""Long enough that keys and values computed by other weights show in what follows."""
TOLERANCE = 2e-5
"""Of log-probabilities of equal weights, where requests may have been batched differently."""
BUCKET_MIB = 0.3
WATCHDOG_S = 8

Answer = tuple[list[int], list[float]]
"""Tokens, and the log-probability of each."""


class Pending:
    """Calls under way, one per engine; see `moerl.reshard.link.Replies`."""

    def __init__(self, calls: Sequence[concurrent.futures.Future]):
        self._calls = calls

    def check(self) -> None:
        for call in self._calls:
            if call.done():
                call.result()

    def wait(self, deadline: Deadline) -> list[Any]:
        def done() -> bool:
            self.check()
            return all(call.done() for call in self._calls)

        deadline.poll(done, "the engines")
        return [call.result() for call in self._calls]

    def failures(self, deadline: Deadline) -> list[str]:
        done, _ = concurrent.futures.wait(self._calls, timeout=max(0.0, deadline.timeout_s - deadline.elapsed_s))
        return [str(call.exception()) for call in self._calls if call in done and call.exception() is not None]


class ClientLink:
    """An `EngineLink`: clients in an event loop of their own thread.

    Attributes:
        state: "fenced", or the version that was published last.
        before: called right before a method, or an order ("Join"), goes out.
    """

    host, backend = "127.0.0.1", "gloo"

    def __init__(self, urls: Sequence[str], tp: int):
        self.tp, self.epoch, self.state = tp, 0, None
        self.before: dict[str, Callable[[], None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened: list[EngineClient] = []
        self.lead_to(urls, tp)

    def lead_to(self, urls: Sequence[str], tp: int) -> None:
        """From now on these are the engines."""
        self.names, self.tp = list(urls), tp
        self.clients = [self.run(EngineClient(url, 60, 120).__aenter__()) for url in urls]
        self._opened += self.clients

    def submit(self, coroutine: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Any) -> Any:
        return self.submit(coroutine).result(120)

    def start(self, method: str, arguments: Sequence[dict[str, Any]]) -> Pending:
        name = type(orders.decode(arguments[0]["order"])).__name__ if method == "order" else method
        if name in self.before:
            self.before[name]()
        return Pending([self.submit(getattr(client, method)(**given)) for client, given in zip(self.clients, arguments, strict=True)])

    def fence(self) -> None:
        self.state = "fenced"

    def publish(self, version: int) -> None:
        self.state = version

    def order(self, order: orders.Order, timeout_s: float = 30.0) -> list[str]:
        """Each engine's answer."""
        given = {"order": orders.encode(order), "load_format": orders.LOAD_FORMAT, "timeout_s": timeout_s}
        return self.start("order", [given] * len(self.names)).wait(Deadline("an order", timeout_s + 5))

    def each(self, method: str) -> list[Any]:
        """What each engine answers to a method without arguments."""
        return self.start(method, [{}] * len(self.names)).wait(Deadline(method, 60))

    def ask(self, prompts: Sequence[list[int]], tokens: int, version: int, number: int = 0) -> concurrent.futures.Future:
        """Raw replies of one engine to come: greedy, always `tokens` tokens, prefixes shared within `version` only."""
        body = {
            "input_ids": list(prompts),
            "return_logprob": True,
            "extra_key": f"version {version}",
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        }
        return self.submit(self.clients[number]._post("/generate", body, 120))

    def answers(self, version: int, number: int = 0) -> list[Answer]:
        """To `PROMPTS`, of one engine."""
        return [answer(reply) for reply in self.ask(PROMPTS, 12, version, number).result(120)]

    def close(self) -> None:
        for client in self._opened:
            self.run(client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def answer(reply: dict[str, Any]) -> Answer:
    return reply["output_ids"], [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]


def same(ours: Sequence[Answer], theirs: Sequence[Answer], tolerance: float = TOLERANCE) -> bool:
    """Whether the tokens are equal, and the log-probabilities up to rounding."""
    return [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs] and difference(ours, theirs) <= tolerance


def difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """The largest between log-probabilities at the same place."""
    return max(abs(a - b) for (_, mine), (_, other) in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))


@dataclass
class Loaded:
    """A server that loaded NEW from disk, and what it was before anything was pushed into it.

    Attributes:
        checksums: parameter -> hash, of each rank.
        parameter_nbytes: of each rank, without the padding of vocabularies.
    """

    server: EngineServer
    checksums: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    parameter_nbytes: list[int] = field(default_factory=list)

    @property
    def tp(self) -> int:
        return self.server.engine.tp

    @property
    def serves(self) -> bool:
        return self.server.alive() and bool(self.answers)

    def observe(self, spec: ModelSpec) -> None:
        link = ClientLink([self.server.url], self.tp)
        self.checksums, self.answers = link.each("checksums")[0], link.answers(0)
        described = orders.answers(link.order(orders.Describe())[0], orders.Description)
        self.parameter_nbytes = [_nbytes(rank, description, self.tp, spec) for rank, description in enumerate(described)]
        link.close()


def _nbytes(rank: int, description: orders.Description, tp: int, spec: ModelSpec) -> int:
    """Bytes of a rank's parameters, counted from their shapes; of the vocabulary's rows, those that exist."""
    rows_per_rank = padded_vocabulary(spec.vocab_size, tp) // tp
    rows = min(max(spec.vocab_size - rank * rows_per_rank, 0), rows_per_rank)
    found = 0
    for name, look in description.parameters.items():
        shape = (rows, *look.shape[1:]) if name in ("model.embed_tokens.weight", "lm_head.weight") else look.shape
        found += torch.Size(shape).numel() * getattr(torch, look.dtype).itemsize
    return found


class Fleet:
    """Servers by family, ranks and number: started when first asked for, and again after a test has killed one."""

    def __init__(self, root: Path):
        self._root, self._versions = root, itertools.count(1)
        self._loaded: dict[tuple[str, int, int], Loaded] = {}
        self._checkpoints: dict[str, list[Path]] = {}

    def checkpoints(self, family: str) -> list[Path]:
        """The folders OLD and NEW."""
        if family not in self._checkpoints:
            self._checkpoints[family] = two_checkpoints(self._root / family, FAMILIES[family])
        return self._checkpoints[family]

    def spec(self, family: str) -> ModelSpec:
        return read_spec(self.checkpoints(family)[1])

    def version(self) -> int:
        """One that no engine has seen."""
        return next(self._versions)

    def get(self, family: str, *wanted: tuple[int, int]) -> list[Loaded]:
        """Servers by (tensor-parallel ranks, number)."""
        keys = [(family, *one) for one in wanted]
        missing = [key for key in keys if key not in self._loaded or not self._loaded[key].serves]
        for key in missing:
            if key in self._loaded:
                self._loaded[key].server.stop()
            self._loaded[key] = Loaded(self._server(*key))
            self._loaded[key].server.start()
        for key in missing:
            self._loaded[key].server.wait_healthy()
            self._loaded[key].observe(self.spec(family))
        return [self._loaded[key] for key in keys]

    def stop(self) -> None:
        for loaded in self._loaded.values():
            loaded.server.stop()

    def _server(self, family: str, tp: int, number: int) -> EngineServer:
        engine = Engine(device="cpu", dtype="float32", tp=tp, max_running_requests=8, max_total_tokens=4096)
        # The soft watchdog only logs what the other one, which ends the server after minutes, would see.
        options = {"soft_watchdog_timeout": WATCHDOG_S}
        log = self._root / f"{family}-tp{tp}-{number}.log"
        return EngineServer(self.checkpoints(family)[1], engine, options, log_path=log, seed=1)


def two_checkpoints(root: Path, config: dict[str, Any]) -> list[Path]:
    """Two folders that differ in every tensor, norms and biases included."""
    folders = []
    for seed, name in ((1, "old"), (2, "new")):
        folder = root / name
        write_tiny(folder, config, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(folder / "model.safetensors")
        moved = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return folders


def whole_shards(spec: ModelSpec, folder: Path) -> list[Shard]:
    """The shards of a trainer with one process, from a folder."""
    weights, held = load_file(folder / "model.safetensors"), []
    for entry in spec.entries():
        parts = [weights[name] for name in entry.hf]
        if entry.param.head_rows:
            groups = spec.hf_config["num_key_value_heads"]
            parts = [torch.cat([part.view(groups, -1, spec.hidden_size) for part in parts], dim=1).view(-1, spec.hidden_size)]
        held.append(Shard(entry, torch.cat(parts), 0, 1))
    return held


def make_sync(
    spec: ModelSpec, link: ClientLink | None, *, engines: EngineTopology | None = None, parallel: Parallel | None = None, **settings: Any
) -> WeightSync:
    """A `WeightSync` with small buckets; settings are those of `[sync]`.

    Args:
        engines: how they cut the model; needed where there is no link.
    """
    engines = engines or topology(link.tp, len(link.names))
    return WeightSync(spec, parallel or Parallel(), engines, Sync(**{"bucket_mib": BUCKET_MIB, "timeout_s": 60.0} | settings), link)


def topology(tp: int, count: int = 1) -> EngineTopology:
    return EngineTopology(count, tp, cpu=True, dtype="float32")


def opening(change: Callable[[Transport], None]) -> Callable[..., Transport]:
    """An `open_transport` whose transports are changed by `change`."""

    def open_changed(*arguments: Any) -> Transport:
        transport = open_transport(*arguments)
        change(transport)
        return transport

    return open_changed
