"""Engines as Ray actors: each supervises one SGLang server on its node and talks HTTP to it.

    EnginePool (driver) --Ray--> EngineActor --HTTP--> SGLang server (subprocess, killed by the kernel with its actor)

Prompts and groups travel as msgspec records. Invariants: groups come back in the order of their prompts, whatever engine
made them; nothing is generated while the pool is fenced, that is between the first write of a weight sync and the moment
all engines hold that version; a dead engine is an EngineError with the end of its log, never a hang; no process is left
after `stop`, nor after the driver's death.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import RayError

from moerl.cluster.calls import Calls
from moerl.cluster.runtime import Runtime
from moerl.cluster.slots import Look
from moerl.config.schema import Config
from moerl.errors import EngineError, WaitTimeout
from moerl.models import ModelSpec
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import Sampling, generate_groups, generate_some
from moerl.rollout.sample import Group, Prompt
from moerl.rollout.server import EngineServer, resolve_device
from moerl.routing.codec import Codec
from moerl.routing.trace import Layout

logger = logging.getLogger(__name__)

_DEATH_NOTICE_S = 3.0
"""How long a broken connection may precede the end of the server's main process."""
_STARTS = 3
_START_GRACE_S = 60.0
_CONTROL_GRACE_S = 10.0
_STOP_TIMEOUT_S = 30.0


class EngineActor:
    """Runs inside a Ray actor; all methods run in its event loop, whose thread lives as long as the actor.

    That thread starts the server, so the kernel kills the server when the actor dies.
    """

    def __init__(self, config: Config, number: int, log_path: str, version: int):
        self._config, self._number = config, number
        self._server = EngineServer(
            config.engine.model_path or config.model.path,
            config.engine,
            config.sglang,
            log_path=Path(log_path),
            version=version,
            seed=config.run.seed + number,
        )
        self._client: EngineClient | None = None
        self._enough: dict[str, asyncio.Event] = {}  # of the calls of `some` that run, by request id
        self._tokens, self._paused_s, self._paused_at = 0, 0.0, None

    async def start(self) -> str:
        """Start the server and wait until it is healthy; its url. If somebody took one of its ports meanwhile, with others."""
        for left in reversed(range(_STARTS)):
            self._server.start()
            try:
                await asyncio.to_thread(self._server.wait_healthy)
                break
            except EngineError:
                if not left or not self._server.met_a_taken_port():
                    raise
            logger.warning("engine %d starts again: a port that it had chosen was taken before it got there", self._number)
            await asyncio.to_thread(self._server.stop)
        timeouts = self._config.engine.request_timeout_s, self._config.rollout.request_timeout_s
        self._client = await EngineClient(self._server.url, *timeouts).__aenter__()
        return self._server.url

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """One method of the engine's client."""
        if method == "pause" and self._paused_at is None:
            self._paused_at = time.monotonic()
        try:
            result = await getattr(self._connected(), method)(**arguments)
        except EngineError as error:
            raise await self._explained(error) from error
        if method == "resume" and self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        return result

    async def look(self) -> Look:
        """What the engine does at the moment, and has done so far.

        Raises:
            EngineError: it does not say.
        """
        pause_s = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        return Look(await self._connected().load(), self._tokens, self._paused_s + pause_s)

    async def generate(self, prompts: bytes, sampling: Sampling, group_size: int, tag: str) -> bytes:
        """Groups for encoded prompts, encoded; see `generate_groups`."""
        try:
            groups = await generate_groups([self._connected()], _decode(prompts, Prompt), sampling, group_size=group_size, tag=tag)
        except EngineError as error:
            raise await self._explained(error) from error
        for group in groups:
            for sample in group.samples:
                sample.engine = self._number
        return msgspec.msgpack.encode(groups)

    async def some(self, prompt: bytes, sampling: Sampling, indices: Sequence[int], keep: int, rid: str) -> bytes:
        """An encoded `Outcome` for an encoded prompt; see `generate_some`."""
        decoded = msgspec.msgpack.decode(prompt, type=Prompt)
        options = {"indices": indices, "keep": keep, "rid": rid, "engine": self._number}
        enough = self._enough.setdefault(rid, asyncio.Event())
        try:
            outcome = await generate_some(self._connected(), decoded, sampling, enough=enough, **options)
        except EngineError as error:
            raise await self._explained(error) from error
        finally:
            del self._enough[rid]
        self._tokens += outcome.tokens
        return msgspec.msgpack.encode(outcome)

    async def give_up(self, rid: str) -> None:
        """Have the call of `some` with this id return now, with what it has; it may be about to begin."""
        self._enough.setdefault(rid, asyncio.Event()).set()

    async def alive(self) -> bool:
        return self._server.alive()

    async def stop(self) -> None:
        """End the server and all its processes."""
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
        await asyncio.to_thread(self._server.stop)

    def _connected(self) -> EngineClient:
        if self._client is None:
            raise EngineError(f"engine {self._number} is not running")
        return self._client

    async def _explained(self, error: EngineError) -> EngineError:
        """The server's own end, if that is why a request failed."""
        deadline = time.monotonic() + _DEATH_NOTICE_S
        while "connect" in str(error) and self._server.alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return error if self._server.alive() else self._server.died()


@dataclass(frozen=True)
class _Budget:
    """A deadline for `Calls.wait`."""

    what: str
    timeout_s: float
    start: float

    def left(self, waiting_for: str) -> float:
        left = self.start + self.timeout_s - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"{self.what}: waited {self.timeout_s:g} s for {waiting_for}")
        return left


def _budget(what: str, timeout_s: float) -> _Budget:
    return _Budget(what, timeout_s, time.monotonic())


def trace_codec(config: Config, spec: ModelSpec) -> Codec:
    """How this run's routes travel: the codec of the settings, with the group limit of the model's router."""
    limit = spec.megatron.get("moe_router_num_groups"), spec.megatron.get("moe_router_group_topk")
    return Codec(config.rollout.trace_codec, False, *(limit if all(limit) else (0, 0)))


class EnginePool:
    """All engines of a run, driven from trainer rank 0; also the `EngineLink` of weight sync.

    Use as a context manager: entering starts the engines, leaving stops them.

    Args:
        runtime: of the Ray that the engines run in.
        log_dir: receives `engine-<number>.log`.
        version: weight version of the folder `config.model.path`.

    Attributes:
        names, tp, host, backend, epoch: see `reshard.link.EngineLink`.
    """

    def __init__(self, config: Config, spec: ModelSpec, runtime: Runtime, *, log_dir: Path, version: int = 0):
        count = config.engine.count
        self.names = [f"engine {i}" for i in range(count)]
        self.tp, self.host, self.epoch = config.engine.tp, runtime.host, 0
        self._device = resolve_device(config.engine.device)
        self.backend = "nccl" if self._device == "cuda" else "gloo"
        self._config, self._spec, self._log_dir = config, spec, Path(log_dir).resolve()
        self._layout = Layout(spec.moe_layers, spec.experts, spec.topk)
        self._codec = trace_codec(config, spec)
        self._folder_version, self._version = version, None
        self._actors: list[Any] = [None] * count
        self._restarts = [0] * count
        self._generations = 0

    def __enter__(self) -> Self:
        try:
            self._start(range(len(self.names)))
        except BaseException:
            self.stop()
            raise
        self._version = self._folder_version
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def version(self) -> int | None:
        """The version that all engines hold; None while they don't hold one."""
        return self._version

    @property
    def actors(self) -> list[Any]:
        """The engines' actors, in order."""
        return list(self._actors)

    def log_path(self, number: int) -> Path:
        return self._log_dir / f"engine-{number}.log"

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, max_new_tokens: int, temperature: float, routes: bool = True
    ) -> list[Group]:
        """`group_size` completions of every prompt, spread over the engines; groups in the order of `prompts`.

        Raises:
            EngineError: the engines hold no complete version, one died (with the end of its log), or refused a request.
            RolloutError, TraceError: a reply does not prove itself.
        """
        if self._version is None:
            raise EngineError(
                "the engines hold no complete version of the weights: a sync failed or an engine was restarted; push the weights first"
            )
        self._generations += 1
        count = min(len(self.names), len(prompts))
        sampling = Sampling(max_new_tokens, temperature, routes, self._layout, self._spec.layers, version=self._version, codec=self._codec)
        references = [
            self._actors[i].generate.remote(
                msgspec.msgpack.encode(list(prompts[i::count])), sampling, group_size, f"call{self._generations}"
            )
            for i in range(count)
        ]
        calls = Calls("generate", self.names[:count], references, self._died)
        try:
            parts = calls.wait(_budget("generation", self._config.rollout.request_timeout_s + _CONTROL_GRACE_S))
        except BaseException:
            self._abort_all()
            raise
        groups: list[Any] = [None] * len(prompts)
        for i, part in enumerate(parts):
            groups[i::count] = _decode(part, Group)
        return groups

    def start(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> Calls:
        """Begin one client method on every engine; `arguments[i]` goes to engine i."""
        references = [actor.call.remote(method, given) for actor, given in zip(self._actors, arguments, strict=True)]
        return Calls(method, self.names, references, self._died)

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """One client method on every engine, to its end."""
        timeout_s = self._config.engine.request_timeout_s + _CONTROL_GRACE_S
        return self.start(method, [arguments] * len(self.names)).wait(_budget(method, timeout_s))

    def fence(self) -> None:
        """From now on the engines hold no complete version."""
        self._version = None

    def publish(self, version: int) -> None:
        """All engines hold `version`, completely."""
        self._version = version

    def versions(self) -> list[int]:
        """The weight version that each engine reports."""
        return self.call("version")

    def checksums(self) -> list[list[dict[str, str]]]:
        """Per engine and rank: parameter -> hash."""
        return self.call("checksums")

    def dead(self) -> list[int]:
        """Numbers of the engines whose server or supervisor is gone."""
        return [i for i in range(len(self.names)) if not self._is_alive(i)]

    def restart_dead(self) -> list[int]:
        """Start dead engines again, from the model folder; afterwards the pool is fenced until weights are pushed.

        Returns:
            the numbers of the engines that were restarted.

        Raises:
            EngineError: an engine died more often than `engine.max_restarts`, or does not start.
        """
        dead = self.dead()
        for i in dead:
            if self._restarts[i] >= self._config.engine.max_restarts:
                raise EngineError(
                    f"{self.names[i]} is dead and was restarted {self._restarts[i]} times already (engine.max_restarts = "
                    f"{self._config.engine.max_restarts}); the end of its log {self.log_path(i)}:\n{_tail(self.log_path(i))}"
                )
        if dead:
            self.fence()
            self.epoch += 1
            for i in dead:
                self._restarts[i] += 1
                logger.warning("%s is dead; restart %d of %d", self.names[i], self._restarts[i], self._config.engine.max_restarts)
            self._stop(dead)
            self._start(dead)
        return dead

    def stop(self) -> None:
        """End all engines; also when some are dead or hang. Safe to call twice."""
        self._version = None
        self._stop(range(len(self.names)))

    def _start(self, numbers: Sequence[int]) -> None:
        """Start some engines at once and wait for all of them."""
        options = {"num_cpus": 0, "num_gpus": self.tp if self._device == "cuda" else 0, "max_restarts": 0}
        references = []
        for i in numbers:
            actor = ray.remote(**options)(EngineActor).remote(self._config, i, str(self.log_path(i)), self._folder_version)
            self._actors[i] = actor
            references.append(actor.start.remote())
        calls = Calls("start", [self.names[i] for i in numbers], references, lambda k: self._died(numbers[k]))
        calls.wait(_budget("starting engines", self._config.engine.start_timeout_s + _START_GRACE_S))

    def _stop(self, numbers: Sequence[int]) -> None:
        running = [i for i in numbers if self._actors[i] is not None]
        if running:
            ray.wait([self._actors[i].stop.remote() for i in running], num_returns=len(running), timeout=_STOP_TIMEOUT_S)
        for i in running:
            # An actor that hangs is killed all the same; the kernel then kills its server.
            ray.kill(self._actors[i])
            self._actors[i] = None

    def _is_alive(self, i: int) -> bool:
        if self._actors[i] is None:
            return False
        try:
            return ray.get(self._actors[i].alive.remote(), timeout=self._config.engine.request_timeout_s)
        except RayError:
            return False

    def _abort_all(self) -> None:
        """After a failed or interrupted generation: nothing may keep running in the engines that are left."""
        references = [actor.call.remote("abort_all", {}) for actor in self._actors if actor is not None]
        ray.wait(references, num_returns=len(references), timeout=_CONTROL_GRACE_S)

    def _died(self, i: int) -> EngineError:
        return EngineError(f"the supervisor of {self.names[i]} died; the end of the log {self.log_path(i)}:\n{_tail(self.log_path(i))}")


def _decode(record: bytes, kind: type) -> list[Any]:
    return msgspec.msgpack.decode(record, type=list[kind])


def _tail(path: Path, lines: int = 30) -> str:
    if not path.is_file():
        return "  (no log on this machine)"
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - 65536))
        return "\n".join("  " + line[:400] for line in log.read().decode(errors="replace").splitlines()[-lines:]) or "  (empty)"
