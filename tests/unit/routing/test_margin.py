"""Margins and flipped gate weight against a few lines of numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.routing.margin import flipped_mass, selection_margin


def expected(scores: np.ndarray, topk: int, groups: int, group_topk: int, best: int) -> tuple[np.ndarray, np.ndarray]:
    """(chosen experts, margin) of one token."""
    size = len(scores) // groups
    if group_topk:
        sums = [np.sort(scores[group * size : (group + 1) * size])[::-1][:best].sum() for group in range(groups)]
        shut = np.argsort(-np.array(sums))[group_topk:]
        scores = np.where(np.isin(np.arange(len(scores)) // size, shut), -np.inf, scores)
    order = np.argsort(-scores)
    return order[:topk], scores[order[topk - 1]] - scores[order[topk]]


SHAPES = [(8, 3, 1, 0, 2), (16, 4, 4, 2, 2), (64, 8, 8, 4, 2), (64, 6, 8, 3, 1), (12, 6, 4, 2, 2), (12, 5, 4, 2, 3), (8, 2, 4, 1, 2)]
"""(experts, topk, groups, open groups, experts of a group that count when groups compete)"""


@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES))
def test_the_margin_is_the_distance_to_the_next_expert_of_the_open_groups(seed, shape):
    experts, topk, groups, group_topk, best = shape
    scores = np.random.default_rng(seed).standard_normal((6, experts)).astype(np.float32)
    chosen, margins = map(np.stack, zip(*(expected(row, topk, groups, group_topk, best) for row in scores), strict=True))
    found = selection_margin(torch.from_numpy(scores), torch.from_numpy(chosen), groups, group_topk or None, best)
    assert (found > 0).all()
    np.testing.assert_array_equal(found.numpy(), margins.astype(np.float32))


def test_where_all_experts_of_the_open_groups_are_chosen_nothing_is_near():
    assert selection_margin(torch.tensor([[0.1, 0.2, 0.9, 0.8]]), torch.tensor([[2, 3]]), 2, 1).tolist() == [np.inf]


@pytest.mark.parametrize(("engine", "mass"), [([1, 2], 0.0), ([2, 1], 0.0), ([1, 0], 0.75), ([0, 2], 0.25), ([0, 3], 1.0)], ids=str)
def test_flipped_mass_is_the_weight_of_experts_that_only_the_trainer_chose(engine, mass):
    weights = torch.tensor([[0.0, 0.5, 1.5, 0.0]])  # scaled, as routers return them
    assert flipped_mass(weights, torch.tensor([engine], dtype=torch.uint8)).tolist() == [mass]
