"""The compatible way of weight sync: whole HF tensors, broadcast to every engine, which cuts out its own part.

                      all trainer ranks                                trainer rank 0
    Shard --gather--> bucket on rank 0 --broadcast--> engines load it (SGLang's own loader) --> checksums of every parameter

It needs no layout of the engine to be known for the transfer itself, and is what faster ways are compared with.
"""

from collections.abc import Mapping, Sequence

import torch

from moerl.errors import EngineError, ReshardError, WaitTimeout
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.reshard import crew
from moerl.reshard import group as sync_group
from moerl.reshard.bucket import Bucket, cut
from moerl.reshard.deadline import Deadline
from moerl.reshard.direct import Moved
from moerl.reshard.engine_layout import LayoutChecksums, check_layout, combine, compare
from moerl.reshard.gather import gather_bucket, plan_gather, signatures
from moerl.reshard.link import EngineLink

_CLEANUP_TIMEOUT_S = 10.0


class Compatible:
    """One trainer rank's part; all methods are collective over the trainer's ranks.

    Args:
        dtype: the engines' dtype.
        link: the engines; on rank 0 only.
    """

    name = "compatible"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, bucket_mib: float, link: EngineLink | None):
        self._spec, self._link = spec, link
        self._buckets = cut(spec, dtype, bucket_mib)
        self._signatures, self._plan = None, None
        self._group, self._epoch = None, -1
        self._expected: list[dict[str, str]] = []

    def prepare(self, shards: Sequence[Shard], deadline: Deadline) -> None:
        """Agree on who sends what, and join the engines' group. Touches no weight.

        Raises:
            ReshardError: the shards do not make up the model, or an engine did not join.
        """
        if any(crew.all(lambda: signatures(shards) != self._signatures, deadline)):
            self._plan = plan_gather(shards, self._spec)
            self._signatures = signatures(shards)
        crew.first(lambda: self._join(deadline), deadline)

    def transfer(self, shards: Sequence[Shard], version: int, deadline: Deadline) -> Moved:
        """Have every engine load all weights. They must be paused and closed.

        Raises:
            ReshardError: on every rank.
        """
        held = {shard.entry.megatron: shard for shard in shards}
        checksums = LayoutChecksums(self._spec, self._link.tp) if self._link is not None else None
        for number, bucket in enumerate(self._buckets, 1):
            flat = self._gather(bucket, held, deadline)
            crew.first(lambda number=number, bucket=bucket, flat=flat: self._send(number, bucket, flat, checksums, deadline), deadline)
        self._expected = crew.first(lambda: checksums.finish(), deadline)
        ranks = crew.first(lambda: len(self._link.names) * self._link.tp, deadline)
        nbytes = sum(bucket.nbytes for bucket in self._buckets)
        return Moved(nbytes * ranks, nbytes, len(self._buckets), None, ((nbytes, nbytes),) * ranks)

    def digest(self) -> str:
        """Of what was sent last."""
        return combine(self._expected)

    def verify(self, deadline: Deadline) -> None:
        """Compare every engine's checksums with the trainer's.

        Raises:
            ReshardError: something is not what was sent.
        """
        crew.first(lambda: self._check(deadline), deadline)

    def forget(self) -> None:
        """Leave the group shared with the engines, if there is one. Never raises for engines that are gone."""
        if self._group is None:
            return
        group, self._group = self._group, None
        sync_group.close(group)
        try:
            self._all(Deadline("leaving the engines' group", _CLEANUP_TIMEOUT_S), "destroy_group", name=group.name)
        except (EngineError, WaitTimeout):
            # Best effort: an engine that is gone cannot leave.
            return

    def _gather(self, bucket: Bucket, held: Mapping[str, Shard], deadline: Deadline) -> torch.Tensor | None:
        """The whole bucket, on rank 0."""
        found: list[torch.Tensor | None] = []
        crew.all(lambda: found.append(gather_bucket(self._plan, bucket, held, crew.group_device(), deadline)), deadline)
        return found[0]

    def _join(self, deadline: Deadline) -> None:
        """Make the shared group, unless the one of an earlier push still holds all engines."""
        link = self._link
        check_layout(self._spec, link.tp, cpu=link.backend == "gloo")
        if self._group is not None and self._epoch == link.epoch:
            return
        self.forget()
        world, name = 1 + len(link.names) * link.tp, sync_group.unique_name()
        store = sync_group.open_store(link.host, world, deadline)
        common = {"host": link.host, "port": store.port, "world_size": world, "name": name, "backend": link.backend}
        replies = link.start("init_group", [{**common, "rank_offset": 1 + i * link.tp} for i in range(len(link.names))])
        self._group = sync_group.join(store, name, link.backend, world, deadline, interrupt=replies.check)
        self._epoch = link.epoch
        replies.wait(deadline)

    def _send(self, number: int, bucket: Bucket, flat: torch.Tensor, checksums: LayoutChecksums, deadline: Deadline) -> None:
        order = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group": self._group.name}
        try:
            replies = self._link.start("receive_bucket", [{**order, "version": None, "flush": False}] * len(self._link.names))
            sync_group.broadcast(self._group, flat.to(self._group.device), deadline, interrupt=replies.check)
            for slot, view in bucket.views(flat):  # the engines are loading meanwhile
                checksums.add(slot, view)
            replies.wait(deadline)
        except (EngineError, ReshardError, WaitTimeout) as error:
            missing = [slot.name for later in self._buckets[number - 1 :] for slot in later.slots]
            raise ReshardError(
                f"bucket {number} of {len(self._buckets)}: {error}; not updated: {len(missing)} weights from {missing[0]} on"
            ) from error

    def _check(self, deadline: Deadline) -> None:
        problems = [
            f"{name}: {problem}"
            for name, reported in zip(self._link.names, self._all(deadline, "checksums"), strict=True)
            for problem in compare(self._expected, reported)
        ]
        if problems:
            raise ReshardError(f"{len(problems)} parameters differ from what was sent:\n" + "\n".join(f"  - {p}" for p in problems))

    def _all(self, deadline: Deadline, method: str, **arguments: object) -> list:
        return self._link.start(method, [arguments] * len(self._link.names)).wait(deadline)
