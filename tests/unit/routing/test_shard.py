"""Routes cut over context, tensor and pipeline parallelism hold every row and layer once, beside the tokens they belong to."""

import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.errors import ReplayError, TrainError
from moerl.routing.layout import Layout
from moerl.routing.shard import Place, context_rows, cut, join, router_rows
from moerl.train import batch
from tests.unit.routing.routes import random_ids

quick = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Replica:
    """One data-parallel replica and the boundaries of a microbatch that its ranks can cut.

    Attributes:
        stages: MoE indices that each pipeline stage holds.
    """

    cp: int
    tp: int
    stages: tuple[tuple[int, ...], ...]
    layout: Layout
    cu_seqlens: np.ndarray

    @property
    def places(self) -> list[Place]:
        return [Place((c, self.cp), (t, self.tp), held) for c, t, held in itertools.product(range(self.cp), range(self.tp), self.stages)]

    @property
    def rows(self) -> int:
        return int(self.cu_seqlens[-1])


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    """MoE layers go to virtual stages in any ascending way, so that some hold many and some none; stage s runs chunks s, s + pp, …"""
    cp, tp, pp, chunks = (draw(st.integers(1, largest)) for largest in (4, 4, 4, 3))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=7))))
    virtual = sorted(draw(st.lists(st.integers(0, pp * chunks - 1), min_size=len(layers), max_size=len(layers))))
    stages = tuple(tuple(i for i, at in enumerate(virtual) if at % pp == stage) for stage in range(pp))
    units = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    ends = np.concatenate([[0], np.cumsum(units)]) * Place((0, cp), (0, tp), ()).multiple
    return Replica(cp, tp, stages, Layout(layers, draw(st.sampled_from([8, 300])), 2), ends.astype(np.int32))


def numbered(replica: Replica) -> np.ndarray:
    """int64[n, moe_layer, k] of which each (row, layer) holds its own number."""
    shape = (replica.rows, len(replica.layout.layers), 1)
    return np.repeat(np.arange(shape[0] * shape[1]).reshape(shape), replica.layout.topk, axis=2)


def microbatch(replica: Replica, seed: int) -> batch.Microbatch:
    """Row r has token r, label r + 1, and routes that hold its number."""
    rows, rng = np.arange(replica.rows), np.random.default_rng(seed)
    real = rng.random(replica.rows) < 0.7
    return batch.Microbatch(
        tokens=rows,
        labels=rows + 1,
        positions=rows - np.repeat(replica.cu_seqlens[:-1], np.diff(replica.cu_seqlens)),
        cu_seqlens=replica.cu_seqlens,
        loss_mask=real.astype(np.float32),
        routes=np.broadcast_to(rows[:, None, None], (replica.rows, len(replica.layout.layers), 2)),
        real=real,
        columns={"mark": rows.astype(np.float32)},
        forced=rng.random(replica.rows) < 0.5,
    )


@quick
@given(replica=replicas(), seed=st.integers(0, 2**31))
def test_the_cuts_of_all_ranks_join_to_the_whole(replica: Replica, seed: int) -> None:
    routes = random_ids(seed, replica.rows, len(replica.layout.layers), replica.layout.experts, replica.layout.topk)
    cuts = [(place, cut(routes, replica.cu_seqlens, place)) for place in replica.places]
    whole = join(cuts, replica.cu_seqlens, replica.layout)
    np.testing.assert_array_equal(whole, routes)
    assert whole.dtype == routes.dtype


@quick
@given(replica=replicas())
def test_every_row_and_layer_is_held_once(replica: Replica) -> None:
    routes = numbered(replica)
    held = np.concatenate([cut(routes, replica.cu_seqlens, place)[..., 0].ravel() for place in replica.places])
    np.testing.assert_array_equal(np.sort(held), np.arange(replica.rows * len(replica.layout.layers)))


@quick
@given(replica=replicas())
def test_a_ranks_layers_are_its_stages_in_order(replica: Replica) -> None:
    for place in replica.places:
        part = cut(numbered(replica), replica.cu_seqlens, place)
        assert part.shape == (replica.rows // replica.cp // replica.tp, len(place.moe_indices), replica.layout.topk)
        assert part.flags.c_contiguous
        assert (part[..., 0] % len(replica.layout.layers) == np.array(place.moe_indices, int)).all()


@quick
@given(replica=replicas())
def test_context_ranks_share_the_rows_and_the_causal_work(replica: Replica) -> None:
    """Row i of a sequence attends to i + 1 rows: the sums are equal on all ranks, for each sequence."""
    shares = [context_rows(replica.cu_seqlens, (rank, replica.cp)) for rank in range(replica.cp)]
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(replica.rows))
    for start, stop in itertools.pairwise(replica.cu_seqlens.tolist()):
        work = [int((rows[(rows >= start) & (rows < stop)] - start + 1).sum()) for rows in shares]
        assert len(set(work)) == 1


@quick
@given(replica=replicas())
def test_tensor_ranks_share_a_context_ranks_rows_in_order(replica: Replica) -> None:
    for rank in range(replica.cp):
        chunks = [router_rows(replica.cu_seqlens, (rank, replica.cp), (tensor, replica.tp)) for tensor in range(replica.tp)]
        assert len({len(chunk) for chunk in chunks}) == 1
        np.testing.assert_array_equal(np.concatenate(chunks), context_rows(replica.cu_seqlens, (rank, replica.cp)))


@pytest.mark.parametrize("copies", [0, 2])
@quick
@given(replica=replicas(), data=st.data())
def test_a_missing_or_repeated_rank_is_named_by_row_and_layer(copies: int, replica: Replica, data: st.DataObject) -> None:
    routes = numbered(replica)
    cuts = [(place, cut(routes, replica.cu_seqlens, place)) for place in replica.places]
    number = data.draw(st.integers(0, len(cuts) - 1))
    place = cuts[number][0]
    assume(place.moe_indices)
    row, layer = router_rows(replica.cu_seqlens, place.cp, place.tp).min(), replica.layout.layers[place.moe_indices[0]]
    cuts[number : number + 1] = [cuts[number]] * copies
    with pytest.raises(ReplayError, match=re.escape(f"row {row} of layer {layer} is held by {copies} (")):
        join(cuts, replica.cu_seqlens, replica.layout)


@quick
@given(replica=replicas(), seed=st.integers(0, 2**31))
def test_a_part_keeps_what_belongs_together(replica: Replica, seed: int) -> None:
    whole = microbatch(replica, seed)
    for place in replica.places:
        part = batch.cut(whole, place)
        rows, size = part.tokens, replica.rows // replica.cp // replica.tp
        np.testing.assert_array_equal(part.labels, rows + 1)
        np.testing.assert_array_equal(part.columns["mark"], rows)
        np.testing.assert_array_equal(part.positions, whole.positions[rows])
        np.testing.assert_array_equal(part.loss_mask, whole.loss_mask[rows])
        np.testing.assert_array_equal(part.cu_seqlens, replica.cu_seqlens)
        at_router = rows[place.tp[0] * size : (place.tp[0] + 1) * size]
        np.testing.assert_array_equal(part.routes, np.broadcast_to(at_router[:, None, None], (size, len(place.moe_indices), 2)))
        np.testing.assert_array_equal(part.router_real, whole.real[at_router])
        np.testing.assert_array_equal(part.forced, whole.forced[at_router])


@quick
@given(replica=replicas())
def test_sequences_that_cannot_be_cut_evenly_are_refused(replica: Replica) -> None:
    multiple = replica.places[0].multiple
    assume(multiple > 1)
    ends = replica.cu_seqlens.copy()
    ends[-1] += 1
    odd = batch.Microbatch(*([np.zeros(ends[-1], np.int64)] * 3), ends, np.zeros(ends[-1], np.float32), None, np.zeros(ends[-1], bool))
    with pytest.raises(TrainError, match=rf"multiples of {multiple} here, got \[{ends[-1] - ends[-2]}\]"):
        batch.cut(odd, replica.places[0])


@quick
@given(
    sizes=st.lists(st.lists(st.integers(2, 9), max_size=3), min_size=1, max_size=4),
    multiple=st.sampled_from([1, 2, 4, 12]),
    holes=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equalised_microbatches_keep_everything_and_grow_by_padding(sizes: list[list[int]], multiple: int, holes: bool, seed: int) -> None:
    layout, rng = Layout((1, 3), 8, 2), np.random.default_rng(seed)

    def sequence(length: int) -> batch.Sequence:
        marks, recorded = rng.random(length - 1).astype(np.float32), rng.random(length - 1) < 0.5 if holes else None
        return batch.Sequence(rng.integers(1, 99, length), marks, random_ids(seed, length - 1, 2, 8, 2), {"mark": marks}, recorded)

    micro = [
        batch.pack([sequence(n) for n in lengths], tokens_per_microbatch=99, dp=1, multiple=multiple, layout=layout)[0][0]
        for lengths in sizes
    ]
    grown = batch.equalise(micro, multiple, layout)
    assert len({one.size for one in grown}) == 1
    for before, after in zip(micro, grown, strict=True):
        more = after.size - before.size
        for name in ("tokens", "labels", "positions", "loss_mask", "routes", "real"):
            np.testing.assert_array_equal(getattr(after, name)[: before.size], getattr(before, name))
            assert len(getattr(after, name)) == after.size
        np.testing.assert_array_equal(after.cu_seqlens[: len(before.cu_seqlens)], before.cu_seqlens)
        assert all(column.shape == (after.size,) and not column[before.size :].any() for column in after.columns.values())
        assert not after.real[before.size :].any()
        assert not after.loss_mask[before.size :].any()
        if before.forced is not None:
            np.testing.assert_array_equal(after.forced, np.concatenate([before.forced, np.ones(more, bool)]))
        lengths = np.diff(after.cu_seqlens)
        assert not (lengths % multiple).any()
        counted = np.concatenate([np.arange(length) for length in lengths])
        np.testing.assert_array_equal(after.positions[before.size :], counted[before.size :])
        padding = after.routes[before.size :]
        assert (padding[..., 0] != padding[..., 1]).all()
        for layer in range(2):
            load = np.bincount(padding[:, layer].ravel(), minlength=8)
            assert load.max() - load.min() <= 1
