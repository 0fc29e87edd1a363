"""Replay in real Megatron routers: exact, differentiable, counted, and gone afterwards."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moerl.config.guards import GUARDS, replay_problems
from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ReplayError
from moerl.routing.chooser import Chooser
from moerl.routing.replay import RouteReplay, routers
from moerl.routing.trace import Layout
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch
from tests.passes import local_rows, run_backward, run_logprobs

PASSES = {"temperature": 1.0, "fp32_head": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    config = tiny_config(hidden=32, layers=4, experts=8, topk=2, groups=4, group_topk=2, expert_width=16, initializer_range=0.2)
    spec = write_tiny(folder, config, seed=4)
    defaults = Config(model={"path": str(folder)}, train={"device": "cpu"})
    ranks = megatron.initialise(defaults.parallel, defaults.train, seed=1)

    def build(**native):
        config = Config(model={"path": str(folder)}, train={"dtype": "float32", "device": "cpu"}, megatron=native)
        model = megatron.build_model(spec, config, ranks)
        weights.load_hf(model, spec, folder, ranks)
        return model

    yield SimpleNamespace(spec=spec, ranks=ranks, build=build, layout=Layout(spec.moe_layers, spec.experts, spec.topk))
    megatron.shutdown()


@pytest.fixture
def model(setup):
    return setup.build()


@pytest.fixture
def replay(setup, model):
    return RouteReplay(model, setup.layout)


def microbatch(layout: Layout, seed: int, real: int = 12) -> Microbatch:
    """Two sequences of 8 rows with random routes; rows from `real` on are padding."""
    rng = np.random.default_rng(seed)
    routes = rng.random((16, len(layout.layers), layout.experts)).argsort(-1)[..., : layout.topk].astype(layout.dtype)
    return Microbatch(
        tokens=rng.integers(0, 16, 16),
        labels=rng.integers(0, 16, 16),
        positions=np.tile(np.arange(8), 2),
        cu_seqlens=np.array([0, 8, 16], np.int32),
        loss_mask=(np.arange(16) < real).astype(np.float32),
        routes=routes,
        real=np.arange(16) < real,
    )


def loss(outputs, local):
    total = -(outputs.logprobs * local.loss_mask).sum()
    return total, local.loss_mask.sum(), {"loss": total}


def gradient(model) -> torch.Tensor:
    return torch.cat([parameter.main_grad.flatten() for parameter in model[0].parameters()])


def test_recorded_routes_replay_bit_exactly(setup, model, replay):
    batch = [replace(microbatch(setup.layout, seed), routes=None) for seed in range(2)]
    recorded = run_logprobs(model, batch, setup.ranks, recorder=replay, **PASSES)
    plain = run_logprobs(model, batch, setup.ranks, **PASSES)
    batch = [replace(one, routes=routes.astype(np.uint8)) for one, (_, routes) in zip(batch, recorded, strict=True)]
    forced = run_logprobs(model, batch, setup.ranks, replay=replay, **PASSES)
    for (logprobs, routes), (other, none), (again, _) in zip(recorded, plain, forced, strict=True):
        assert routes.shape == (16, 3, 2)
        assert none is None
        assert np.array_equal(logprobs, other)
        assert np.array_equal(logprobs, again)


def test_order_within_a_row_is_irrelevant(setup, model, replay):
    one = microbatch(setup.layout, 0)
    flipped = replace(one, routes=one.routes[..., ::-1].copy())
    first, second = (run_logprobs(model, [batch], setup.ranks, replay=replay, **PASSES)[0][0] for batch in (one, flipped))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_forced_experts_are_really_used(setup, model, replay):
    batch = [microbatch(setup.layout, seed) for seed in range(3)]
    run_backward(model, batch, setup.ranks, loss_fn=loss, replay=replay, **PASSES)
    assert (replay.agreement.agreeing, replay.agreement.total) == (3 * 12 * 3, 3 * 12 * 3), "3 microbatches, 12 real rows, 3 MoE layers"


def test_agreement_is_measured_and_not_assumed(setup, model, replay, monkeypatch):
    """A router that ignores its routes in one layer ends the pass, by name, before an optimizer could step."""
    asked = Chooser.get_replay_topk

    def ignoring(chooser, scores, topk, groups, group_topk, compute):
        own = compute(scores, topk, groups, group_topk)
        return own if chooser.layer == 2 else asked(chooser, scores, topk, groups, group_topk, compute)

    monkeypatch.setattr(Chooser, "get_replay_topk", ignoring)
    with pytest.raises(ReplayError, match=r"microbatch 0, layer 2: \d+ of 12 rows used other experts$"):
        run_logprobs(model, [microbatch(setup.layout, 0)], setup.ranks, replay=replay, **PASSES)


def test_wrong_alignment_is_loud(setup, model, replay):
    one = replace(microbatch(setup.layout, 0), routes=None)
    natural, routes = run_logprobs(model, [one], setup.ranks, recorder=replay, **PASSES)[0]
    for shifted in (np.roll(routes, 1, axis=0), np.roll(routes, 1, axis=1)):
        wrong = run_logprobs(model, [replace(one, routes=shifted)], setup.ranks, replay=replay, **PASSES)[0][0]
        assert np.abs(wrong - natural).max() > 1e-2


def test_the_router_learns_under_replay(setup, model, replay):
    """Its weight gradient is that of the loss with the experts held fixed: finite differences agree."""
    batch = [microbatch(setup.layout, 3)]
    run_backward(model, batch, setup.ranks, loss_fn=loss, replay=replay, **PASSES)
    tokens = batch[0].loss_mask.sum()
    for router in routers(model[0]):
        place = divmod(int(router.weight.main_grad.abs().argmax()), router.weight.shape[1])
        got, step, means = router.weight.main_grad[place].item(), 1e-2, []
        assert abs(got) > 1e-5
        for shift in (step, -step):
            with torch.no_grad():
                router.weight[place] += shift
            logprobs = run_logprobs(model, batch, setup.ranks, replay=replay, **PASSES)[0][0].astype(np.float64)
            means.append(-(logprobs * batch[0].loss_mask).sum() / tokens)
            with torch.no_grad():
                router.weight[place] -= shift
        assert got == pytest.approx((means[0] - means[1]) / (2 * step), rel=0.02)


def test_replaying_the_natural_choice_gives_the_natural_gradient(setup, model, replay):
    one = replace(microbatch(setup.layout, 1), routes=None)
    run_backward(model, [one], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    natural = gradient(model)
    routes = run_logprobs(model, [one], setup.ranks, recorder=replay, **PASSES)[0][1]
    run_backward(model, [replace(one, routes=routes)], setup.ranks, loss_fn=loss, replay=replay, **PASSES)
    assert torch.equal(gradient(model), natural)


@pytest.mark.parametrize(
    "native", [RECOMPUTE, RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 2}], ids=["uniform", "block"]
)
def test_recomputation_reads_its_own_microbatch(setup, model, replay, native):
    batch = [microbatch(setup.layout, seed) for seed in range(3)]
    run_backward(model, batch, setup.ranks, loss_fn=loss, replay=replay, **PASSES)
    again = setup.build(**native)
    run_backward(again, batch, setup.ranks, loss_fn=loss, replay=RouteReplay(again, setup.layout), **PASSES)
    assert torch.equal(gradient(again), gradient(model))


def test_nothing_is_left_behind(setup, model, replay):
    natural = run_logprobs(model, [microbatch(setup.layout, 0)], setup.ranks, **PASSES)[0][0]
    own = [router.router_replay for router in routers(model[0])]

    def failing(outputs, local):
        raise RuntimeError("loss")

    with pytest.raises(RuntimeError, match="loss"):
        run_backward(model, [microbatch(setup.layout, 0)], setup.ranks, loss_fn=failing, replay=replay, **PASSES)
    assert [router.router_replay for router in routers(model[0])] == own
    for layer in megatron.unwrap(model[0]).decoder.layers:
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in layer.modules())
    for router in routers(model[0]):
        assert router.router_replay.router_replay_action is None
        assert "_apply_aux_loss" not in vars(router)
    assert np.array_equal(run_logprobs(model, [microbatch(setup.layout, 0)], setup.ranks, **PASSES)[0][0], natural)


def test_megatrons_global_list_holds_none_of_our_routers(setup):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    before = list(RouterReplay.global_router_replay_instances)
    for _ in range(2):
        setup.build()
    assert RouterReplay.global_router_replay_instances == before


def test_two_models_do_not_disturb_each_other(setup, model, replay):
    other, one = setup.build(), microbatch(setup.layout, 0)
    natural = run_logprobs(other, [one], setup.ranks, **PASSES)[0][0]
    with replay.forced([rows.routes for rows in local_rows([one], setup.ranks, replay)]):
        during = run_logprobs(other, [one], setup.ranks, **PASSES)[0][0]
        run_logprobs(model, [one], setup.ranks, **PASSES)
    assert np.array_equal(during, natural)


def test_unused_routes_are_an_error(setup, model, replay):
    one = microbatch(setup.layout, 0)
    (rows,) = local_rows([one], setup.ranks, replay)
    with pytest.raises(ReplayError, match=r"microbatch 1, layer 1: 0 forward uses"), replay.forced([rows.routes] * 2):
        run_logprobs(model, [one], setup.ranks, **PASSES)


def test_routes_used_twice_are_an_error(setup, model, replay):
    one = microbatch(setup.layout, 0)
    (rows,) = local_rows([one], setup.ranks, replay)
    with pytest.raises(ReplayError, match=r"microbatch 0, layer 1: 2 forward uses"), replay.forced([rows.routes]):
        for _ in range(2):
            run_logprobs(model, [one], setup.ranks, **PASSES)


def test_nested_passes_are_refused(setup, model, replay):
    real = [torch.ones(16, dtype=torch.bool)]
    with pytest.raises(ReplayError, match="already running"), replay.recorded(real), RouteReplay(model, setup.layout).recorded(real):
        pass


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": (1, 2)}, "layer 3 of the model has a router"),
        ({"experts": 16}, "top-2 of 8 experts"),
        ({"topk": 4}, "top-2 of 8 experts"),
    ],
)
def test_routes_of_another_model_are_refused(setup, model, change, text):
    with pytest.raises(ReplayError, match=text):
        RouteReplay(model, setup.layout._replace(**change))


def test_every_defeating_setting_is_named_at_once(model):
    options = dict(vars(model[0].config))
    assert replay_problems(options) == []
    bad = {
        "moe_enable_routing_replay": False,
        "moe_router_fusion": True,
        "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
        "moe_expert_capacity_factor": 1.0,
        "moe_token_dispatcher_type": "flex",
        "moe_router_force_load_balancing": True,
        "moe_router_force_biased": 0.1,
        "moe_input_jitter_eps": 0.01,
        "cuda_graph_impl": "local",
        "transformer_impl": "inference_optimized",
    }
    assert set(bad) == set(GUARDS)
    assert [problem.split()[0] for problem in replay_problems(options | bad)] == list(GUARDS)


def test_a_defeating_setting_stops_the_run(setup):
    broken = setup.build(moe_expert_capacity_factor=2.0)
    with pytest.raises(ReplayError, match="moe_expert_capacity_factor must be unset"):
        RouteReplay(broken, setup.layout)
