"""Vocabulary-parallel log-probability and entropy against plain torch."""

import pytest
import torch

from moerl.train.vocabulary import logprob_and_entropy


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
