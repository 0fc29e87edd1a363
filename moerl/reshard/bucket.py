"""The canonical weight stream, cut into buckets that an engine can load one by one.

    ModelSpec --units--> what must travel together --cut--> Bucket (a layout of one flat uint8 buffer)

Every trainer rank derives the same buckets from the model's specification alone, without communication.

Invariants: each HF tensor is in exactly one bucket; HF tensors that become one fused engine parameter are in the same
bucket (SGLang silently drops `q_a_proj` when its `kv_a_proj_with_mqa` comes in another call); tensors lie one after
another without gaps, and each starts at a multiple of its dtype's size, because wider dtypes come first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from moerl.errors import ReshardError
from moerl.models import Entry, ModelSpec


@dataclass(frozen=True)
class Slot:
    """Where one HF tensor lies in a bucket: `part` counts `entry.hf`, `offset` is in bytes."""

    entry: Entry
    part: int
    dtype: torch.dtype
    offset: int

    @property
    def name(self) -> str:
        return self.entry.hf[self.part]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.param.part_shape(self.part)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """A layout of `nbytes` bytes."""

    slots: tuple[Slot, ...]
    nbytes: int

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.slots]

    @property
    def dtypes(self) -> list[str]:
        """As engines spell them: "bfloat16"."""
        return [str(slot.dtype).removeprefix("torch.") for slot in self.slots]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(slot.shape) for slot in self.slots]

    def views(self, flat: torch.Tensor) -> Iterator[tuple[Slot, torch.Tensor]]:
        """The tensors inside a flat buffer uint8[nbytes], without copying."""
        for slot in self.slots:
            yield slot, flat[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)


def units(spec: ModelSpec, *, mtp: bool = False) -> list[tuple[Entry, ...]]:
    """Entries grouped by the engine parameter they become, in the canonical order of each group's first member.

    Routed experts are one unit each: engines load them one by one into the stacked parameter.

    Args:
        mtp: with those of multi-token prediction.
    """
    groups: dict[tuple[str, int | None], list[Entry]] = {}
    for entry in (*spec.entries(), *(spec.mtp_entries() if mtp else ())):
        groups.setdefault((entry.engine, entry.expert), []).append(entry)
    return [tuple(group) for group in groups.values()]


def wire_dtype(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight travels: the engine's, except for weights that are float32 everywhere."""
    return torch.float32 if entry.param.fp32 else dtype


def cut(spec: ModelSpec, dtype: torch.dtype, bucket_mib: float, *, mtp: bool = False) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_mib` MiB, unit by unit; a unit larger than that gets a bucket of its own.

    Args:
        mtp: with the weights of multi-token prediction.

    Raises:
        ReshardError: `bucket_mib` is not positive.
    """
    if bucket_mib <= 0:
        raise ReshardError(f"sync.bucket_mib must be positive, got {bucket_mib}")
    limit, used = bucket_mib * 2**20, 0
    buckets: list[Bucket] = []
    pending: list[Entry] = []
    for unit in units(spec, mtp=mtp):
        size = sum(
            prod(entry.param.part_shape(part)) * wire_dtype(entry, dtype).itemsize for entry in unit for part in range(len(entry.hf))
        )
        if pending and used + size > limit:
            buckets.append(_lay_out(pending, dtype))
            pending, used = [], 0
        pending.extend(unit)
        used += size
    return (*buckets, _lay_out(pending, dtype)) if pending else tuple(buckets)


def _lay_out(entries: list[Entry], dtype: torch.dtype) -> Bucket:
    # Wider dtypes first: every offset is then a multiple of its own item size, without gaps that engines don't know of.
    ordered = sorted(entries, key=lambda entry: -wire_dtype(entry, dtype).itemsize)
    slots, offset = [], 0
    for entry in ordered:
        for part in range(len(entry.hf)):
            slots.append(Slot(entry, part, wire_dtype(entry, dtype), offset))
            offset += slots[-1].nbytes
    return Bucket(tuple(slots), offset)
