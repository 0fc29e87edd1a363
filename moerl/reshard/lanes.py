"""One rank's buckets of a plan, ready to be packed or unpacked: which of its tensors each bucket touches, and where.

Plan.only(rank) + its tensors --> Lane per bucket --> the pack kernel's table (built once, until a tensor looks different)
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moerl.errors import ReshardError
from moerl.reshard.checksum import checksum_behind
from moerl.reshard.pack import Box, Table, build, pack, pack_in_parts, unpack
from moerl.reshard.plan import Copy, Plan

Tensors = Callable[[str], torch.Tensor]
"""Name -> the tensor that a plan calls so. Raises KeyError."""


@dataclass
class Lane:
    """One bucket between this rank and `peer`.

    Attributes:
        peer: rank in the group of trainer and engines.
        step: number that both sides know it by; unique between the two.
        nbytes: of its full content.
        unit: bytes of its smallest element.
    """

    peer: int
    step: int
    nbytes: int
    unit: int
    copies: tuple[Copy, ...]
    names: tuple[str, ...]
    table: Table | None = None

    def pack(self, tensors: Tensors, bucket: torch.Tensor) -> None:
        """Gather its content into uint8[nbytes]."""
        held = self._prepare(tensors)
        pack(self.table, held, bucket)

    def pack_with_checksum(self, tensors: Tensors, bucket: torch.Tensor) -> int:
        """Like `pack`; returns the `checksum` of the content."""
        held = self._prepare(tensors)
        return checksum_behind(pack_in_parts(self.table, held, bucket), bucket)

    def unpack(self, bucket: torch.Tensor, tensors: Tensors) -> None:
        """Scatter uint8[nbytes] into the tensors, in place."""
        held = self._prepare(tensors)
        unpack(self.table, bucket, held)

    def _prepare(self, tensors: Tensors) -> list[torch.Tensor]:
        held = [tensors(name) for name in self.names]
        looks = self.table.looks if self.table else ()
        if len(looks) != len(held) or any(
            tensor.dtype != look.dtype or tensor.shape != look.shape or tensor.stride() != look.strides
            for tensor, look in zip(held, looks, strict=True)
        ):
            self.table = build(_boxes(self.copies, self.names, held), held, self.nbytes)
        return held


def lanes_out(plan: Plan, rank: int) -> list[Lane]:
    """The buckets that trainer rank `rank` sends, in the plan's order."""
    mine = plan.only(sender=rank)
    return [_lane(plan.senders + int(bucket["receiver"]), bucket, mine.copies_out(number)) for number, bucket in enumerate(mine.buckets)]


def lanes_in(plan: Plan) -> list[Lane]:
    """The buckets of a plan for one receiver, in the plan's order."""
    if len(receivers := np.unique(plan.buckets["receiver"])) > 1:
        raise ReshardError(f"expected the plan of one receiver, got one of {len(receivers)}; use Plan.only")
    return [_lane(int(bucket["sender"]), bucket, plan.copies_in(number)) for number, bucket in enumerate(plan.buckets)]


def digest(checksums: Sequence[Sequence[int]]) -> str:
    """SHA-256 over the checksums of all buckets of all receivers. Under one plan it is equal exactly if every byte of every parameter is,
    but for the odds of the checksum; another plan cuts the same bytes into other buckets."""
    found = hashlib.sha256()
    for ranks in checksums:
        found.update(len(ranks).to_bytes(8, "little"))
        found.update(np.array(ranks, dtype="<i8").tobytes())
    return found.hexdigest()


def _lane(peer: int, bucket: np.ndarray, copies: Sequence[Copy]) -> Lane:
    names = tuple(dict.fromkeys(copy.parameter for copy in copies))
    unit = min(_dtype(copy.dtype).itemsize for copy in copies)
    return Lane(peer, int(bucket["step"]), int(bucket["nbytes"]), unit, tuple(copies), names)


def _boxes(copies: Sequence[Copy], names: Sequence[str], held: Sequence[torch.Tensor]) -> list[Box]:
    numbers = {name: number for number, name in enumerate(names)}
    return [
        Box(
            numbers[copy.parameter],
            copy.start,
            copy.counts,
            (*copy.strides, 1),
            held[numbers[copy.parameter]].dtype,
            copy.at,
            _dtype(copy.dtype),
        )
        for copy in copies
    ]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
