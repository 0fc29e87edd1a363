"""From sequences to packed microbatches, and from those to what each rank needs: numpy only.

    sequences --pack--> microbatches per data-parallel rank --cut--> `Part`s: this rank's rows, this stage's layers of the routes

A sequence of n tokens gives n - 1 positions: input token i, label token i + 1, routes row i. Sequences are laid one after
another and each is padded to a multiple that context and sequence parallelism can cut. Invariants: every position of every
sequence lands in exactly one microbatch of one data-parallel rank, all ranks get the same number of microbatches, and the parts of
a replica's ranks hold every row and every (row, layer) of the routes once.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from moerl.errors import TrainError
from moerl.rollout.mask import SamplingMask, join, place, take, unrestricted
from moerl.routing import shard
from moerl.routing.layout import Layout, filler_routes


@dataclass(frozen=True)
class Sequence:
    """One sample, ready to be packed.

    Attributes:
        tokens: int64[n].
        loss_mask: float32[n - 1], of the labels `tokens[1:]`.
        routes: uint8|uint16[n - 1, moe_layer, k], zero where not recorded; None without any.
        columns: float32[n - 1] arrays by name, aligned with the labels.
        recorded: bool[n - 1] rows whose routes are replayed; None where all are.
        sampling_mask: n - 1 rows, which tokens each label was sampled from; None where nothing was cut off.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    routes: np.ndarray | None
    columns: dict[str, np.ndarray]
    recorded: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True)
class Microbatch:
    """Packed positions of some sequences (THD), whole.

    Attributes:
        tokens: int64[n] inputs.
        labels: int64[n] the next token of each.
        positions: int64[n] position within the sequence.
        cu_seqlens: int32[s + 1] boundaries of the padded sequences.
        loss_mask: float32[n] 1 where the label is a trained response token.
        routes: uint8|uint16[n, moe_layer, k] or None; padding rows hold distinct, balanced experts.
        real: bool[n] False at padding.
        columns: further float32[n] arrays by name, zero where they don't apply: advantages, engine_logprobs, ...
        forced: bool[n] False at rows that choose their own experts even under replay; None where none does.
        sampling_mask: n rows, as in `Sequence`; None where no sequence has one.
        numbers: int64[n] which of the sequences given to `pack` each row is of, -1 at padding; None where unknown.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    routes: np.ndarray | None
    real: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    forced: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    numbers: np.ndarray | None = None

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Part:
    """What one rank needs of a microbatch.

    Attributes:
        cu_seqlens: int32[s + 1] of the whole microbatch.
        tokens, labels, positions: int64[n_local], the rows of this context-parallel rank.
        loss_mask: float32[n_local].
        columns: float32[n_local] by name.
        routes: uint8|uint16[n_router, layers here, k] in router order, or None.
        router_real: bool[n_router].
        forced: bool[n_router], or None where all rows are.
        sampling_mask: n_local rows, or None.
        captured: int64[n] of the whole microbatch: number of the sequence of each row that is captured, -1 at others; None where no
            capture is due.
        ahead: int64[n_local] of `labels_ahead`, or None where nothing is predicted so far ahead.
    """

    cu_seqlens: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    columns: dict[str, np.ndarray]
    routes: np.ndarray | None
    router_real: np.ndarray
    forced: np.ndarray | None
    sampling_mask: SamplingMask | None
    captured: np.ndarray | None = None
    ahead: np.ndarray | None = None


def pack(
    items: Seq[Sequence], *, tokens_per_microbatch: int, dp: int, multiple: int = 1, rounds: int = 1, layout: Layout
) -> list[list[Microbatch]]:
    """Distribute sequences over `dp` ranks and microbatches.

    Args:
        multiple: every sequence is padded to a multiple of this (2 * cp for zigzag, times tp for sequence parallelism).
        rounds: the number of microbatches per rank is a multiple of this (pp under interleaved schedules).

    Returns:
        microbatches of each data-parallel rank, equally many.

    Raises:
        TrainError: a sequence longer than a microbatch.
    """
    sizes = np.array([_padded(len(item.tokens) - 1, multiple) for item in items], np.int64)
    if len(sizes) and sizes.max() > tokens_per_microbatch:
        raise TrainError(
            f"a sequence of {int(sizes.max())} padded tokens does not fit train.tokens_per_microbatch = {tokens_per_microbatch}; "
            "raise it, or lower rollout.max_new_tokens"
        )
    bins = _bins(sizes, tokens_per_microbatch, dp * rounds)
    micro = [_lay_out(items, sorted(chosen), multiple, layout) for chosen in bins]
    return [micro[rank::dp] for rank in range(dp)]


def equalise(micro: Seq[Microbatch], multiple: int, layout: Layout) -> list[Microbatch]:
    """Append padding sequences until all have one size: pipeline stages exchange activations of one shape only."""
    size = max((one.size for one in micro), default=0)
    return [_grow(one, size, multiple, layout) for one in micro]


def labels_ahead(microbatch: Microbatch) -> np.ndarray:
    """int64[n]: the label of the row behind each, the token after next, where that is trained and of the same sequence; -1 elsewhere."""
    labels = np.where(microbatch.loss_mask > 0, microbatch.labels, -1)
    ahead = np.append(labels[1:], -1)
    ahead[microbatch.cu_seqlens[1:] - 1] = -1
    return ahead


def cut(microbatch: Microbatch, place: shard.Place, captured: Collection[int] | None = None, *, ahead: bool = False) -> Part:
    """The rows and layers of one rank.

    Args:
        captured: numbers of the sequences whose rows are captured; None where no capture is due.
        ahead: with the tokens that multi-token prediction learns.

    Raises:
        TrainError: a sequence cannot be cut evenly.
    """
    lengths = np.diff(microbatch.cu_seqlens)
    if (lengths % place.multiple).any():
        found = sorted({int(length) for length in lengths if length % place.multiple})[:8]
        raise TrainError(f"padded sequence lengths must be multiples of {place.multiple} here, got {found}")
    local = shard.context_rows(microbatch.cu_seqlens, place.cp)
    router = shard.router_rows(microbatch.cu_seqlens, place.cp, place.tp)
    return Part(
        cu_seqlens=microbatch.cu_seqlens,
        tokens=microbatch.tokens[local],
        labels=microbatch.labels[local],
        positions=microbatch.positions[local],
        loss_mask=microbatch.loss_mask[local],
        columns={name: column[local] for name, column in microbatch.columns.items()},
        routes=None if microbatch.routes is None else shard.cut(microbatch.routes, microbatch.cu_seqlens, place),
        router_real=microbatch.real[router],
        forced=None if microbatch.forced is None else microbatch.forced[router],
        sampling_mask=None if microbatch.sampling_mask is None else take(microbatch.sampling_mask, local),
        captured=None if captured is None else np.where(np.isin(microbatch.numbers, list(captured)), microbatch.numbers, -1),
        ahead=labels_ahead(microbatch)[local] if ahead else None,
    )


def _bins(sizes: np.ndarray, capacity: int, divisor: int) -> list[list[int]]:
    """Longest first into the emptiest of as few bins as hold everything; their number is a multiple of `divisor`."""
    count = divisor * max(1, -(-int(sizes.sum()) // (capacity * divisor)))
    order = np.argsort(-sizes, kind="stable")
    while True:
        load, bins = np.zeros(count, np.int64), [[] for _ in range(count)]
        for i in order:
            target = int(load.argmin())
            load[target] += sizes[i]
            bins[target].append(int(i))
        if load.max(initial=0) <= capacity:
            return bins
        count += divisor


def _lay_out(everything: Seq[Sequence], chosen: Seq[int], multiple: int, layout: Layout) -> Microbatch:
    items = [everything[number] for number in chosen]
    lengths = [_padded(len(item.tokens) - 1, multiple) for item in items] or [multiple]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    size = int(ends[-1])
    tokens, labels, positions = (np.zeros(size, np.int64) for _ in range(3))
    mask, real, forced = np.zeros(size, np.float32), np.zeros(size, bool), np.ones(size, bool)
    numbers = np.full(size, -1, np.int64)
    columns = {name: np.zeros(size, np.float32) for name in (items[0].columns if items else ())}
    routes = filler_routes(size, layout) if all(item.routes is not None for item in items) else None
    for number, item, start, stop in zip(chosen, items, ends[:-1], ends[1:], strict=False):
        rows = slice(start, start + len(item.tokens) - 1)
        tokens[rows], labels[rows], mask[rows], real[rows] = item.tokens[:-1], item.tokens[1:], item.loss_mask, True
        positions[start:stop], numbers[rows] = np.arange(stop - start), number
        for name, column in item.columns.items():
            columns[name][rows] = column
        if routes is not None:
            known = slice(None) if item.recorded is None else item.recorded
            routes[rows][known] = item.routes[known]
            forced[rows] = known if item.recorded is not None else True
    kept = _join_masks([item.sampling_mask for item in items], lengths)
    return Microbatch(tokens, labels, positions, ends, mask, routes, real, columns, None if forced.all() else forced, kept, numbers)


def _join_masks(masks: Seq[SamplingMask | None], lengths: Seq[int]) -> SamplingMask | None:
    """Each padded to its sequence's length."""
    if all(mask is None for mask in masks):
        return None
    return join([place(mask or unrestricted(0), 0, length) for mask, length in zip(masks, lengths, strict=True)])


def _grow(one: Microbatch, size: int, multiple: int, layout: Layout) -> Microbatch:
    rows = size - one.size
    if rows <= 0:
        return one

    def grown(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.zeros(rows, array.dtype)])

    return replace(
        one,
        tokens=grown(one.tokens),
        labels=grown(one.labels),
        positions=np.concatenate([one.positions, np.arange(rows) % multiple]),
        cu_seqlens=np.concatenate([one.cu_seqlens, np.arange(one.size + multiple, size + 1, multiple, dtype=np.int32)]),
        loss_mask=grown(one.loss_mask),
        routes=None if one.routes is None else np.concatenate([one.routes, filler_routes(rows, layout)]),
        real=grown(one.real),
        columns={name: grown(column) for name, column in one.columns.items()},
        forced=None if one.forced is None else np.concatenate([one.forced, np.ones(rows, bool)]),
        sampling_mask=_join_masks([one.sampling_mask, None], [one.size, rows]),
        numbers=None if one.numbers is None else np.concatenate([one.numbers, np.full(rows, -1)]),
    )


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
