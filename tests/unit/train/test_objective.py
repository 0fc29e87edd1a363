"""The objective, against its definition written out in plain numpy, and its gradients where they matter."""

import numpy as np
import pytest
import torch

from moerl.config.schema import Objective
from moerl.train.objective import correction, group_advantages, grpo_loss, supervised_loss


def case(n: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    new, old, engine, reference = (torch.tensor(-2 + 0.4 * rng.standard_normal(n), dtype=torch.float32) for _ in range(4))
    mask = torch.tensor((rng.random(n) > 0.3).astype(np.float32))
    advantages = torch.tensor(rng.standard_normal(n), dtype=torch.float32)
    return new, mask, {"advantages": advantages, "engine_logprobs": engine, "old_logprobs": old, "reference_logprobs": reference}


def test_the_loss_is_its_definition() -> None:
    objective = Objective(kl_coef=0.1, entropy_coef=0.01, correction="tis", tis_cap=1.3)
    new, mask, columns = case()
    entropy = torch.full_like(new, 1.5)
    loss, count, _ = grpo_loss(objective, new, entropy, mask, columns)
    total = 0.0
    for i in range(len(new)):
        if mask[i]:
            ratio = (new[i] - columns["old_logprobs"][i]).exp().item()
            weight = min(1.3, (columns["old_logprobs"][i] - columns["engine_logprobs"][i]).exp().item())
            a = columns["advantages"][i].item()
            surrogate = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            gap = (columns["reference_logprobs"][i] - new[i]).item()
            total += -weight * surrogate - 0.01 * 1.5 + 0.1 * (np.exp(gap) - 1 - gap)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert count.item() == mask.sum().item()


def test_on_policy_the_gradient_is_the_weighted_policy_gradient() -> None:
    new, mask, columns = case()
    del columns["old_logprobs"], columns["reference_logprobs"]
    new.requires_grad_()
    loss, _, _ = grpo_loss(Objective(), new, torch.zeros(64), mask, columns)
    loss.backward()
    weight = (new.detach() - columns["engine_logprobs"]).exp().clamp(max=2.0)
    torch.testing.assert_close(new.grad, -weight * columns["advantages"] * mask)


def test_icepop_masks_tokens_outside_the_band() -> None:
    gap = torch.log(torch.tensor([0.4, 0.6, 1.0, 1.9, 2.1]))
    found = correction(Objective(correction="icepop"), gap)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.6, 1.0, 1.9, 0.0]))
    torch.testing.assert_close(correction(Objective(correction="none"), gap), torch.ones(5))


def test_group_advantages() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    np.testing.assert_allclose(group_advantages(Objective())(rewards), [1, -1, -1, 1], atol=1e-5)
    np.testing.assert_allclose(group_advantages(Objective(normalize_std=False))(rewards), [0.5, -0.5, -0.5, 0.5])
    assert not group_advantages(Objective())(np.ones(4, np.float32)).any()


def test_a_value_at_padding_cannot_poison_the_sum() -> None:
    new, mask, columns = case()
    new[0], mask[0] = float("nan"), 0.0
    loss, _, sums = grpo_loss(Objective(), new, torch.zeros(64), mask, columns)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value) for value in sums.values())


def test_supervised_loss() -> None:
    logprobs, entropy, mask = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([0.5, 0.5, 7.0]), torch.tensor([1.0, 1.0, 0.0])
    loss, count, _ = supervised_loss(0.4, logprobs, entropy, mask)
    assert loss.item() == pytest.approx(3.0 - 0.4)
    assert count.item() == 2
