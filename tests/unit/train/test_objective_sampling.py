"""The softmax within a nucleus against a dense one with everything else at minus infinity, alone and over tensor-parallel columns."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.rollout.mask import SamplingMask, of_rows
from moerl.train.objective import masked_logprobs
from tests.unit.train.thread_ranks import Collective, on_ranks


def test_by_hand() -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/8 the engine kept the first two: 2/3 and 1/3. The second row was not cut."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(2, 1)
    found = masked_logprobs(logits, torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0, 2, 2]))
    torch.testing.assert_close(found.exp(), torch.tensor([1 / 3, 1 / 4]))


def case(seed: int, rows: int = 6, vocab: int = 12) -> tuple[torch.Tensor, torch.Tensor, SamplingMask]:
    rng = np.random.default_rng(seed)
    kept = [rng.permutation(vocab)[: rng.integers(0, 5)].tolist() for _ in range(rows)]
    labels = [rng.choice(row) if row else rng.integers(vocab) for row in kept]
    return torch.tensor(20 * rng.standard_normal((rows, vocab))), torch.tensor(labels), of_rows(kept)


def tensors(mask: SamplingMask) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(mask.ids.astype(np.int64)), torch.from_numpy(mask.offsets)


def dense(logits: torch.Tensor, labels: torch.Tensor, mask: SamplingMask) -> torch.Tensor:
    keep = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (start, stop) in enumerate(zip(mask.offsets[:-1], mask.offsets[1:], strict=True)):
        keep[row, mask.ids[start:stop].astype(np.int64) if stop > start else slice(None)] = True
    return logits.masked_fill(~keep, -torch.inf).log_softmax(1).gather(1, labels[:, None]).squeeze(1)


def with_gradient(function, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    value = function(logits)
    (value * torch.arange(1, len(value) + 1)).sum().backward()
    return value.detach(), logits.grad


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_it_is_the_dense_softmax_of_what_was_kept(seed: int) -> None:
    logits, labels, mask = case(seed)
    wanted, wanted_grad = with_gradient(lambda x: dense(x, labels, mask), logits)
    found, found_grad = with_gradient(lambda x: masked_logprobs(x, labels, *tensors(mask)), logits)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_grad, wanted_grad)
    shifted = masked_logprobs(logits.log_softmax(1), labels, *tensors(mask))
    torch.testing.assert_close(shifted, wanted, msg="log-probabilities serve as logits")


@pytest.mark.parametrize("size", [2, 3])
def test_columns_over_ranks(size: int) -> None:
    logits, labels, mask = case(5)
    wanted, wanted_grad = with_gradient(lambda x: masked_logprobs(x, labels, *tensors(mask)), logits)
    width = logits.shape[1] // size

    def rank(number: int, add: Collective, largest: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"first": number * width, "add": add, "largest": largest}
        mine = logits[:, number * width : (number + 1) * width]
        return with_gradient(lambda x: masked_logprobs(x, labels, *tensors(mask), **options), mine)

    parts = on_ranks(size, rank)
    for found, _ in parts:
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts], 1), wanted_grad)


def test_without_any_restriction_it_is_the_softmax() -> None:
    logits, labels, _ = case(2)
    found = masked_logprobs(logits, labels, torch.zeros(0, dtype=torch.long), torch.zeros(7, dtype=torch.long))
    torch.testing.assert_close(found, logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1))
