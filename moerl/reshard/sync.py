"""The compatible way of weight sync: whole HF tensors, broadcast to every engine, which cuts out its own part.

                      all trainer ranks                                 trainer rank 0
    Shard --gather--> bucket on rank 0 --broadcast--> engines load it --> ... --> flush, checksums, version tag

It works with an unmodified engine and any pair of layouts, and is what faster ways are compared with.

Invariants: an engine is tagged with a version only after all buckets arrived, its prefix cache was dropped and (if asked for)
every parameter's checksum on every rank equals the trainer's; engines are fenced from the first write to that tag; a
failure raises the same ReshardError on every trainer rank, and every wait is bounded by one deadline. Call it while no
request is running: requests in flight are aborted.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from moerl.errors import EngineError, ReshardError, WaitTimeout
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.reshard import group as sync_group
from moerl.reshard.bucket import Bucket, cut
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_layout import LayoutChecksums, check_layout, combine, compare
from moerl.reshard.gather import gather_bucket, group_device, plan_gather, rank_and_world, signatures
from moerl.reshard.link import EngineLink

_CLEANUP_TIMEOUT_S = 10.0
_FOLLOWER_GRACE_S = 30.0
"""Other ranks wait this much longer than rank 0, so that its account of a failure still reaches them."""


@dataclass(frozen=True)
class SyncReport:
    """What one weight sync did.

    Attributes:
        nbytes: bytes of the whole model as sent (each engine rank receives all of them).
        seconds: by phase: join, gather, transfer, commit, verify.
        checksums_ok: None if not verified; a failed verification raises instead.
        engine_versions: as every engine reports it afterwards.
        checksum: one hash over all parameters of all ranks of an engine; empty if not verified.
    """

    version: int
    nbytes: int
    buckets: int
    seconds: dict[str, float]
    checksums_ok: bool | None
    engine_versions: list[int]
    checksum: str


@dataclass
class _Progress:
    """Where a push is, for its error message and its timings."""

    stage: str = "starting"
    loaded: int = 0
    fenced: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("join", "gather", "transfer", "commit", "verify"), 0.0))

    @contextmanager
    def phase(self, name: str, stage: str):
        self.stage, start = stage, time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - start


class WeightSync:
    """Pushes versions to the engines; one per trainer rank, made and used by all ranks together.

    Args:
        dtype: the engines' dtype.
        link: the engines; on rank 0 only, None elsewhere.
    """

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, bucket_mib: float, verify: bool, timeout_s: float, link: EngineLink | None):
        self._rank, self._world = rank_and_world()
        if (link is not None) != (self._rank == 0):
            raise ReshardError(f"rank 0, and only rank 0, drives the engines; rank {self._rank} was given link = {link!r}")
        if link is not None:
            check_layout(spec, link.tp, cpu=link.backend == "gloo")
        self._spec, self._verify, self._timeout_s, self._link = spec, verify, timeout_s, link
        self._buckets = cut(spec, dtype, bucket_mib)
        self._signatures, self._plan = None, None
        self._group, self._group_epoch = None, -1

    def push(self, shards: Sequence[Shard], version: int) -> SyncReport:
        """Give every engine the weights in `shards`, as `version`. Collective over the trainer's ranks.

        Raises:
            ReshardError: on every rank; says how far it came and which engines hold what.
        """
        deadline = Deadline(f"weight sync of version {version}", self._timeout_s)
        self._agree_on_plan(shards)
        held = {shard.entry.megatron: shard for shard in shards}
        if self._rank != 0:
            return self._follow(held, deadline)
        progress = _Progress()
        try:
            report = self._drive(held, version, deadline, progress)
        except Exception as error:  # whatever it is, the other ranks must hear of it, or they wait for nothing
            message = self._account(version, progress, error)
            self._clean_up(progress)
            self._announce({"error": message})
            raise ReshardError(message) from error
        self._announce({"report": asdict(report)})
        return report

    def close(self) -> None:
        """Leave the group shared with the engines, if there is one. Never raises for engines that are gone."""
        if self._group is not None:
            group, self._group = self._group, None
            self._quietly("destroy_group", name=group.name)
            sync_group.close(group)

    def _agree_on_plan(self, shards: Sequence[Shard]) -> None:
        """Exchange metadata at first, and again if any rank's shards look different."""
        mine = signatures(shards)
        changed = mine != self._signatures
        if self._world > 1:
            flag = torch.tensor([int(changed)], device=group_device())
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            changed = bool(flag.item())
        if changed:
            self._plan = plan_gather(shards, self._spec)
            self._signatures = mine

    def _drive(self, held: Mapping[str, Shard], version: int, deadline: Deadline, progress: _Progress) -> SyncReport:
        device = group_device()
        checksums = LayoutChecksums(self._spec, self._link.tp) if self._verify else None
        with progress.phase("join", "joining the group shared with the engines"):
            self._join(deadline)
            self._all(deadline, "pause", mode="abort")
        with progress.phase("commit", "opening the update"):
            progress.fenced = True
            self._link.fence()
            self._all(deadline, "begin_update")
        for number, bucket in enumerate(self._buckets, 1):
            with progress.phase("gather", f"gathering bucket {number} of {len(self._buckets)}"):
                self._announce(None)
                flat = gather_bucket(self._plan, bucket, held, device, deadline)
            with progress.phase("transfer", f"sending bucket {number} of {len(self._buckets)}"):
                self._transfer(bucket, flat, version, checksums, deadline)
            progress.loaded = number
        with progress.phase("commit", "closing the update and flushing the prefix caches"):
            self._all(deadline, "end_update")
            self._all(deadline, "flush_cache")
        checksum = ""
        if checksums is not None:
            with progress.phase("verify", "verifying checksums"):
                checksum = self._check(checksums.finish(), deadline)
        with progress.phase("commit", "tagging the version"):
            versions = self._tag(version, deadline)
        return SyncReport(
            version,
            sum(bucket.nbytes for bucket in self._buckets),
            len(self._buckets),
            progress.seconds,
            True if self._verify else None,
            versions,
            checksum,
        )

    def _join(self, deadline: Deadline) -> None:
        """Make the shared group, unless the one of an earlier push still holds all engines."""
        link = self._link
        if self._group is not None and self._group_epoch == link.epoch:
            return
        self.close()
        world = 1 + len(link.names) * link.tp
        store = sync_group.open_store(link.host, world, deadline)
        name = sync_group.unique_name()
        offers = [
            {
                "host": link.host,
                "port": store.port,
                "rank_offset": 1 + i * link.tp,
                "world_size": world,
                "name": name,
                "backend": link.backend,
            }
            for i in range(len(link.names))
        ]
        replies = link.start("init_group", offers)
        self._group = sync_group.join(store, name, link.backend, world, deadline, interrupt=replies.check)
        self._group_epoch = link.epoch
        replies.wait(deadline)

    def _transfer(self, bucket: Bucket, flat: torch.Tensor, version: int, checksums: LayoutChecksums | None, deadline: Deadline) -> None:
        replies = self._link.start(
            "receive_bucket",
            [
                {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group": self._group.name,
                    "version": None,
                    "flush": False,
                }
            ]
            * len(self._link.names),
        )
        sync_group.broadcast(self._group, flat.to(self._group.device), deadline, interrupt=replies.check)
        if checksums is not None:
            # The engines are loading meanwhile.
            for slot, view in bucket.views(flat):
                checksums.add(slot, view)
        replies.wait(deadline)

    def _check(self, expected: list[dict[str, str]], deadline: Deadline) -> str:
        """Compare every engine's checksums with the trainer's; return the combined hash."""
        problems = [
            f"{name}: {problem}"
            for name, reported in zip(self._link.names, self._all(deadline, "checksums"), strict=True)
            for problem in compare(expected, reported)
        ]
        if problems:
            raise ReshardError(f"{len(problems)} parameters differ from what was sent:\n" + "\n".join(f"  - {p}" for p in problems))
        return combine(expected)

    def _tag(self, version: int, deadline: Deadline) -> list[int]:
        self._all(deadline, "set_version", version=version)
        versions = self._all(deadline, "version")
        if wrong := [f"{name} reports {found}" for name, found in zip(self._link.names, versions, strict=True) if found != version]:
            raise ReshardError(f"engines should report version {version}, but " + ", ".join(wrong))
        self._all(deadline, "resume")
        self._link.publish(version)
        return versions

    def _all(self, deadline: Deadline, method: str, **arguments) -> list:
        return self._link.start(method, [arguments] * len(self._link.names)).wait(deadline)

    def _account(self, version: int, progress: _Progress, error: Exception) -> str:
        """What failed, how far it came, and what that means for the engines."""
        engines = f"the engines ({', '.join(self._link.names)})"
        head = f"weight sync of version {version} failed while {progress.stage}: {error}"
        if not progress.fenced:
            return f"{head}\nNothing was written: {engines} keep their previous weights, as far as they are alive."
        missing = [slot.name for bucket in self._buckets[progress.loaded :] for slot in bucket.slots]
        left = f"; not updated: {len(missing)} weights from {missing[0]} on" if missing else ""
        return (
            f"{head}\n{progress.loaded} of {len(self._buckets)} buckets were loaded{left}. Until a complete version arrives, {engines} "
            "serve nothing: restart those that died, then push again."
        )

    def _clean_up(self, progress: _Progress) -> None:
        """After a failure: give up the group, close the engines' open sessions. Engines that are gone are no further error."""
        if self._group is not None:
            sync_group.close(self._group)
            name, self._group = self._group.name, None
            self._quietly("destroy_group", name=name)
        self._quietly("end_update" if progress.fenced else "resume")

    def _quietly(self, method: str, **arguments) -> None:
        try:
            self._all(Deadline(f"cleaning up: {method}", _CLEANUP_TIMEOUT_S), method, **arguments)
        except (EngineError, WaitTimeout):
            # Best effort: the failure that led here is being reported already, and a dead engine cannot answer.
            return

    def _follow(self, held: Mapping[str, Shard], deadline: Deadline) -> SyncReport:
        """Ranks other than 0: send slices while rank 0 says so, then learn the outcome."""
        deadline = Deadline(deadline.what, deadline.timeout_s + _FOLLOWER_GRACE_S, deadline.start)
        device = group_device()
        for bucket in (*self._buckets, None):
            outcome = self._listen(deadline)
            if outcome is not None:
                if "error" in outcome:
                    raise ReshardError(outcome["error"])
                return SyncReport(**outcome["report"])
            gather_bucket(self._plan, bucket, held, device, deadline)
        raise ReshardError(f"{deadline.what}: rank 0 announced more than {len(self._buckets)} buckets")

    def _announce(self, outcome: dict | None) -> None:
        """Rank 0 to all: None = the next bucket follows; otherwise the end."""
        if self._world > 1:
            payload = b"" if outcome is None else json.dumps(outcome).encode()
            dist.broadcast(torch.tensor([len(payload)], device=group_device()), 0)
            if payload:
                dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(group_device()), 0)

    def _listen(self, deadline: Deadline) -> dict | None:
        size = torch.zeros(1, dtype=torch.int64, device=group_device())
        self._receive(size, deadline)
        if not size.item():
            return None
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=group_device())
        self._receive(payload, deadline)
        return json.loads(payload.cpu().numpy().tobytes())

    def _receive(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        try:
            dist.broadcast(tensor, 0, async_op=True).wait(timedelta(seconds=deadline.left("rank 0")))
        except RuntimeError as error:
            deadline.left("rank 0")
            raise ReshardError(f"{deadline.what}: waited for trainer rank 0, but the connection failed: {error}") from error
