"""An engine rank's side of a direct transfer: take a bucket, check it, write it in place.

    header + bytes --(delta: on top of what the parameters hold)--> content --checksum--> parameters, in place

Runs inside the engine's process, on its live parameters: their addresses never change, so captured CUDA graphs stay valid. Invariants:
nothing of a bucket is written before its content has proved itself, not even where only changes were sent; a failure leaves the group,
so that nobody waits for this rank. Memory beyond the model: the transport's buckets, and one more for deltas and for verifying.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moerl.errors import ReshardError
from moerl.reshard import delta
from moerl.reshard.checksum import checksum
from moerl.reshard.deadline import Deadline
from moerl.reshard.lanes import Lane, lanes_in
from moerl.reshard.orders import Received
from moerl.reshard.plan import Plan
from moerl.reshard.transport import Transport
from moerl.reshard.transport.rooms import ROOMS


@dataclass
class Receiver:
    """Attributes:
    plan: of this rank only.
    parameters: live, by the engine's names.
    version: held completely; None from the first write of another one to `commit`.
    """

    plan: Plan
    transport: Transport
    parameters: Mapping[str, torch.Tensor]
    version: int | None = None

    def __post_init__(self) -> None:
        self._lanes = lanes_in(self.plan)
        self._scratch: torch.Tensor | None = None

    def receive(self, version: int, base: int | None, deadline: Deadline) -> Received:
        """Take all buckets of a version and write them.

        Raises:
            ReshardError: a bucket is not what its sender packed, or changes are counted from a version that is not held here.
            WaitTimeout: a sender did not deliver in time.
        """
        if base is not None and base != self.version:
            raise ReshardError(
                f"version {version} comes as changes since version {base}, but this rank holds "
                f"{'no complete version' if self.version is None else f'version {self.version}'}; send all weights"
            )
        wire, checksums = 0, []
        for lane in self._lanes[:ROOMS]:
            self.transport.expect(lane.peer)
        for number, lane in enumerate(self._lanes):
            header, payload = self.transport.take(deadline)
            content = self._content(lane, header, payload, version)
            checksums.append(header[3])
            self.version = None
            lane.unpack(content, self.parameters.__getitem__)
            wire += len(payload)
            self.transport.done()
            if number + ROOMS < len(self._lanes):
                self.transport.expect(self._lanes[number + ROOMS].peer)
        _synchronise(self.transport.device)
        return Received(wire, sum(lane.nbytes for lane in self._lanes), checksums)

    def read_back(self) -> Received:
        """The checksums of what the parameters hold now."""
        checksums = []
        for lane in self._lanes:
            checksums.append(lane.pack_with_checksum(self.parameters.__getitem__, self._room(lane)))
        return Received(0, sum(lane.nbytes for lane in self._lanes), checksums)

    def _content(self, lane: Lane, header: list[int], payload: torch.Tensor, version: int) -> torch.Tensor:
        step, found_version, kind, expected = header[:4]
        where = f"bucket {lane.step} of version {version} from trainer rank {lane.peer}"
        if (step, found_version) != (lane.step, version):
            raise ReshardError(f"expected {where}, got bucket {step} of version {found_version}; nothing of it was written")
        content = payload
        if kind != delta.FULL:
            content = self._room(lane)
            lane.pack(self.parameters.__getitem__, content)
            delta.apply(payload, kind, content, lane.unit)
        if len(content) != lane.nbytes:
            raise ReshardError(f"{where} has {len(content)} bytes, expected {lane.nbytes}; nothing of it was written")
        if (got := checksum(content)) != expected:
            raise ReshardError(
                f"{where} is damaged: its checksum is {got:#x}, its sender computed {expected:#x}; nothing of it was written"
            )
        return content

    def _room(self, lane: Lane) -> torch.Tensor:
        if self._scratch is None:
            size = max(each.nbytes for each in self._lanes)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.transport.device)
        return self._scratch[: lane.nbytes]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
