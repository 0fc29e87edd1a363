"""Weight sync: new weights reach all engines completely, or none of them serves anything.

    prepare -> pause -> close -> open an update -> transfer -> end the update -> verify -> commit (version, caches, fence) -> resume

How bytes travel is the business of a *way*: `direct` (each engine rank receives its own bytes) or `compatible` (whole tensors, gathered
and broadcast). A transfer that fails is repeated: directly, in a new group, then by the compatible way.

Invariants: no request is served by weights that are partly of one version and partly of another: an engine is closed from before the
first write until all engines hold the version, and refuses to go on by itself, whatever becomes of the trainer. A failure raises the
same ReshardError on every trainer rank, and every wait is bounded by a deadline.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from moerl.errors import EngineError, ReshardError, WaitTimeout
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.reshard import crew, orders
from moerl.reshard.compatible import Compatible
from moerl.reshard.deadline import Deadline
from moerl.reshard.direct import Direct, Moved
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.link import EngineLink

if TYPE_CHECKING:
    from moerl.config.schema import Parallel, Sync

logger = logging.getLogger(__name__)

_CLEANUP_TIMEOUT_S = 5.0
_MODES = {"drain": "abort", "abort": "abort", "in_place": "in_place", "retract": "retract"}
"""As SGLang calls them; nothing is left to abort where the caller has waited for all requests."""


class Way(Protocol):
    """How bytes travel. All methods are collective over the trainer's ranks, and raise ReshardError on all of them."""

    name: str

    def prepare(self, shards: Sequence[Shard], deadline: Deadline) -> None:
        """Plan and connect; touches no weight."""

    def transfer(self, shards: Sequence[Shard], version: int, deadline: Deadline) -> Moved:
        """Write all weights into all engines, which are paused and closed."""

    def digest(self) -> str:
        """Of everything that was sent last: equal for equal weights sent by the same way and plan, and for no others."""

    def verify(self, deadline: Deadline) -> None:
        """Compare what the engines hold with what was sent."""

    def forget(self) -> None:
        """Give up connections. Never raises for engines that are gone."""


@dataclass(frozen=True)
class SyncReport:
    """What one weight sync did.

    Attributes:
        way: that it succeeded by.
        attempts: ways that were tried, the last one included.
        moved: bytes and buckets.
        seconds: by phase: prepare, transfer, verify, commit.
        verified: whether every engine parameter was read back.
        engine_versions: as every engine reports it afterwards.
        digest: over all parameters of all engine ranks.
    """

    version: int
    way: str
    attempts: int
    moved: Moved
    seconds: dict[str, float]
    verified: bool
    engine_versions: list[int]
    digest: str


@dataclass
class _Progress:
    """Where an attempt is, for its error message and its timings."""

    stage: str = "starting"
    closed: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prepare", "transfer", "verify", "commit"), 0.0))

    @contextmanager
    def phase(self, name: str, stage: str) -> Iterator[None]:
        self.stage, start = stage, time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - start


class WeightSync:
    """Pushes versions to the engines; one per trainer rank, made and used by all ranks together.

    Args:
        engine: how engines cut the model.
        link: the engines; on rank 0 only, None elsewhere.
    """

    def __init__(self, spec: ModelSpec, parallel: "Parallel", engine: EngineTopology, settings: "Sync", link: EngineLink | None):
        rank, _ = crew.rank_and_world()
        if (link is not None) != (rank == 0):
            raise ReshardError(f"rank 0, and only rank 0, drives the engines; rank {rank} was given link = {link!r}")
        self._settings, self._link = settings, link
        self._ways: dict[str, Way] = {
            "direct": Direct(spec, parallel, engine, settings, link),
            "compatible": Compatible(spec, getattr(torch, engine.dtype), settings.bucket_mib, link),
        }
        self._pushes = 0
        self._closed = False  # from the first write to an engine to the next commit

    def push(self, shards: Sequence[Shard], version: int) -> SyncReport:
        """Give every engine the weights in `shards`, as `version`. Collective over the trainer's ranks.

        Raises:
            ReshardError: on every rank; says how far each attempt came and what the engines hold.
        """
        self._pushes += 1
        failures, ladder = [], self._settings.ladder
        for number, way in enumerate(ladder, 1):
            progress = _Progress()
            try:
                report = self._attempt(self._ways[way], shards, version, progress)
                return replace(report, attempts=number)
            except ReshardError as error:
                failures.append(f"{way}: weight sync of version {version} failed while {progress.stage}: {error}")
                self._clean_up(progress)
                if not self._can_repeat() or number == len(ladder):
                    raise ReshardError("\n".join([*dict.fromkeys(failures), self._state()])) from error
                logger.warning("%s; trying again (%s)", failures[-1], ladder[number])
        raise ReshardError("no way of weight sync is left")  # a ladder is never empty

    def read(self, names: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """Little-endian float32 of some small parameters, as the first rank of the first engine holds them; on rank 0 only.

        Raises:
            EngineError, WaitTimeout, ReshardError: the engines did not answer.
        """
        deadline = Deadline("reading parameters of the engines", timeout_s)
        order = {"order": orders.encode(orders.Read(list(names))), "load_format": orders.LOAD_FORMAT, "timeout_s": timeout_s}
        return orders.answers(self._all("order", deadline, **order)[0], orders.Values)[0].values

    def close(self) -> None:
        """Leave the groups shared with the engines. Never raises for engines that are gone."""
        for way in self._ways.values():
            way.forget()

    def _attempt(self, way: Way, shards: Sequence[Shard], version: int, progress: _Progress) -> SyncReport:
        deadline = Deadline(f"weight sync of version {version}", self._settings.timeout_s)
        with progress.phase("prepare", "joining the engines"):
            way.prepare(shards, deadline)
        with progress.phase("commit", "pausing the engines"):
            crew.first(lambda: self._all("pause", deadline, mode=_MODES[self._settings.interrupt]), deadline)
            progress.closed = self._closed = True
            crew.first(lambda: self._open_update(deadline), deadline)
        with progress.phase("transfer", "sending the weights"):
            moved = way.transfer(shards, version, deadline)
        with progress.phase("commit", "closing the update"):
            crew.first(lambda: self._all("end_update", deadline), deadline)
        verified = self._is_due()
        if verified:
            with progress.phase("verify", "verifying the engines' parameters"):
                way.verify(deadline)
        with progress.phase("commit", "committing the version"):
            versions = crew.first(lambda: self._commit(version, deadline), deadline)
            self._closed = False
        return SyncReport(version, way.name, 1, moved, progress.seconds, verified, versions, way.digest())

    def _is_due(self) -> bool:
        every = {"every": 1, "never": 0}.get(self._settings.verify, self._settings.verify)
        return bool(every) and (self._pushes - 1) % every == 0

    def _open_update(self, deadline: Deadline) -> None:
        self._link.fence()
        self._order(orders.Close(), deadline)
        try:
            self._all("begin_update", deadline)
        except EngineError:
            # A trainer that died in the middle has left its update open, in some engines at least.
            self._quietly("end_update")
            self._all("begin_update", deadline)

    def _commit(self, version: int, deadline: Deadline) -> list[int]:
        self._order(orders.Commit(version), deadline)
        versions = self._all("version", deadline)
        if wrong := [f"{name} reports {found}" for name, found in zip(self._link.names, versions, strict=True) if found != version]:
            raise ReshardError(f"engines should report version {version}, but " + ", ".join(wrong))
        self._all("resume", deadline)
        self._link.publish(version)
        return versions

    def _order(self, order: orders.Order, deadline: Deadline) -> None:
        self._all("order", deadline, order=orders.encode(order), load_format=orders.LOAD_FORMAT, timeout_s=deadline.left("the engines"))

    def _all(self, method: str, deadline: Deadline, **arguments: object) -> list:
        return self._link.start(method, [arguments] * len(self._link.names)).wait(deadline)

    def _clean_up(self, progress: _Progress) -> None:
        """After a failure: give up groups, end the engines' updates, or let them go on where nothing was written."""
        for way in self._ways.values():
            way.forget()
        if self._link is not None and progress.closed:
            self._quietly("end_update")
        elif self._link is not None and not self._closed:
            self._quietly("resume")

    def _can_repeat(self) -> bool:
        """Whether all engines still answer; one that is gone must be restarted first."""
        deadline = Deadline("asking the engines whether they are there", _CLEANUP_TIMEOUT_S)
        try:
            crew.first(lambda: self._all("version", deadline), deadline)
        except ReshardError:
            return False
        return True

    def _quietly(self, method: str) -> None:
        try:
            self._all(method, Deadline(f"cleaning up: {method}", _CLEANUP_TIMEOUT_S))
        except (EngineError, WaitTimeout):
            # Best effort: the failure that led here is being reported already, and a dead engine cannot answer.
            return

    def _state(self) -> str:
        """What a failure means for the engines."""
        if not self._closed:
            return "Nothing was written: the engines keep their previous weights, as far as they are alive."
        return "The engines are closed until a complete version arrives: restart those that died, then push again."
