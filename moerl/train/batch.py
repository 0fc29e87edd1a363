"""From scored samples to packed microbatches: numpy only, before any parallel cut.

    groups --sequences--> one `Sequence` per sample --pack--> microbatches per data-parallel rank --> scatter

A sequence of n tokens gives n - 1 positions: input token i, label token i + 1, routes row i. Sequences are laid one after
another and each is padded to a multiple that context and sequence parallelism can cut. Invariant: every position of every
sequence lands in exactly one microbatch of one data-parallel rank, and all ranks get the same number of microbatches.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from moerl.errors import TrainError
from moerl.rollout.sample import Group, Sample
from moerl.routing.layout import Layout, filler_routes


@dataclass(frozen=True)
class Microbatch:
    """Packed positions of some sequences (THD).

    Attributes:
        tokens: int64[n] inputs.
        labels: int64[n] the next token of each.
        positions: int64[n] position within the sequence.
        cu_seqlens: int32[s + 1] boundaries of the padded sequences.
        loss_mask: float32[n] 1 where the label is a trained response token.
        routes: uint8|uint16[n, moe_layer, k] or None; padding rows hold distinct, balanced experts.
        real: bool[n] False at padding.
        columns: further float32[n] arrays by name, zero where they don't apply: advantages, engine_logprobs, ...
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    routes: np.ndarray | None
    real: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Sequence:
    """One sample, ready to be packed.

    Attributes:
        tokens: int64[n].
        loss_mask: float32[n - 1], of the labels `tokens[1:]`.
        routes: uint8|uint16[n - 1, moe_layer, k] or None.
        columns: float32[n - 1] arrays by name, aligned with the labels.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    routes: np.ndarray | None
    columns: dict[str, np.ndarray]


def sequences(groups: Iterable[Group], layout: Layout, advantages: Callable[[np.ndarray], np.ndarray]) -> list[Sequence]:
    """One `Sequence` per sample, in order; the trace of each is verified against its tokens and the model.

    Args:
        advantages: rewards float32[g] of one group -> advantages float32[g].

    Raises:
        TraceError: a trace that does not belong to its tokens or to this model.
    """
    result = []
    for group in groups:
        rewards = np.array([sample.reward for sample in group.samples], np.float32)
        for sample, advantage in zip(group.samples, advantages(rewards), strict=True):
            result.append(_sequence(sample, layout, float(advantage)))
    return result


def _sequence(sample: Sample, layout: Layout, advantage: float) -> Sequence:
    tokens = sample.tokens
    trace = sample.load_trace().check_layout(layout).check_complete()
    mask = np.zeros(len(tokens) - 1, np.float32)
    engine = np.zeros(len(tokens) - 1, np.float32)
    first = len(sample.prompt_tokens) - 1
    mask[first:] = 1.0
    engine[first:] = sample.logprob_array
    return Sequence(tokens, mask, trace.ids, {"advantages": mask * advantage, "engine_logprobs": engine})


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
    micro = [_lay_out([items[i] for i in sorted(chosen)], multiple, layout) for chosen in bins]
    return [micro[rank::dp] for rank in range(dp)]


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


def _lay_out(items: Seq[Sequence], multiple: int, layout: Layout) -> Microbatch:
    lengths = [_padded(len(item.tokens) - 1, multiple) for item in items] or [multiple]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    size = int(ends[-1])
    tokens, labels, positions = (np.zeros(size, np.int64) for _ in range(3))
    mask, real = np.zeros(size, np.float32), np.zeros(size, bool)
    columns = {name: np.zeros(size, np.float32) for name in (items[0].columns if items else ())}
    routes = filler_routes(size, layout) if all(item.routes is not None for item in items) else None
    for item, start, stop in zip(items, ends[:-1], ends[1:], strict=False):
        rows = slice(start, start + len(item.tokens) - 1)
        tokens[rows], labels[rows], mask[rows], real[rows] = item.tokens[:-1], item.tokens[1:], item.loss_mask, True
        positions[start:stop] = np.arange(stop - start)
        for name, column in item.columns.items():
            columns[name][rows] = column
        if routes is not None:
            routes[rows] = item.routes
    return Microbatch(tokens, labels, positions, ends, mask, routes, real, columns)


def add_column(micro: Seq[Microbatch], name: str, values: Seq[np.ndarray]) -> list[Microbatch]:
    """Microbatches with one more float32[n] column each."""
    return [replace(one, columns={**one.columns, name: column}) for one, column in zip(micro, values, strict=True)]


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
