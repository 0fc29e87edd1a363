"""What balancing sees under replay: the correction bias and auxiliary losses, against references of a few lines over real rows."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.routing import chooser
from moerl.routing.layout import Layout
from moerl.routing.replay import RouteReplay, routers
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch
from tests.passes import run_backward, run_logprobs
from tests.unit.routing.routes import random_ids

PASSES = {"temperature": 1.0, "fp32_head": True}
RECOMPUTE = {
    "stored": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
EXPERTS, TOPK, COEFFICIENT, RATE = 8, 2, 0.01, 0.25


@pytest.fixture(scope="module")
def ranks():
    defaults = Config(model={"path": "unused"}, train={"device": "cpu"})
    yield megatron.initialise(defaults.parallel, defaults.train, seed=1)
    megatron.shutdown()


@pytest.fixture(scope="module")
def make(ranks, tmp_path_factory):
    """`make(layers, replay, **native)`: a model whose first layer is dense, with a correction bias that counts, and its replay."""

    def made(layers, replay, **native):
        config = tiny_config(
            hidden=32, layers=layers, experts=EXPERTS, topk=TOPK, groups=1, group_topk=1, expert_width=16, initializer_range=0.2
        )
        folder = tmp_path_factory.mktemp("statistics")
        spec = write_tiny(folder, config, seed=4)
        train = {"dtype": "float32", "device": "cpu", "expert_bias_update_rate": RATE}
        settings = Config(model={"path": str(folder)}, train=train, replay=replay, megatron=native)
        model = megatron.build_model(spec, settings, ranks)
        weights.load_hf(model, spec, folder, ranks)
        for router in routers(model[0]):
            router.expert_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
        layout = Layout(spec.moe_layers, spec.experts, spec.topk)
        sees = {"bias_counts": settings.replay.expert_bias, "aux_loss": settings.replay.aux_loss}
        return SimpleNamespace(
            model=model,
            layout=layout,
            ranks=ranks,
            routers=routers(model[0]),
            replay=RouteReplay(model, layout, **{name: value for name, value in sees.items() if value != "frozen"}),
        )

    return made


def batch_of(layout: Layout, *, holes: bool = False, count: int = 3) -> list[Microbatch]:
    """Microbatches of 16 rows with random routes, of which the last 3, 6, … are padding; with `holes` every third row is not forced."""
    micro = []
    for seed in range(count):
        rng, rows = np.random.default_rng(seed), np.arange(16)
        real = rows < 13 - 3 * seed
        tokens, labels = rng.integers(0, 16, (2, 16))
        routes = random_ids(seed, 16, len(layout.layers), EXPERTS, TOPK)
        one = Microbatch(tokens, labels, rows % 8, np.array([0, 8, 16], np.int32), real.astype(np.float32), routes, real)
        micro.append(replace(one, forced=~real | (rows % 3 > 0)) if holes else one)
    return micro


def loss(outputs, rows):
    total = -(outputs.logprobs * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {"loss": total}


def nothing(outputs, rows):
    """No loss but the routers' own."""
    return 0.0 * outputs.logprobs.sum(), rows.loss_mask.sum(), {}


def backward(made: SimpleNamespace, micro: list[Microbatch], loss_fn=loss) -> SimpleNamespace:
    """A forced pass.

    Returns:
        hidden: per router and microbatch, float64[n, hidden] that it saw in the forward pass.
        counts: float32[experts] per router, as the update of the bias gets them.
    """
    hidden, counts, handles = defaultdict(list), [], []

    def saw(number):
        return lambda router, args, output: None if chooser.in_backward() else hidden[number].append(args[0].detach().view(16, -1).double())

    for number, router in enumerate(made.routers):
        handles.append(router.register_forward_hook(saw(number)))
    config = made.model[0].config
    finalize = config.finalize_model_grads_func

    def watched(*args, **kwargs):
        counts.extend(router.local_tokens_per_expert.clone() for router in made.routers)
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = watched
    try:
        run_backward(made.model, micro, made.ranks, loss_fn=loss_fn, replay=made.replay, **PASSES)
    finally:
        config.finalize_model_grads_func = finalize
        for handle in handles:
            handle.remove()
    return SimpleNamespace(hidden=hidden, counts=counts)


def best(scores: np.ndarray) -> np.ndarray:
    """The experts int[n, k] with the highest scores [n, experts]."""
    return np.argsort(-scores, axis=1)[:, :TOPK]


def scores_of(router: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(hidden @ router.weight.double().T)


def used_of(one: Microbatch, position: int, native: np.ndarray) -> np.ndarray:
    return one.routes[:, position] if one.forced is None else np.where(one.forced[:, None], one.routes[:, position], native)


def expected_counts(made: SimpleNamespace, micro: list[Microbatch], seen: SimpleNamespace, mode: str, bias: np.ndarray) -> list[np.ndarray]:
    """Per router: how often each expert was chosen by real rows of all microbatches."""
    totals = []
    for position, router in enumerate(made.routers):
        total = np.zeros(EXPERTS)
        for one, hidden in zip(micro, seen.hidden[position], strict=True):
            native = best(scores_of(router, hidden).detach().numpy() + bias)
            chosen = native if mode == "native" else used_of(one, position, native)
            total += np.bincount(chosen[one.real].ravel(), minlength=EXPERTS)
        totals.append(total)
    return totals


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("mode", ["native", "replayed"])
def test_the_bias_counts_real_rows_once(make, mode, recompute, holes):
    """And moves by its rate towards experts that were chosen less than the mean."""
    made = make(4, {"expert_bias": mode}, **RECOMPUTE[recompute])
    micro, bias = batch_of(made.layout, holes=holes), np.linspace(-0.2, 0.2, EXPERTS)
    seen = backward(made, micro)
    expected = expected_counts(made, micro, seen, mode, bias)
    assert len(seen.counts) == 3
    for router, found, wanted in zip(made.routers, seen.counts, expected, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted)
        assert wanted.sum() == TOPK * sum(one.real.sum() for one in micro)
        np.testing.assert_allclose(router.expert_bias.numpy(), bias + RATE * np.sign(wanted.mean() - wanted), atol=1e-6)
    other = expected_counts(made, micro, seen, "replayed" if mode == "native" else "native", bias)
    assert not any(map(np.array_equal, expected, other)), "the two modes must be told apart"


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_frozen_bias_stays_as_it_is(make, recompute):
    made = make(4, {"expert_bias": "frozen"}, **RECOMPUTE[recompute])
    before = [router.expert_bias.clone() for router in made.routers]
    backward(made, batch_of(made.layout))
    assert all(map(torch.equal, before, (router.expert_bias for router in made.routers)))


@pytest.mark.parametrize("mode", ["native", "replayed"])
def test_passes_without_gradients_count_nothing(make, mode):
    made = make(4, {"expert_bias": mode})
    micro = batch_of(made.layout)
    run_logprobs(made.model, micro, made.ranks, replay=made.replay, **PASSES)
    run_logprobs(made.model, micro, made.ranks, recorder=made.replay, **PASSES)
    assert not any(router.local_tokens_per_expert.any() for router in made.routers)


def balancing_gradient(made: SimpleNamespace, micro: list[Microbatch], seen: SimpleNamespace, mode: str) -> np.ndarray:
    """Of the only router: the switch load-balancing loss of each microbatch's real rows, averaged over all tokens.

    loss = experts * sum over experts of (share of choices) * (mean normalised score), arXiv 2101.03961.
    """
    (router,) = made.routers
    weight = router.weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for one, hidden in zip(micro, seen.hidden[0], strict=True):
        scores = torch.sigmoid(hidden @ weight.T)
        scores = (scores / scores.sum(dim=1, keepdim=True))[one.real]
        native = best(scores_of(router, hidden).detach().numpy() + np.linspace(-0.2, 0.2, EXPERTS))
        chosen = best(scores.detach().numpy()) if mode == "native" else used_of(one, 0, native)[one.real]
        share = torch.from_numpy(np.bincount(chosen.ravel(), minlength=EXPERTS) / chosen.size)
        total = total + COEFFICIENT * EXPERTS * (share * scores.mean(dim=0)).sum() * one.real.sum()
    (total / sum(one.real.sum() for one in micro)).backward()
    return weight.grad.numpy()


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("mode", ["native", "replayed"])
def test_a_balancing_loss_sees_the_experts_it_should(make, mode, kind, recompute, holes):
    options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT}
    made = make(2, {"aux_loss": mode}, **options, **RECOMPUTE[recompute])
    micro = batch_of(made.layout, holes=holes)
    seen = backward(made, micro, nothing)
    found = made.routers[0].weight.main_grad.numpy()
    expected, other = (balancing_gradient(made, micro, seen, which) for which in (mode, {"native": "replayed"}.get(mode, "native")))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(expected - other).max() > 1e-2 * np.abs(expected).max(), "the two modes must be told apart"


@pytest.mark.parametrize("mode", ["native", "replayed"])
def test_a_global_balancing_loss_sees_them_too(make, mode):
    options = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
    made = make(2, {"aux_loss": mode}, **options)
    micro = batch_of(made.layout, count=1)
    seen = backward(made, micro, nothing)
    expected = balancing_gradient(made, micro, seen, mode)
    np.testing.assert_allclose(made.routers[0].weight.main_grad.numpy(), expected, atol=1e-4 * np.abs(expected).max())


def test_without_a_balancing_loss_there_is_no_gradient_from_it(make):
    made = make(2, {})
    backward(made, batch_of(made.layout), nothing)
    assert not made.routers[0].weight.main_grad.any()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("mode", ["native", "replayed"])
def test_a_microbatch_of_padding_balances_nothing(make, mode, kind):
    """Ranks with fewer sequences than others fill up with such microbatches."""
    options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT}
    made = make(2, {"aux_loss": mode}, **options)
    full, empty = batch_of(made.layout, count=2)
    backward(made, [full], nothing)
    alone = made.routers[0].weight.main_grad.clone()
    made.routers[0].reset_global_aux_loss_tracker()
    backward(made, [full, replace(empty, real=np.zeros(16, bool), loss_mask=np.zeros(16, np.float32))], nothing)
    torch.testing.assert_close(made.routers[0].weight.main_grad, alone)
