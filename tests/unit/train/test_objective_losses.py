"""Surrogates by hand, sequence losses against their definition by autograd, and the same under context parallelism."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.schema import Objective
from moerl.errors import TrainError
from moerl.routing.shard import context_rows
from moerl.train.objective import Sequences, averages, grpo_loss, sequence_ids
from moerl.train.objective.losses import cispo, ppo, reference_kl, sequence_log_ratio
from tests.unit.train.thread_ranks import Collective, on_ranks

LENGTHS = [8, 16, 8, 24, 8]
"""Rows of each packed sequence; the last is padding."""
BOUNDARIES = np.concatenate([[0], np.cumsum(LENGTHS)])
GSPO = {"loss": "gspo", "old_policy": "engine", "correction": "none", "clip_low": 0.05, "clip_high": 0.05}


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def test_ppo_clips_a_gain_but_not_a_loss() -> None:
    logprobs = logs(0.5, 0.5, 0.1, 0.1).requires_grad_()
    surrogate, clipped = ppo(logprobs - logs(0.25, 0.25, 0.2, 0.2), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.28)
    torch.testing.assert_close(surrogate, torch.tensor([1.28, -2.0, 0.5, -0.8]))
    assert clipped.tolist() == [True, False, False, True]
    surrogate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -2.0, 0.5, 0.0]))


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    logprobs = logs(0.5, 0.1, 0.2).requires_grad_()
    surrogate, clipped = cispo(logprobs, logprobs - logs(0.25, 0.2, 0.2), torch.tensor([1.0, -3.0, 2.0]), 0.2, 0.28)
    torch.testing.assert_close(surrogate, torch.tensor([1.28 * math.log(0.5), -3 * 0.8 * math.log(0.1), 2 * math.log(0.2)]))
    assert clipped.tolist() == [True, True, False]
    surrogate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([1.28, -2.4, 2.0]))


def test_cispo_without_a_lower_bound() -> None:
    surrogate, clipped = cispo(logs(0.01), logs(0.01) - logs(1.0), torch.ones(1), 1.0, 4.0)
    torch.testing.assert_close(surrogate, torch.tensor([0.01 * math.log(0.01)]))
    assert not clipped.any()


def test_gspo_by_hand() -> None:
    """Ratios 2 and 1: the sequence's is sqrt(2), beyond the clip. It stops a gain, not a loss."""
    logprobs = logs(0.5, 0.5).requires_grad_()
    log_ratio = sequence_log_ratio(logprobs, torch.full((2,), math.log(2) / 2))
    gain, clipped = ppo(log_ratio, torch.ones(2), 0.2, 0.28)
    torch.testing.assert_close(gain, torch.tensor([1.28, 1.28]))
    assert clipped.all()
    assert not torch.autograd.grad(gain.sum(), logprobs, retain_graph=True)[0].any()
    loss, clipped = ppo(log_ratio, -torch.ones(2), 0.2, 0.28)
    torch.testing.assert_close(loss, torch.full((2,), -math.sqrt(2)))
    assert not clipped.any()
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.full((2,), -math.sqrt(2)))


def case(seed: int, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Packed rows: prompts first, then trained tokens with gaps, each sequence with one advantage."""
    rng = np.random.default_rng(seed)
    n = int(BOUNDARIES[-1])
    new, old, engine, reference = (torch.tensor(-2 + spread * rng.standard_normal(n), dtype=torch.float32) for _ in range(4))
    mask, advantages = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for start, stop in itertools.pairwise(BOUNDARIES[:-1]):
        mask[start + 3 : stop - 1] = rng.random(stop - start - 4) > 0.2
        advantages[start:stop] = rng.standard_normal()
    columns = {"advantages": torch.from_numpy(advantages), "engine_logprobs": engine, "old_logprobs": old, "reference_logprobs": reference}
    return new, torch.from_numpy(mask), columns


def whole(reduce: Collective = alone) -> Sequences:
    boundaries = torch.from_numpy(BOUNDARIES)
    return Sequences(sequence_ids(boundaries, torch.arange(int(BOUNDARIES[-1]))), len(LENGTHS), True, reduce)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["tokens", "sequences", "constant"]))
@settings(deadline=None, max_examples=30)
def test_gspo_is_its_definition(seed: int, normalization: str) -> None:
    """The paper's surrogate of whole sequences, differentiated through the sequence's ratio."""
    objective = Objective(**GSPO, length_normalization=normalization)
    new, mask, columns = case(seed)
    del columns["reference_logprobs"], columns["old_logprobs"]
    found = new.clone().requires_grad_()
    loss, denominator, sums = grpo_loss(objective, found, torch.zeros_like(new), mask, columns, whole(), budget_tokens=100)
    loss.backward()

    wanted, total, clips, sequences, tokens = new.clone().requires_grad_(), 0.0, 0, 0, 0
    for start, stop in itertools.pairwise(BOUNDARIES):
        rows = start + np.flatnonzero(mask[start:stop].numpy())
        if len(rows):
            ratio = (wanted[rows] - columns["engine_logprobs"][rows]).mean().exp()
            advantage = columns["advantages"][start]
            clipped = ratio.clamp(0.95, 1.05)
            weight = 1 if normalization == "sequences" else len(rows)
            total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
            clips, sequences, tokens = clips + int(clipped * advantage < ratio * advantage), sequences + 1, tokens + len(rows)
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    assert denominator == {"tokens": tokens, "sequences": sequences, "constant": 100 * sequences}[normalization]
    assert sums["clip_share_of_sequences"].item() == pytest.approx(clips, abs=1e-4)
    assert sums["sequences"].item() == pytest.approx(sequences)


@pytest.mark.parametrize(
    "options",
    [
        GSPO | {"length_normalization": "sequences", "opsm_threshold": 0.02},
        {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.01, "correction": "tis_sequence", "kl_coef": 0.1, "unbiased_kl": True},
        {"correction": "mis_sequence", "length_normalization": "constant", "entropy_coef": 0.01},
        {"loss": "cispo", "opsm_threshold": 0.05, "kl_coef": 0.1},
    ],
    ids=["gspo", "gspo_tis_kl", "ppo_mis_constant", "cispo_opsm"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallelism_changes_nothing(options: dict[str, Any], size: int) -> None:
    """Each rank holds its zigzag pieces and differentiates its own loss; losses, counts and gradients add up to those of one process."""
    objective = Objective(**options)
    new, mask, columns = case(3)
    entropy = torch.rand(len(new), generator=torch.Generator().manual_seed(1))

    def loss(rows: np.ndarray, sequences: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = new[rows].clone().requires_grad_()
        here = {name: column[rows] for name, column in columns.items()}
        value, count, sums = grpo_loss(objective, logprobs, entropy[rows], mask[rows], here, sequences, 100)
        value.backward()
        gradient = torch.zeros_like(new)
        gradient[rows] = logprobs.grad
        return gradient, {**sums, "loss": value.detach(), "denominator": count}

    def rank(number: int, add: Collective, _: Collective) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = context_rows(BOUNDARIES, (number, size))
        ids = sequence_ids(torch.from_numpy(BOUNDARIES), torch.from_numpy(rows))
        return loss(rows, Sequences(ids, len(LENGTHS), number == 0, add))

    gradient, sums = loss(np.arange(len(new)), whole())
    parts = on_ranks(size, rank)
    torch.testing.assert_close(sum(part for part, _ in parts), gradient, rtol=1e-5, atol=1e-6)
    assert sum(part["denominator"] for _, part in parts) == sums["denominator"]
    added = {name: float(sum(part[name] for _, part in parts)) for name in sums}
    assert averages(added) == pytest.approx(averages({name: float(value) for name, value in sums.items()}), rel=1e-4, abs=1e-6)
    assert gradient.any()


def test_an_objective_of_sequences_must_know_them() -> None:
    new, mask, columns = case(0)
    with pytest.raises(TrainError, match="which rows belong together"):
        grpo_loss(Objective(opsm_threshold=0.1), new, torch.zeros_like(new), mask, columns)


def test_sequences_weigh_the_same_whatever_their_length() -> None:
    """Tokens of losses -1, -1, -1 and -4: their mean is -7/4, that of the sequences' means -5/2, and of 2 sequences of up to 10 -7/20."""
    columns = {"advantages": torch.tensor([1.0, 1.0, 1.0, 4.0]), "engine_logprobs": torch.zeros(4)}
    sequences = Sequences(torch.tensor([0, 0, 0, 1]), 2, True, alone)
    for normalization, wanted in {"tokens": -7 / 4, "sequences": -5 / 2, "constant": -7 / 20}.items():
        objective = Objective(length_normalization=normalization, correction="none")
        loss, count, _ = grpo_loss(objective, torch.zeros(4), torch.zeros(4), torch.ones(4), columns, sequences, 10)
        assert (loss / count).item() == pytest.approx(wanted)


def test_padding_reaches_no_gradient() -> None:
    new, mask, columns = case(0)
    new[mask == 0] = float("nan")
    new.requires_grad_()
    objective = Objective(loss="gspo", clip_low=0.1, clip_high=0.1, correction="tis_sequence", kl_coef=0.1)
    loss, _, _ = grpo_loss(objective, new, torch.zeros_like(new), mask, columns, whole())
    loss.backward()
    assert torch.isfinite(new.grad).all()
    assert not new.grad[mask == 0].any()


def test_a_microbatch_of_padding_has_no_loss_and_no_sequences() -> None:
    new, mask, columns = case(0)
    loss, count, sums = grpo_loss(Objective(**GSPO), new.requires_grad_(), torch.zeros_like(new), 0 * mask, columns, whole())
    loss.backward()
    assert (loss.item(), count.item(), sums["sequences"].item(), new.grad.abs().sum().item()) == (0, 0, 0, 0)


def test_the_engine_as_old_policy() -> None:
    """Ratio 2 to the engine is clipped, though the trainer's own old policy is the live one."""
    columns = {"advantages": torch.ones(1), "engine_logprobs": logs(0.25)}
    objective = Objective(old_policy="engine", correction="none")
    loss, _, sums = grpo_loss(objective, logs(0.5), torch.zeros(1), torch.ones(1), columns)
    assert loss.item() == pytest.approx(-1.28)
    assert sums["clip_share"].item() == 1
    columns["old_logprobs"] = logs(0.5)
    assert grpo_loss(objective, logs(0.5), torch.zeros(1), torch.ones(1), columns)[0].item() == pytest.approx(-1.28)


def test_decoupled_ppo_by_hand() -> None:
    """Behaviour 0.4, proximal 0.5, live 0.8: ratio 1.6 is clipped to 1.28, the weight 1.25 is not cut."""
    columns = {"advantages": torch.ones(1), "engine_logprobs": logs(0.4), "old_logprobs": logs(0.5)}
    loss, _, sums = grpo_loss(Objective(), logs(0.8), torch.zeros(1), torch.ones(1), columns)
    assert loss.item() == pytest.approx(-1.28 * 1.25)
    assert sums["correction_weight"].item() == pytest.approx(1.25)


def test_k3_by_hand() -> None:
    """x = 1/2, so 1/2 - log(1/2) - 1; the engine's ratio is 5/4."""
    k3 = 0.5 - math.log(0.5) - 1
    assert reference_kl(logs(0.5), logs(0.25)).item() == pytest.approx(k3)
    assert reference_kl(logs(0.5), logs(0.25), logs(0.4)).item() == pytest.approx(1.25 * k3)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_the_unbiased_kl_is_unbiased_in_value_and_gradient(seed: int) -> None:
    """Summed over all tokens with the engine's probabilities it is the KL itself."""
    logits, engine, reference = distributions(seed)
    live = logits.log_softmax(0)
    estimate = (engine.exp() * reference_kl(live, reference, engine)).sum()
    exact = kl(live, reference)
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(gradient(estimate, logits), gradient(exact, logits))


def test_plain_k3_is_unbiased_in_value_alone() -> None:
    logits, _, reference = distributions(seed=0)
    live = logits.log_softmax(0)
    plain = (live.detach().exp() * reference_kl(live, reference)).sum()
    exact = kl(live, reference)
    torch.testing.assert_close(plain, exact)
    assert (gradient(plain, logits) - gradient(exact, logits)).abs().max() > 0.1


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The policy's logits, and logprobs of engine and reference, of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    engine, reference = (torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    return torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_(), engine, reference


def kl(live: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (live.exp() * (live - reference)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]
