"""Corrections by hand, alone and in the loss, with what they report."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema import Objective
from moerl.train.objective import Sequences, averages, correction, grpo_loss
from moerl.train.objective.corrections import on_policy_enough

RATIOS = [0.4, 0.6, 1.0, 1.9, 2.1]
SETTINGS = {"tis_cap": 1.5, "mis_cap": 2.0}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("tis", [0.4, 0.6, 1, 1.5, 1.5]),
        ("tis_sequence", [0.4, 0.6, 1, 1.5, 1.5]),
        ("mis", [0.4, 0.6, 1, 1.9, 0]),
        ("mis_sequence", [0.4, 0.6, 1, 1.9, 0]),
        ("icepop", [0, 0.6, 1, 1.9, 0]),
    ],
)
def test_weights_by_hand(name: str, weights: list[float]) -> None:
    found = correction(Objective(correction=name, **SETTINGS), torch.tensor(RATIOS).log())
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float32))


@pytest.mark.parametrize("name", ["none", "tis", "mis", "icepop", "tis_sequence", "mis_sequence"])
@given(st.floats(-1e4, 1e4))
def test_weights_are_finite_bounded_and_1_for_equal_policies(name: str, gap: float) -> None:
    weight, equal = correction(Objective(correction=name), torch.tensor([gap, 0.0])).tolist()
    assert 0 <= weight <= 2
    assert equal == 1


def loss_of(objective: Objective, ratios: list[float], ids: list[int], advantages: list[float]) -> tuple[float, dict[str, float]]:
    """(loss, metrics) of tokens whose trainer's probability is 0.5, and ratio to the engine's is as given."""
    logprobs = torch.full((len(ratios),), math.log(0.5))
    columns = {"advantages": torch.tensor(advantages), "engine_logprobs": logprobs - torch.tensor(ratios).log()}
    ones = torch.ones(len(ratios))
    sequences = Sequences(torch.tensor(ids), max(ids) + 1, True, lambda values: values)
    loss, count, sums = grpo_loss(objective, logprobs, 0 * ones, ones, columns, sequences)
    return loss.item(), averages({name: float(value) for name, value in {**sums, "loss": loss, "denominator": count}.items()})


def test_a_sequence_has_the_product_of_its_ratios() -> None:
    """1.5 * 1.6 = 2.4 is beyond both caps though neither token is; 1.5 * 0.5 is not."""
    ratios, ids, ones = [1.5, 1.6, 1.5, 0.5], [0, 0, 1, 1], [1.0] * 4
    loss, metrics = loss_of(Objective(correction="tis_sequence"), ratios, ids, ones)
    assert loss == pytest.approx(-(2 + 2 + 0.75 + 0.75))
    assert (metrics["correction_cut_share"], metrics["correction_cut_share_of_sequences"]) == pytest.approx((0.5, 0.5))
    loss, metrics = loss_of(Objective(correction="mis_sequence"), ratios, ids, ones)
    assert loss == pytest.approx(-(0.75 + 0.75))
    assert metrics["correction_weight"] == pytest.approx(1.5 / 4)
    assert metrics["correction_ess"] == pytest.approx(0.5), "half of the tokens are left, with equal weights"


def test_shares_of_tokens_and_of_sequences_differ() -> None:
    """One of three tokens is cut: half of a sequence of two, none of one of one."""
    _, metrics = loss_of(Objective(correction="icepop", opsm_threshold=1.0), [3.0, 1.0, 1.0], [0, 0, 1], [1.0] * 3)
    assert metrics["correction_cut_share"] == pytest.approx(1 / 3)
    assert metrics["correction_cut_share_of_sequences"] == pytest.approx(1 / 4)


def test_only_bad_sequences_that_drifted_are_masked() -> None:
    drift, advantages = torch.tensor([0.2, 0.2, 0.05, -3.0]), torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert on_policy_enough(drift, advantages, 0.1).tolist() == [False, True, True, True]


def test_the_drift_is_the_mean_over_the_sequence() -> None:
    """The engine gave its tokens e^0.3 and e^0.1 times the trainer's probability: 0.2 on average, beyond 0.15 though one token is not."""
    ratios, ids, advantages = [math.exp(-0.3), math.exp(-0.1), math.exp(-0.3), math.exp(0.1)], [0, 0, 1, 1], [-1.0] * 4
    loss, metrics = loss_of(Objective(correction="none", opsm_threshold=0.15), ratios, ids, advantages)
    assert loss == pytest.approx(2.0), "the second sequence's drift is 0.1"
    assert (metrics["opsm_masked_share"], metrics["opsm_masked_share_of_sequences"]) == pytest.approx((0.5, 0.5))


def test_a_masked_sequence_still_counts_among_the_tokens() -> None:
    """As in the source: the mask multiplies the surrogate, and the mean stays over all tokens; the KL is not masked."""
    logprobs, ones = torch.full((2,), math.log(0.5)), torch.ones(2)
    columns = {"advantages": -ones, "engine_logprobs": logprobs + 1, "reference_logprobs": logprobs - 1}
    sequences = Sequences(torch.tensor([0, 0]), 1, True, lambda values: values)
    loss, count, _ = grpo_loss(Objective(opsm_threshold=0.5, kl_coef=1.0), logprobs, 0 * ones, ones, columns, sequences)
    assert loss.item() == pytest.approx(2 * math.exp(-1))
    assert count == 2
