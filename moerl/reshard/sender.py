"""A trainer rank's side of a direct transfer: pack, checksum, send, bucket by bucket in the plan's order.

    live parameters --pack (cast to the engine's dtype)--> room --checksum, delta--> header + bytes --> the engine's rank

What engines serve in block-wise fp8 is quantised here, a bucket's parameters at a time.

With deltas, a copy of everything that was sent last is kept in the engine's dtype, and only the elements that differ from it travel:
lossless, bucket by bucket in whatever form is smallest. Memory beyond the model: the transport's buckets, and with deltas that copy
and one bucket more.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch

from moerl.reshard import delta
from moerl.reshard.deadline import Deadline
from moerl.reshard.fp8 import sources
from moerl.reshard.lanes import Lane, Tensors, lanes_out
from moerl.reshard.plan import Plan
from moerl.reshard.transport import Transport


@dataclass(frozen=True)
class Sent:
    """What one rank sent.

    Attributes:
        wire_nbytes: payload bytes.
        nbytes: of the full content.
        checksums: (receiver, step, checksum of the full content) of each bucket.
        changed, units: elements that changed since the version before, of all; both 0 where nothing is known of it.
        travelled: wire_nbytes by kind of transport.
        fallbacks: why some of them took a slower one than was possible.
    """

    wire_nbytes: int = 0
    nbytes: int = 0
    checksums: list[tuple[int, int, int]] = field(default_factory=list)
    changed: int = 0
    units: int = 0
    travelled: Counter[str] = field(default_factory=Counter)
    fallbacks: tuple[str, ...] = ()


class Sender:
    """Sends this rank's part of a plan, as often as there are versions.

    Args:
        keeps: keep what was sent, so that the next version can be sent as what changed.
    """

    def __init__(self, plan: Plan, rank: int, *, keeps: bool):
        self._lanes, self._first = lanes_out(plan, rank), plan.senders
        self._keeps = keeps
        self._block, self._power_of_two = plan.fp8_block, plan.fp8_power_of_two
        self._kept: dict[int, torch.Tensor] = {}
        self._scratch: torch.Tensor | None = None

    def send(self, transport: Transport, tensors: Tensors, version: int, *, only_changes: bool, deadline: Deadline) -> Sent:
        """Send every bucket.

        Args:
            tensors: live parameters by canonical Megatron name.
            only_changes: receivers hold what was sent last.

        Raises:
            WaitTimeout, ReshardError: a receiver did not take its bucket in time, or is gone.
        """
        wire, full, changed, units, checksums = 0, 0, 0, 0, []
        known, before = self._keeps and only_changes, transport.sent_nbytes.copy()
        for number, lane in enumerate(self._lanes):
            room = transport.room(lane.peer, deadline)
            content = room[: lane.nbytes]
            held = sources(lane.copies, tensors, self._block, power_of_two=self._power_of_two)
            check, found = lane.pack_with_checksum(held.__getitem__, content), None
            if self._keeps:
                found = self._replace(number, lane, content, known)
            kind, nbytes = (found.kind, found.nbytes) if found else (delta.FULL, lane.nbytes)
            if kind != delta.FULL:
                room[:nbytes].copy_(self._scratch[:nbytes])
            transport.send(lane.peer, (lane.step, version, kind, check), nbytes, deadline)
            wire, full = wire + nbytes, full + lane.nbytes
            checksums.append((lane.peer - self._first, lane.step, check))
            if found:
                changed, units = changed + found.changed, units + lane.nbytes // lane.unit
        transport.flush(deadline)
        return Sent(wire, full, checksums, changed, units, transport.sent_nbytes - before, tuple(transport.fallbacks.values()))

    def _replace(self, number: int, lane: Lane, content: torch.Tensor, known: bool) -> delta.Delta | None:
        """Keep what is sent instead of what was; the difference, if the receiver knows what it is from."""
        found = None
        if known:
            if self._scratch is None or len(self._scratch) < lane.nbytes:
                self._scratch = torch.empty(max(each.nbytes for each in self._lanes), dtype=torch.uint8, device=content.device)
            found = delta.encode(content, self._kept[number], lane.unit, self._scratch)
            self._kept[number].copy_(content)
        else:
            self._kept[number] = content.clone()
        return found
