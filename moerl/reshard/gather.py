"""From every rank's shards to whole HF tensors on trainer rank 0, one bucket at a time.

    Shard (all ranks) --plan_gather--> who owns which slice --gather_bucket--> flat uint8 buffer of the bucket (rank 0)

All functions here are collective over the trainer's default process group (none is needed for a single process) and work
with gloo and NCCL: buffers live on the group's device.

Invariants: the plan is computed from the same metadata on every rank, so a missing, surplus or misshapen weight raises the
same error everywhere; replicas are sent once, by their lowest rank; slices are cast before they travel; no rank holds more
than one bucket and its parts besides the live parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist

from moerl.errors import ReshardError
from moerl.models import Entry, ModelSpec
from moerl.models.shard import Shard, cut_units, shard_shape, windows
from moerl.reshard.bucket import Bucket, cut
from moerl.reshard.crew import group_device, rank_and_world
from moerl.reshard.deadline import Deadline

_ALIGN = 16

Signature = tuple[str, int, int, tuple[int, ...]]
"""Megatron name, index, parts, shape of one shard."""


@dataclass(frozen=True)
class Source:
    """The rank that sends one slice of a weight, and the slice's shape there."""

    rank: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """Megatron name -> the sources of its slices, in order of their index."""

    sources: Mapping[str, tuple[Source, ...]]


@dataclass(frozen=True)
class _Piece:
    """One slice inside the buffer that a rank sends for a bucket."""

    entry: Entry
    index: int
    parts: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def signatures(shards: Sequence[Shard]) -> list[Signature]:
    """What other ranks must know of `shards`."""
    return [(shard.entry.megatron, shard.index, shard.parts, tuple(shard.tensor.shape)) for shard in shards]


def plan_gather(shards: Sequence[Shard], spec: ModelSpec, *, mtp: bool = False) -> GatherPlan:
    """Exchange the shards' metadata and choose who sends what. Collective.

    Args:
        mtp: whether multi-token prediction is gathered; otherwise it may be held all the same.

    Raises:
        ReshardError: on every rank, naming every weight that is missing, unknown, incomplete or of another shape.
    """
    _, world = rank_and_world()
    mine = signatures(shards)
    everyone = [mine] * world
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
    sources, problems = _choose(everyone, spec, mtp)
    if problems:
        raise ReshardError(
            f"the trainer's shards do not make up the model ({len(problems)} weights are wrong); expected one complete set of slices of "
            "each weight:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    return GatherPlan(sources)


def _choose(everyone: list[list[Signature]], spec: ModelSpec, mtp: bool) -> tuple[dict[str, tuple[Source, ...]], list[str]]:
    found: defaultdict[str, dict[tuple[int, int], Source]] = defaultdict(dict)
    for rank, held in enumerate(everyone):
        for name, index, parts, shape in held:
            found[name].setdefault((index, parts), Source(rank, shape))
    ahead = list(spec.mtp_entries())
    known = {entry.megatron for entry in (*spec.entries(), *ahead)}
    problems = [f"{name}: surplus, this model has no such weight" for name in found if name not in known]
    sources = {}
    for entry in (*spec.entries(), *(ahead if mtp else ())):
        slices = found[entry.megatron]
        if problem := _slice_problem(entry, slices):
            problems.append(f"{entry.megatron}: {problem}")
        sources[entry.megatron] = tuple(slices[key] for key in sorted(slices))
    return sources, problems


def _slice_problem(entry: Entry, slices: Mapping[tuple[int, int], Source]) -> str | None:
    """Why `slices` are not one whole weight; None if they are."""
    if not slices:
        return "missing, no rank holds a slice of it"
    counts = {parts for _, parts in slices}
    if len(counts) > 1:
        return f"ranks disagree on how often it is cut: {sorted(counts)} parts"
    (parts,) = counts
    indices = sorted(index for index, _ in slices)
    if indices != list(range(parts)):
        return f"slices {indices} of {parts} are there, expected 0..{parts - 1}"
    param = entry.param
    if param.tp_axis is None and parts > 1:
        return f"cut into {parts} slices, but it has no axis to cut along"
    if cut_units(param) % parts and not param.is_vocabulary:
        return f"cut into {parts} slices, which do not divide its {cut_units(param)} {'key-value heads' if param.head_rows else 'elements'}"
    shapes = [slices[index, parts].shape for index in range(parts)]
    if shapes != [shard_shape(param, index, parts) for index in range(parts)]:
        found = ", ".join(str(shape) for shape in dict.fromkeys(shapes))
        return f"{parts} slices of shapes {found} along axis {param.tp_axis or 0} do not make up {shard_shape(param, 0, 1)}"
    return None


def gather_bucket(
    plan: GatherPlan, bucket: Bucket, shards: Mapping[str, Shard], device: torch.device, deadline: Deadline
) -> torch.Tensor | None:
    """Bring one bucket together. Collective; rank 0 gets uint8[bucket.nbytes] on `device`, the others None.

    Args:
        shards: this rank's shards by Megatron name.

    Raises:
        WaitTimeout, ReshardError: a peer did not answer in time, or is gone.
    """
    rank, _ = rank_and_world()
    manifests = _manifests(plan, bucket)
    if rank != 0:
        if rank in manifests:
            _wait([dist.isend(_pack(manifests[rank], shards, device), 0)], [f"rank {rank} to send to rank 0"], deadline)
        return None
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    views: dict[str, list[torch.Tensor]] = {}
    for slot, view in bucket.views(flat):
        views.setdefault(slot.entry.megatron, []).append(view)
    incoming = {
        sender: torch.empty(_size(manifest), dtype=torch.uint8, device=device) for sender, manifest in manifests.items() if sender != 0
    }
    works = [dist.irecv(buffer, sender) for sender, buffer in incoming.items()]
    for piece in manifests[0]:
        _place(piece, shards[piece.entry.megatron].tensor.detach(), views)
    _wait(works, [f"rank {sender} to send its part of a bucket" for sender in incoming], deadline)
    for sender, buffer in incoming.items():
        for piece in manifests[sender]:
            _place(piece, _inside(piece, buffer), views)
    return flat


def gather_hf(
    shards: Sequence[Shard],
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    bucket_mib: float = 256.0,
    timeout_s: float = 300.0,
    mtp: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole weights under their HF names, in canonical order up to fused groups (see `bucket.units`). Collective.

    Rank 0 yields every tensor, in `dtype` (float32 where the specification says so); other ranks yield nothing but must be
    iterated as well. A yielded tensor is a view into its bucket's buffer, which lives as long as one of its views.

    Args:
        mtp: with the weights of multi-token prediction, behind the others; copies are not repeated.

    Raises:
        ReshardError: see `plan_gather`.
    """
    plan = plan_gather(shards, spec, mtp=mtp)
    held = {shard.entry.megatron: shard for shard in shards}
    for bucket in cut(spec, dtype, bucket_mib, mtp=mtp):
        flat = gather_bucket(plan, bucket, held, group_device(), Deadline("gathering weights", timeout_s))
        if flat is not None:
            for slot, view in bucket.views(flat):
                yield slot.name, view


def _manifests(plan: GatherPlan, bucket: Bucket) -> defaultdict[int, list[_Piece]]:
    """What every sending rank sends for this bucket, in the same order and at the same offsets on both sides."""
    manifests: defaultdict[int, list[_Piece]] = defaultdict(list)
    ends: Counter[int] = Counter()
    for slot in bucket.slots:
        if slot.part:
            continue
        sources = plan.sources[slot.entry.megatron]
        for index, source in enumerate(sources):
            offset = ends[source.rank]
            manifests[source.rank].append(_Piece(slot.entry, index, len(sources), source.shape, slot.dtype, offset))
            ends[source.rank] = offset + -(-prod(source.shape) * slot.dtype.itemsize // _ALIGN) * _ALIGN
    return manifests


def _size(manifest: list[_Piece]) -> int:
    last = manifest[-1]
    return last.offset + prod(last.shape) * last.dtype.itemsize


def _inside(piece: _Piece, buffer: torch.Tensor) -> torch.Tensor:
    """The piece's slot in a packed buffer, as a tensor of the piece's dtype and shape."""
    return buffer[piece.offset : piece.offset + prod(piece.shape) * piece.dtype.itemsize].view(piece.dtype).view(piece.shape)


def _pack(manifest: list[_Piece], shards: Mapping[str, Shard], device: torch.device) -> torch.Tensor:
    buffer = torch.empty(_size(manifest), dtype=torch.uint8, device=device)
    for piece in manifest:
        _inside(piece, buffer).copy_(shards[piece.entry.megatron].tensor.detach())
    return buffer


def _place(piece: _Piece, tensor: torch.Tensor, views: Mapping[str, list[torch.Tensor]]) -> None:
    """Write one slice into the whole tensors it belongs to: [gate slice; up slice] goes to two of them."""
    targets = views[piece.entry.megatron]
    for window in windows(piece.entry.param, piece.index, piece.parts):
        targets[window.part][window.in_hf].copy_(tensor[window.in_shard])


def _wait(works: Sequence[dist.Work], names: Sequence[str], deadline: Deadline) -> None:
    for work, name in zip(works, names, strict=True):
        left = deadline.left(name)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            deadline.left(name)
            raise ReshardError(f"{deadline.what}: waited for {name}, but the connection failed: {error}") from error
