"""Packing puts every position of every sequence into exactly one microbatch, with its label, route and columns."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import TrainError
from moerl.rollout.mask import of_rows
from moerl.routing.layout import Layout, filler_routes
from moerl.routing.shard import Place
from moerl.train.batch import Sequence, cut, equalise, pack

LAYOUT = Layout((1, 2), 16, 4)


def sequence(length: int, number: int) -> Sequence:
    """Tokens and routes that encode (sequence number, position), so that they can be recognised after packing."""
    positions = np.arange(length - 1)
    routes = (positions[:, None, None] + np.arange(4) + 4 * np.arange(2)[:, None]) % 16
    column = (1000 * number + positions).astype(np.float32)
    return Sequence(1000 * number + np.arange(length), np.ones(length - 1, np.float32), routes.astype(np.uint8), {"mark": column})


@given(
    lengths=st.lists(st.integers(2, 30), min_size=0, max_size=25),
    dp=st.integers(1, 3),
    multiple=st.sampled_from([1, 4]),
    rounds=st.sampled_from([1, 2]),
)
def test_every_position_lands_once(lengths: list[int], dp: int, multiple: int, rounds: int) -> None:
    items = [sequence(length, number) for number, length in enumerate(lengths)]
    ranks = pack(items, tokens_per_microbatch=40, dp=dp, multiple=multiple, rounds=rounds, layout=LAYOUT)
    assert len({len(micro) for micro in ranks}) == 1
    assert len(ranks[0]) % rounds == 0
    seen = []
    for micro in (one for rank in ranks for one in rank):
        assert micro.size <= 40
        assert micro.size % multiple == 0
        assert micro.cu_seqlens[-1] == micro.size
        real = np.flatnonzero(micro.real)
        np.testing.assert_array_equal(micro.labels[real], micro.tokens[real] + 1)
        np.testing.assert_array_equal(micro.tokens[real] % 1000, micro.positions[real])
        if len(real):
            np.testing.assert_array_equal(micro.columns["mark"][real], micro.tokens[real])
            expected = (micro.positions[real][:, None, None] + np.arange(4) + 4 * np.arange(2)[:, None]) % 16
            np.testing.assert_array_equal(micro.routes[real], expected)
        assert not micro.loss_mask[~micro.real].any()
        seen += micro.tokens[real].tolist()
    assert sorted(seen) == sorted(token for item in items for token in item.tokens[:-1].tolist())


def test_padding_rows_route_to_distinct_balanced_experts() -> None:
    routes = filler_routes(32, LAYOUT)
    assert all(len(set(row)) == 4 for row in routes.reshape(-1, 4).tolist())
    assert len(set(np.bincount(routes[:, 0].ravel(), minlength=16).tolist())) == 1


def test_a_sequence_that_fits_no_microbatch_names_the_setting() -> None:
    with pytest.raises(TrainError, match="tokens_per_microbatch = 8"):
        pack([sequence(20, 0)], tokens_per_microbatch=8, dp=1, layout=LAYOUT)


def kept_of(label: int) -> list[int]:
    """A row of a sampling mask that is recognised by its label."""
    return list(range(label, label + 1 + label % 3))


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    masked=st.integers(0, 2**12 - 1),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
)
def test_sampling_masks_stay_with_their_labels_on_every_rank(lengths: list[int], masked: int, cp: int, tp: int) -> None:
    items = [sequence(length, number) for number, length in enumerate(lengths)]
    items = [
        replace(item, sampling_mask=of_rows([kept_of(label) for label in item.tokens[1:]])) if masked >> number & 1 else item
        for number, item in enumerate(items)
    ]
    multiple = Place((0, cp), (0, tp), ()).multiple
    (micro,) = pack(items, tokens_per_microbatch=40, dp=1, multiple=multiple, layout=LAYOUT)
    seen = 0
    for one in equalise(micro, multiple, LAYOUT):
        parts = [cut(one, Place((rank, cp), (tp - 1, tp), (0, 1))) for rank in range(cp)]
        assert len({part.sampling_mask is None for part in parts}) == 1
        for part in parts:
            if part.sampling_mask is None:
                assert not any(masked >> label // 1000 & 1 for label in part.labels[part.loss_mask > 0])
                continue
            mask = part.sampling_mask
            assert mask.rows == len(part.labels)
            for row, label in enumerate(part.labels.tolist()):
                wanted = kept_of(label) if part.loss_mask[row] and masked >> label // 1000 & 1 else []
                assert mask.ids[mask.offsets[row] : mask.offsets[row + 1]].tolist() == wanted
                seen += bool(wanted)
    assert seen == sum(length - 1 for number, length in enumerate(lengths) if masked >> number & 1)
