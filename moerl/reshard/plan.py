"""The plan of a direct weight transfer: which bytes go from which trainer rank to which engine rank, in which buckets.

    ModelSpec, TrainerTopology, EngineTopology --make_plan--> Plan --copies_out--> what a sender packs into a bucket
                                                                   --copies_in---> where a receiver puts it
                                                                   --summary-----> what it costs

Every rank derives the same plan from the same three descriptions, without communication; `Plan.digest` proves it. A plan holds for as
long as the topologies do.

A *block* is a box (experts × rows × columns) of the tensors of one kind in one layer. It lies in its bucket without gaps: expert by
expert, row by row, in the dtype of the engine. Where engines serve fp8, a weight and its scales are two kinds, and the sender quantises
(`fp8.sources`). A *bucket* is what one rank sends another in one message. Invariants:

- each element of each engine parameter, padding excepted, is in exactly one block;
- a bucket has at most `bucket_bytes` bytes, and wider dtypes come first in the buckets of a pair, so that all elements are aligned;
- buckets are ordered by `step`, and in each step a rank takes part in at most one transfer: ranks that handle their buckets in that
  order never wait for each other in a circle.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from moerl.errors import ReshardError
from moerl.models.spec import ModelSpec
from moerl.reshard.balance import Demand, choose_senders, lower_bound, totals
from moerl.reshard.boxes import Kind, Shares, elements, intersect, kinds, pieces
from moerl.reshard.engine_boxes import EngineTopology, check_topology, commit_unit, dtype_of, engine_shares
from moerl.reshard.fp8_layout import check_blocks, wire_kinds
from moerl.reshard.summary import Summary, summarise
from moerl.reshard.trainer_layout import TrainerTopology, check_trainer, stages_of, trainer_shares

ITEMSIZE = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}

BLOCK = np.dtype(
    [
        ("kind", "<i2"),
        ("layer", "<i2"),
        ("box", "<i4", (3, 2)),
        ("source", "<i8"),  # element of the sender's parameter (of the first expert's) where the block starts
        ("target", "<i8"),  # element of the receiver's parameter where the block starts
        ("at", "<i8"),  # byte of the bucket where the block starts
    ]
)
BUCKET = np.dtype([("sender", "<i4"), ("receiver", "<i4"), ("step", "<i8"), ("first", "<i8"), ("count", "<i8"), ("nbytes", "<i8")])
"""`first`, `count`: its blocks."""

_FILL = 4
"""Blocks larger than 1 / _FILL of a bucket are cut, so that buckets are almost full."""


class PlannedKind(msgspec.Struct, frozen=True):
    """What the blocks of one kind of HF tensor have in common; names hold `{layer}` and `{expert}`.

    Attributes:
        trainer: canonical Megatron name.
        engine: the engine's parameter.
        dtype: on the wire and in the engine.
        commit: see `engine_boxes.commit_unit`.
        source_row, target_row: elements between neighbouring rows in the sender's and in the receiver's parameter.
        target_expert: elements between neighbouring experts in the receiver's; the sender has a parameter per expert.
    """

    hf: str
    trainer: str
    engine: str
    dtype: str
    commit: str
    source_row: int
    target_row: int
    target_expert: int


class Copy(NamedTuple):
    """One strided box inside a parameter, and its place in a bucket, where it lies contiguously.

    Attributes:
        parameter: name (canonical Megatron name, or the engine's).
        start: first element.
        counts: experts, rows, columns.
        strides: elements between neighbouring experts and rows; columns are contiguous.
        at: first byte in the bucket.
    """

    parameter: str
    dtype: str
    start: int
    counts: tuple[int, int, int]
    strides: tuple[int, int]
    at: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module. The two tables are arrays of `BLOCK` and `BUCKET`, as bytes; buckets are in order of their steps.

    Attributes:
        senders, receivers: trainer ranks and engine ranks. In a group of both, engine rank r is rank senders + r.
        nodes: number of the machine of each rank in that group.
        minimum_bytes: of all engine parameters, padding excepted.
        sender_bound_bytes: no choice of senders has a smaller highest load.
        fp8_block, fp8_power_of_two: as in `EngineTopology`; what senders need to quantise.
    """

    senders: int
    receivers: int
    nodes: tuple[int, ...]
    bucket_bytes: int
    minimum_bytes: int
    sender_bound_bytes: int
    kinds: tuple[PlannedKind, ...]
    block_table: bytes
    bucket_table: bytes
    fp8_block: tuple[int, int] | None = None
    fp8_power_of_two: bool = False

    def __repr__(self) -> str:
        return f"Plan({self.senders} → {self.receivers} ranks, {len(self.buckets)} buckets of {len(self.blocks)} blocks)"

    @property
    def blocks(self) -> np.ndarray:
        return np.frombuffer(self.block_table, dtype=BLOCK)

    @property
    def buckets(self) -> np.ndarray:
        return np.frombuffer(self.bucket_table, dtype=BUCKET)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def digest(self) -> str:
        """SHA-256 over everything: equal on two ranks exactly if their plans are."""
        return hashlib.sha256(self.encode()).hexdigest()

    def summary(self) -> Summary:
        return summarise(self)

    def only(self, *, sender: int | None = None, receiver: int | None = None) -> "Plan":
        """The part of the plan that concerns one sender or one receiver (or one pair), still in order."""
        buckets = self.buckets
        keep = np.ones(len(buckets), dtype=bool)
        if sender is not None:
            keep &= buckets["sender"] == sender
        if receiver is not None:
            keep &= buckets["receiver"] == receiver
        mine, blocks = buckets[keep].copy(), self.blocks
        parts = [blocks[bucket["first"] : bucket["first"] + bucket["count"]] for bucket in mine]
        mine["first"] = np.cumsum(mine["count"]) - mine["count"]
        table = np.concatenate(parts) if parts else blocks[:0]
        return msgspec.structs.replace(self, block_table=table.tobytes(), bucket_table=mine.tobytes())

    def copies_out(self, bucket: int) -> list[Copy]:
        """What the sender packs into bucket number `bucket`: one box per expert, since each expert is a parameter of its own."""
        found = []
        for kind, block, counts in self._blocks_of(bucket):
            size = counts[1] * counts[2] * ITEMSIZE[kind.dtype]
            for number in range(counts[0]):
                name = kind.trainer.format(layer=block["layer"], expert=block["box"][0, 0] + number)
                at = int(block["at"]) + number * size
                found.append(Copy(name, kind.dtype, int(block["source"]), (1, *counts[1:]), (0, kind.source_row), at))
        return found

    def copies_in(self, bucket: int) -> list[Copy]:
        """Where the receiver puts the content of bucket number `bucket`."""
        return [
            Copy(
                kind.engine.format(layer=block["layer"]),
                kind.dtype,
                int(block["target"]),
                counts,
                (kind.target_expert, kind.target_row),
                int(block["at"]),
            )
            for kind, block, counts in self._blocks_of(bucket)
        ]

    def commit_units(self, receiver: int) -> dict[str, tuple[int, ...]]:
        """Fused parameters and those that others are derived from -> numbers of the buckets that bring parts of them.

        Such a parameter, and what is derived from it, may be used only when the last of them has been written.
        """
        found: dict[str, list[int]] = {}
        for number in np.nonzero(self.buckets["receiver"] == receiver)[0]:
            for kind, block, _ in self._blocks_of(int(number)):
                if kind.commit:
                    found.setdefault(kind.commit.format(layer=block["layer"]), []).append(int(number))
        return {name: tuple(dict.fromkeys(numbers)) for name, numbers in found.items()}

    def _blocks_of(self, bucket: int):
        head = self.buckets[bucket]
        for block in self.blocks[head["first"] : head["first"] + head["count"]]:
            counts = tuple(int(n) for n in block["box"][:, 1] - block["box"][:, 0])
            yield self.kinds[block["kind"]], block, counts


def decode_plan(data: bytes) -> Plan:
    """Inverse of `Plan.encode`.

    Raises:
        ReshardError: `data` is no plan.
    """
    try:
        return msgspec.msgpack.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise ReshardError(f"expected an encoded transfer plan of this version of moerl, got something else: {error}") from error


def make_plan(
    spec: ModelSpec,
    trainer: TrainerTopology,
    engine: EngineTopology,
    *,
    bucket_bytes: int,
    ranks_per_node: int,
    nodes: Sequence[int] | None = None,
) -> Plan:
    """Plan the transfer of all weights.

    Args:
        ranks_per_node: ranks that share a machine, counted over the group of both sides (trainer ranks first).
        nodes: number of each rank's machine in that group, where it doesn't follow from `ranks_per_node`.

    Raises:
        ReshardError: a topology does not fit the model, or a bucket cannot hold a single row.
    """
    check_trainer(spec, trainer)
    if engine.draft and not trainer.mtp:
        raise ReshardError("engines expect the layer for multi-token prediction, which the trainer does not hold")
    check_topology(spec, kinds(spec, mtp=engine.draft), engine)
    every = wire_kinds(spec, engine)
    check_blocks(every, trainer, engine)
    sources, targets = [trainer_shares(kind, trainer) for kind in every], engine_shares(every, engine)
    itemsizes = np.array([ITEMSIZE[dtype_of(kind.param, engine)] for kind in every], dtype=np.int64)
    _check_bucket(every, itemsizes, bucket_bytes)
    node = np.arange(trainer.world + engine.world) // ranks_per_node if nodes is None else np.array(nodes)
    wanted, groups = _demand(every, sources, targets, stages_of(spec, trainer), trainer, engine)
    demand = Demand(wanted["group"], wanted["receiver"], wanted["box"], itemsizes[wanted["kind"]])
    row, boxes, sender = choose_senders(demand, groups, trainer.world, node[: trainer.world], node[trainer.world :])
    table = {**{name: column[row] for name, column in wanted.items()}, "box": boxes, "sender": sender}
    table = _limit(table, itemsizes, bucket_bytes // _FILL)
    order = np.argsort(_sort_key(table, itemsizes, spec.layers, engine.world), kind="stable")
    table = {name: column[order] for name, column in table.items()}
    nbytes = elements(table["box"]) * itemsizes[table["kind"]]
    buckets = _buckets(table["sender"], table["receiver"], nbytes, bucket_bytes, max(trainer.world, engine.world))
    blocks = _blocks(table, sources, targets)
    blocks["at"] = _positions(nbytes, buckets)
    minimum = _minimum(every, targets, itemsizes, engine)
    if int(nbytes.sum()) != minimum:
        raise ReshardError(f"the plan moves {int(nbytes.sum())} bytes, but the engines hold {minimum}; this is a bug in the layouts")
    return Plan(
        senders=trainer.world,
        receivers=engine.world,
        nodes=tuple(node.tolist()),
        bucket_bytes=bucket_bytes,
        minimum_bytes=minimum,
        sender_bound_bytes=lower_bound(groups, totals(demand.group, demand.nbytes, len(groups)), trainer.world),
        kinds=tuple(
            PlannedKind(
                hf=kind.hf,
                trainer=kind.param.megatron,
                engine=kind.param.engine,
                dtype=dtype_of(kind.param, engine),
                commit=commit_unit(kind, every),
                source_row=source.strides[1],
                target_row=target.strides[1],
                target_expert=target.strides[0],
            )
            for kind, source, target in zip(every, sources, targets, strict=True)
        ),
        block_table=blocks.tobytes(),
        bucket_table=buckets[np.lexsort((buckets["sender"], buckets["step"]))].tobytes(),
        fp8_block=engine.fp8_block,
        fp8_power_of_two=engine.fp8_power_of_two,
    )


Table = dict[str, np.ndarray]
"""Columns of equal length: kind, layer, receiver, group, box, and the numbers of the shares that hold it on both sides."""


def _demand(
    every: Sequence[Kind],
    sources: Sequence[Shares],
    targets: Sequence[Shares],
    stages: dict[int, int],
    trainer: TrainerTopology,
    engine: EngineTopology,
) -> tuple[Table, list[np.ndarray]]:
    """Everything that engines need, as blocks that lie on one group of trainer ranks each; and those groups."""
    numbers: dict[tuple[int, ...], int] = {}
    columns: list[Table] = []
    for number, (kind, source, target) in enumerate(zip(every, sources, targets, strict=True)):
        i, j, boxes = intersect(source.boxes, target.boxes)
        receivers = [target.ranks[share] for share in j]
        ranks = np.concatenate(receivers)
        i, j, boxes = (np.repeat(column, [len(held) for held in receivers], axis=0) for column in (i, j, boxes))
        local = np.array([numbers.setdefault(held, len(numbers)) for held in source.ranks])[i]
        copies, layers = engine.count, np.array(kind.layers)
        each = len(i) * copies
        columns.append(
            {
                "kind": np.full(each * len(layers), number, dtype=np.int32),
                "layer": np.repeat(layers, each).astype(np.int32),
                "receiver": np.tile((np.arange(copies)[:, None] * engine.tp + ranks).ravel(), len(layers)),
                "group": np.tile(local, copies * len(layers)),
                "stage": np.repeat(np.array([stages[layer] for layer in kind.layers]), each),
                "box": np.tile(boxes, (copies * len(layers), 1, 1)),
                "source": np.tile(i, copies * len(layers)).astype(np.int32),
                "target": np.tile(j, copies * len(layers)).astype(np.int32),
            }
        )
    table = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    used, table["group"] = np.unique(table.pop("stage") * len(numbers) + table["group"], return_inverse=True)
    local_ranks = [np.array(ranks) for ranks in numbers]
    return table, [local_ranks[g % len(numbers)] + g // len(numbers) * trainer.per_stage for g in used]


def _limit(table: Table, itemsizes: np.ndarray, limit: int) -> Table:
    """Cut blocks of more than `limit` bytes, in place of the row that they were."""
    sizes = elements(table["box"]) * itemsizes[table["kind"]]
    large = np.nonzero(sizes > limit)[0]
    if not len(large):
        return table
    parts = [list(pieces(table["box"][row], limit // int(itemsizes[table["kind"][row]]))) for row in large]
    counts = np.ones(len(sizes), dtype=np.int64)
    counts[large] = [len(part) for part in parts]
    cut = {name: np.repeat(column, counts, axis=0) for name, column in table.items()}
    first = np.cumsum(counts) - counts
    for row, part in zip(large, parts, strict=True):
        cut["box"][first[row] : first[row] + len(part)] = part
    return cut


def _sort_key(table: Table, itemsizes: np.ndarray, layers: int, receivers: int) -> np.ndarray:
    """int64[n] that sorts by pair, then wide elements before narrow ones, then layer, then kind."""
    widths = np.unique(itemsizes)
    narrow = len(widths) - 1 - np.searchsorted(widths, itemsizes)[table["kind"]]
    pair = table["sender"].astype(np.int64) * receivers + table["receiver"]
    return ((pair * len(widths) + narrow) * (layers + 2) + table["layer"] + 1) * len(itemsizes) + table["kind"]


def _blocks(table: Table, sources: Sequence[Shares], targets: Sequence[Shares]) -> np.ndarray:
    blocks = np.zeros(len(table["kind"]), dtype=BLOCK)
    for name in ("kind", "layer", "box"):
        blocks[name] = table[name]
    order = np.argsort(table["kind"], kind="stable")
    bounds = np.searchsorted(table["kind"][order], np.arange(len(sources) + 1))
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        rows = order[bounds[number] : bounds[number + 1]]
        blocks["source"][rows] = source.locate(table["source"][rows], table["box"][rows])
        blocks["target"][rows] = target.locate(table["target"][rows], table["box"][rows])
    return blocks


def _buckets(sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray, limit: int, period: int) -> np.ndarray:
    """Fill buckets with blocks that are sorted by pair. In step s of each period, rank r sends to rank r + s."""
    ends = np.cumsum(nbytes)
    changes = np.nonzero((np.diff(sender) != 0) | (np.diff(receiver) != 0))[0] + 1
    found = []
    for start, stop in zip([0, *changes.tolist()], [*changes.tolist(), len(nbytes)], strict=True):
        first, turn = start, 0
        shift = (int(receiver[start]) - int(sender[start])) % period
        while first < stop:
            before = int(ends[first] - nbytes[first])
            last = min(int(np.searchsorted(ends, before + limit, side="right")), stop)
            found.append((sender[start], receiver[start], turn * period + shift, first, last - first, int(ends[last - 1]) - before))
            first, turn = last, turn + 1
    return np.array(found, dtype=BUCKET)


def _positions(nbytes: np.ndarray, buckets: np.ndarray) -> np.ndarray:
    """int64[n] where each block starts in its bucket, in bytes."""
    starts = np.cumsum(nbytes) - nbytes
    return starts - np.repeat(starts[buckets["first"]], buckets["count"])


def _minimum(every: Sequence[Kind], targets: Sequence[Shares], itemsizes: np.ndarray, engine: EngineTopology) -> int:
    """Bytes of all parameters of all engine ranks, without padding."""
    return sum(
        int(elements(target.boxes) @ np.array([len(ranks) for ranks in target.ranks])) * len(kind.layers) * int(size) * engine.count
        for kind, target, size in zip(every, targets, itemsizes, strict=True)
    )


def _check_bucket(every: Sequence[Kind], itemsizes: np.ndarray, bucket_bytes: int) -> None:
    longest = max(kind.cols * int(size) for kind, size in zip(every, itemsizes, strict=True))
    if bucket_bytes < longest:
        raise ReshardError(f"a bucket of {bucket_bytes} bytes cannot hold a row of {longest} bytes; raise sync.bucket_mib")
