"""Vocabulary-parallel log-probability and entropy against plain torch."""

from types import SimpleNamespace

import pytest
import torch

from moerl.rollout.mask import of_rows
from moerl.train.vocabulary import logprob_and_entropy, logprobs_within
from tests.unit.train.thread_ranks import on_ranks


class Alone:
    size = staticmethod(lambda: 1)
    rank = staticmethod(lambda: 0)


def plain(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, labels[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def test_values_equal_plain_torch():
    logits, labels = torch.randn(7, 11), torch.randint(11, (7,))
    for got, expected in zip(logprob_and_entropy(logits, labels, 11, Alone), plain(logits, labels), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("output", [0, 1], ids=["logprob", "entropy"])
def test_gradients_equal_finite_differences(output):
    logits, labels = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: logprob_and_entropy(x, labels, 5, Alone)[output], logits)


def test_padding_columns_have_no_probability_and_no_gradient():
    logits = torch.cat([torch.randn(4, 5), torch.full((4, 3), 50.0)], dim=1).requires_grad_()
    labels = torch.tensor([0, 1, 2, 4])
    logprobs, entropy = logprob_and_entropy(logits, labels, 5, Alone)
    expected = plain(logits[:, :5], labels)
    torch.testing.assert_close(logprobs, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 5:] == 0).all()


def test_large_logits_stay_finite():
    logprobs, entropy = logprob_and_entropy(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([1]), 3, Alone)
    assert logprobs.item() == pytest.approx(-2e4)
    assert entropy.item() == 0.0


VOCABULARY, COLUMNS = 10, 12
KEPT, LABELS = [[3, 9], [], [5], [0, 5, 6, 8], []], torch.tensor([9, 2, 5, 6, 4])


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    mask = of_rows(KEPT)
    return torch.from_numpy(mask.ids.astype("int64")), torch.from_numpy(mask.offsets)


def by_hand(logits: torch.Tensor) -> torch.Tensor:
    rows = [sorted(row) or list(range(VOCABULARY)) for row in KEPT]
    return torch.stack([logits[i, LABELS[i]] - logits[i, row].logsumexp(0) for i, row in enumerate(rows)])


def within(logits: torch.Tensor, group: object) -> torch.Tensor:
    logprobs, _ = logprob_and_entropy(logits, LABELS, VOCABULARY, group)
    return logprobs_within(*tensors(), logits, LABELS, logprobs, group)


def with_gradient(function, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    value = function(logits)
    (value * torch.arange(1, len(value) + 1)).sum().backward()
    return value.detach(), logits.grad


@pytest.mark.parametrize("size", [1, 2, 3])
def test_restricted_rows_are_normalised_over_their_tokens_and_others_over_all(size, monkeypatch):
    logits = 3 * torch.randn(5, COLUMNS, dtype=torch.float64)
    wanted, wanted_grad = with_gradient(by_hand, logits)

    def all_reduce(values, op=torch.distributed.ReduceOp.SUM, group=None):
        values.copy_((group.largest if op == torch.distributed.ReduceOp.MAX else group.add)(values))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def rank(number, add, largest):
        group = SimpleNamespace(size=lambda: size, rank=lambda: number, add=add, largest=largest)
        mine = logits[:, number * (COLUMNS // size) : (number + 1) * (COLUMNS // size)]
        return with_gradient(lambda x: within(x, group), mine)

    parts = on_ranks(size, rank)
    for found, _ in parts:
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts], 1), wanted_grad)
