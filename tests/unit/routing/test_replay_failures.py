"""One test for each way in which replay is known to go wrong: what must happen instead. Real Megatron routers where they matter."""

import gc
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moerl.config.schema import Config, Replay
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ReplayError, RolloutError, TraceError, TrainError
from moerl.rollout.check import decode_routes, to_trace
from moerl.rollout.client import EngineClient
from moerl.rollout.sample import Group, Sample
from moerl.routing import chooser
from moerl.routing import replay as replay_module
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.replay import RouteReplay, Routes, routers
from moerl.routing.shard import Place
from moerl.routing.trace import Trace, join
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch, Sequence, cut, equalise, pack
from moerl.train.samples import sequences
from tests.passes import local_rows, run_backward, run_logprobs
from tests.unit.rollout.fakes import encode, fake_engine, make_reply, make_routes, run
from tests.unit.routing.routes import random_ids, random_trace

PASSES = {"temperature": 1.0, "fp32_head": True}
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
SMALL = Layout((1, 2), 8, 2)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """`make(**changes)` writes a tiny model; what it returns can `build(**native)` it and knows its `layout`."""
    sizes = {"hidden": 32, "layers": 4, "experts": 8, "topk": 2, "groups": 4, "group_topk": 2, "expert_width": 16}
    names = itertools.count()

    def make(config_changes=None, **changes):
        folder = tmp_path_factory.mktemp("failures") / str(next(names))
        spec = write_tiny(folder, tiny_config(**(sizes | changes), initializer_range=0.2) | (config_changes or {}), seed=4)

        def settings(**native):
            return Config(model={"path": str(folder)}, train={"dtype": "float32", "device": "cpu"}, megatron=native)

        def build(*, trainable=True, **native):
            model = megatron.build_model(spec, settings(**native), ranks, trainable=trainable)
            weights.load_hf(model, spec, folder, ranks)
            return model

        return SimpleNamespace(spec=spec, settings=settings, build=build, layout=Layout(spec.moe_layers, spec.experts, spec.topk))

    defaults = Config(model={"path": "unused"}, train={"device": "cpu"})
    ranks = megatron.initialise(defaults.parallel, defaults.train, seed=1)
    yield SimpleNamespace(ranks=ranks, make=make, **vars(make()))
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
    tokens, labels = rng.integers(0, 16, (2, 16))
    known = np.arange(16) < real
    routes = random_ids(seed, 16, len(layout.layers), layout.experts, layout.topk)
    return Microbatch(tokens, labels, np.tile(np.arange(8), 2), np.array([0, 8, 16], np.int32), known.astype(np.float32), routes, known)


def sequence(seed: int, length: int, layout: Layout) -> Sequence:
    rng = np.random.default_rng(seed)
    routes = random_ids(seed, length - 1, len(layout.layers), layout.experts, layout.topk)
    return Sequence(rng.integers(0, 16, length), np.ones(length - 1, np.float32), routes, {})


def loss(outputs, rows):
    total = -(outputs.logprobs * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {"loss": total}


def gradient(model) -> torch.Tensor:
    return torch.cat([parameter.main_grad.flatten() for parameter in model[0].parameters()])


@contextmanager
def watched(model) -> Iterator[dict[int, list[np.ndarray]]]:
    """Layer of the decoder -> the experts int[n, k], ascending, that its router returned in each call."""
    used, handles = defaultdict(list), []

    def hook(layer):
        return lambda module, args, output: used[layer].append(output[1].nonzero()[:, 1].reshape(len(output[1]), -1).numpy())

    for layer in megatron.unwrap(model[0]).decoder.layers:
        handles += [router.register_forward_hook(hook(layer.layer_number - 1)) for router in routers(layer)]
    yield used
    for handle in handles:
        handle.remove()


def group(*samples: tuple[list[int], list[int], bytes]) -> Group:
    """Of (prompt, response, trace record)."""
    made = [
        Sample(0, i, prompt, response, np.full(len(response), -1, "<f4").tobytes(), trace, [(0, 0, len(response))], "x", "stop")
        for i, (prompt, response, trace) in enumerate(samples)
    ]
    return Group(0, "x", made)


def trained(*groups: Group) -> list[Sequence]:
    return sequences(groups, SMALL, lambda rewards: rewards, Replay(missing="error"))[0]


def record_of(tokens: list[int], seed: int = 0) -> bytes:
    inputs = np.array(tokens[:-1])
    return Trace.of(random_ids(seed, len(inputs), 2, 8, 2), SMALL, inputs, (VersionRun(0, 0, len(inputs)),)).to_bytes()


@pytest.mark.parametrize("dense", [0, 1, 2])
def test_dense_first_layers_shift_nothing(setup, dense):
    """Each MoE layer uses the routes that carry its own number, however many dense layers come before it."""
    made = setup.make({"first_k_dense_replace": dense})
    model = made.build()
    replay, one = RouteReplay(model, made.layout), microbatch(made.layout, 0)
    with watched(model) as used:
        run_logprobs(model, [one], setup.ranks, replay=replay, **PASSES)
    assert list(used) == list(range(dense, 4))
    for position, layer in enumerate(made.layout.layers):
        (experts,) = used[layer]
        np.testing.assert_array_equal(experts, np.sort(one.routes[:, position], axis=-1), err_msg=f"layer {layer}")


def test_a_rebuilt_model_leaves_nothing_behind(setup):
    """Without Megatron's gradient wrapper, whose own hooks keep any trainable model alive."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    before = list(RouterReplay.global_router_replay_instances)
    model, one = setup.build(trainable=False), microbatch(setup.layout, 0)
    replay = RouteReplay(model, setup.layout)
    run_logprobs(model, [one], setup.ranks, replay=replay, **PASSES)
    run_logprobs(model, [one], setup.ranks, recorder=replay, **PASSES)
    left = [weakref.ref(part) for router in routers(model[0]) for part in (router, router.router_replay)]
    assert RouterReplay.global_router_replay_instances == before
    del model, replay
    gc.collect()
    assert [ref() for ref in left] == [None] * 6


def test_a_model_that_could_not_be_built_leaves_no_routers():
    from megatron.core.transformer.moe.router_replay import RouterReplay

    before = list(RouterReplay.global_router_replay_instances)
    with pytest.raises(ValueError, match="refused"), megatron.no_global_routers():
        RouterReplay()
        raise ValueError("refused")
    assert RouterReplay.global_router_replay_instances == before


def test_megatrons_global_list_has_no_say(setup, model, replay):
    """Its order is that of construction, and other models' routers are in it: replay goes by the model's layers alone."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    strangers = [RouterReplay() for _ in range(2)]
    try:
        RouterReplay.global_router_replay_instances[:0] = [router.router_replay for router in reversed(routers(model[0]))]
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        run_logprobs(model, [microbatch(setup.layout, 0)], setup.ranks, replay=replay, **PASSES)
    finally:
        RouterReplay.global_router_replay_instances[:] = []
    assert (replay.agreement.agreeing, replay.agreement.total) == (36, 36)
    assert all(one.router_replay_action is RouterReplayAction.REPLAY_FORWARD for one in strangers), "not ours to change"


def test_a_stage_without_moe_layers_is_normal(setup, model):
    """It has nothing to force and nothing to say, but raises nothing either, so that no other rank waits for it."""
    stage = [megatron.unwrap(model[0]).decoder.layers[0]]
    replay, one = RouteReplay(stage, setup.layout), microbatch(setup.layout, 0)
    assert replay.moe_indices == ()
    (rows,) = local_rows([one], setup.ranks, replay)
    assert rows.routes.ids.shape == (16, 0, 2)
    with replay.forced([rows.routes]):
        pass
    assert (replay.agreement.agreeing, replay.agreement.total) == (0, 0)
    with replay.recorded([rows.real]) as own:
        pass
    assert (own.ids(0).shape, own.ids(0).dtype) == ((16, 0, 2), torch.uint8)
    assert [one.ids.shape for one in own.routes()] == [(16, 0, 2)]


def test_mtp_layers_choose_by_themselves(setup):
    """Their layer numbers start again at 1, and the engine records nothing for them."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moerl.train.layers import block_spec

    made = setup.make({"first_k_dense_replace": 0})
    settings = megatron.transformer_config(made.spec, made.settings(mtp_num_layers=1), setup.ranks)
    block = block_spec(settings, None)
    with megatron.no_global_routers():
        model = GPTModel(
            config=settings,
            transformer_layer_spec=block,
            mtp_block_spec=get_gpt_mtp_block_spec(settings, block, use_transformer_engine=False),
            vocab_size=made.spec.vocab_size,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
    model.moerl_vocab_size = made.spec.vocab_size
    (ahead,) = routers(model.mtp)
    replay, one = RouteReplay([model], made.layout), microbatch(made.layout, 0)
    assert ahead.layer_number == 1
    assert replay.moe_indices == (0, 1, 2, 3)
    own, forced = ahead.router_replay, []
    ahead.register_forward_hook(lambda module, args, output: forced.append((module.router_replay, output[1])))
    run_logprobs([model], [one], setup.ranks, replay=replay, **PASSES)
    ((asked, used),) = forced
    assert asked is own
    assert not used.gather(1, torch.from_numpy(one.routes[:, 0]).long()).all(), "routes of the decoder's first layer"
    assert (replay.agreement.agreeing, replay.agreement.total) == (4 * 12, 4 * 12)


def test_the_last_token_has_no_row():
    """A sequence of n tokens has n - 1 rows; a dummy row for the last one, or at a turn's end, is refused by name."""
    tokens = [1, 5, 6, 7, 2]
    (one,) = trained(group((tokens[:3], tokens[3:], record_of(tokens))))
    assert one.routes.shape == (4, 2, 2)
    dummy = encode(np.concatenate([random_ids(0, 4, 3, 8, 2), random_ids(1, 1, 3, 8, 2)]))
    with pytest.raises(RolloutError, match="got 5 rows: 1 too many; the last sampled token was never an input .* is a dummy row kept"):
        decode_routes({"routed_experts": dummy}, rows=4, layout=Layout((0, 1, 2), 8, 2), layers=3)
    with pytest.raises(TraceError, match="a trace of 5 rows belongs to 6 tokens, got 5"):
        trained(group((tokens[:3], tokens[3:], record_of([*tokens, 9]))))


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_packed_sequences_keep_their_routes_under_cp_zigzag(cp, tp):
    """Tokens and routes that encode (sequence, position) arrive side by side on every rank, in equal numbers."""
    items, layout = [], Layout((0,), 10_000, 1)
    for number, length in enumerate([9, 30, 4, 17]):
        marks = 100 * number + np.arange(length)
        items.append(Sequence(marks, np.ones(length - 1, np.float32), marks[:-1, None, None].astype(np.uint16), {}))
    multiple = Place((0, cp), (0, tp), (0,)).multiple
    (micro,) = pack(items, tokens_per_microbatch=200, dp=1, multiple=multiple, layout=layout)[0]
    seen = []
    for c, t in itertools.product(range(cp), range(tp)):
        part = cut(micro, Place((c, cp), (t, tp), (0,)))
        tokens = part.tokens.reshape(tp, -1)[t]
        assert part.routes.shape == (len(tokens), 1, 1)
        np.testing.assert_array_equal(part.routes[part.router_real, 0, 0], tokens[part.router_real])
        seen += tokens[part.router_real].tolist()
    assert sorted(seen) == sorted(token for item in items for token in item.tokens[:-1].tolist())


def test_padding_rows_are_spread_over_distinct_experts(setup, model, replay):
    """In the map that the dispatcher gets, every padding row has top-k experts, and no expert gets all of them."""
    micro = pack(
        [sequence(0, 6, setup.layout), sequence(1, 11, setup.layout)], tokens_per_microbatch=64, dp=1, multiple=16, layout=setup.layout
    )[0]
    micro = equalise([*micro, microbatch(setup.layout, 5)], 16, setup.layout)
    with watched(model) as used:
        run_logprobs(model, micro, setup.ranks, replay=replay, **PASSES)
    for calls in used.values():
        for experts, one in zip(calls, micro, strict=True):
            assert experts.shape == (32, 2)
            padding = np.bincount(experts[~one.real].ravel(), minlength=8)
            assert padding.max() <= 2 * padding.sum() / 8
            assert padding.min() > 0


def test_other_numbers_of_rows_are_named(setup, model, replay):
    one = microbatch(setup.layout, 0)
    (rows,) = local_rows([one], setup.ranks, replay)
    short = Routes(rows.routes.ids[:-1], rows.real[:-1])
    with pytest.raises(ReplayError, match="microbatch 0, layer 1: the router sees 16 rows, its routes have 15"), replay.forced([short]):
        run_logprobs(model, [one], setup.ranks, **PASSES)


def test_duplicates_that_reach_a_router_end_the_pass(setup):
    """They collapse in the routing map, and the row would run on fewer experts than were recorded."""
    model, one = setup.build(moe_token_dispatcher_type="allgather"), microbatch(setup.layout, 0)
    replay = RouteReplay(model, setup.layout)
    one.routes[3, 1] = one.routes[3, 1, 0]
    with pytest.raises(ReplayError, match="microbatch 0, layer 2: 1 of 12 rows used other experts$"):
        run_logprobs(model, [one], setup.ranks, replay=replay, **PASSES)


def test_routes_that_never_arrived_are_an_error():
    with pytest.raises(RolloutError, match="the engine returned no routes; start it with enable_return_routed_experts"):
        decode_routes({"finish_reason": {"type": "stop"}}, rows=4, layout=SMALL, layers=3)
    with pytest.raises(TrainError, match="sample 0 of prompt 0 carries no routes"):
        trained(group(([1, 5], [6, 2], b"")))


def test_routes_that_are_all_zero_are_an_error(setup):
    with pytest.raises(RolloutError, match="all 4 rows of all layers are zero: the engine recorded nothing"):
        decode_routes({"routed_experts": encode(np.zeros((4, 3, 2), int))}, rows=4, layout=SMALL, layers=3)
    model, one = setup.build(moe_token_dispatcher_type="allgather"), microbatch(setup.layout, 0)
    replay = RouteReplay(model, setup.layout)
    with pytest.raises(ReplayError, match="microbatch 0, layer 1: 12 of 12 rows used other experts"):
        run_logprobs(model, [replace(one, routes=np.zeros_like(one.routes))], setup.ranks, replay=replay, **PASSES)


def test_stale_rows_of_another_request_are_refused():
    """Two samples of a prompt are equally long and their routes equally plausible: only the tokens tell them apart."""
    prompt, first, second = [1, 5, 6], [7, 8, 2], [7, 9, 2]
    good = [(prompt, first, record_of(prompt + first)), (prompt, second, record_of(prompt + second, 1))]
    assert len(trained(group(*good))) == 2
    with pytest.raises(TraceError, match="belongs to other tokens"):
        trained(group((prompt, first, good[1][2]), (prompt, second, good[0][2])))
    moved = [6, 1, 5]
    with pytest.raises(TraceError, match="belongs to other tokens"):
        trained(group((prompt, first, record_of(moved + first))))


def test_a_resumed_request_brings_no_row_twice():
    """What is resumed from row 6 on joins; what starts again at row 0, with newer weights, would replace rows whose logprobs stay."""
    trace, inputs = random_trace(0, 6, SMALL)
    trace = replace(trace, versions=(VersionRun(3, 0, 6),))
    delta = Trace.of(random_ids(1, 3, 2, 8, 2), SMALL, np.array([7, 8, 9]), (VersionRun(4, 0, 3),), start=6)
    joined = trace.append(delta)
    assert joined.versions == (VersionRun(3, 0, 6), VersionRun(4, 6, 9))
    joined.check_tokens(np.array([*inputs, 7, 8, 9, 2]))
    again = Trace.of(random_ids(1, 9, 2, 8, 2), SMALL, np.array([*inputs, 7, 8, 9]), (VersionRun(4, 0, 9),))
    with pytest.raises(TraceError, match=r"6 rows would come twice. Keep the old ones.*rows from 6 on \(routed_experts_start_len\)"):
        trace.append(again)


def test_expert_256_never_wraps(setup):
    """Neither in the reply nor on the way into the router."""
    layout = Layout((0,), 256, 2)
    with pytest.raises(RolloutError, match=r"expert ids must lie in 0..255, got 1..256"):
        decode_routes({"routed_experts": encode(np.array([[[256, 1]]]))}, rows=1, layout=layout, layers=1)
    made = setup.make(experts=264, groups=8)
    model = made.build()
    replay, one = RouteReplay(model, made.layout), microbatch(made.layout, 0)
    one.routes[:] = np.arange(256, 264)[np.arange(16)[:, None, None] % 4 * 2 + np.arange(2)]
    for router in routers(model[0]):
        router.expert_bias[256:] += 1.0
    with watched(model) as used:
        run_logprobs(model, [one], setup.ranks, replay=replay, **PASSES)
        ((_, recorded),) = run_logprobs(model, [one], setup.ranks, recorder=replay, **PASSES)
    for position, (forced, own) in enumerate(used.values()):
        np.testing.assert_array_equal(forced, one.routes[:, position])
        np.testing.assert_array_equal(own, np.sort(recorded[:, position], axis=-1))
    assert recorded.min() > 255


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_token_dispatcher_type", "flex"),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("moe_enable_routing_replay", False),
    ],
)
def test_a_fused_router_or_another_defeating_option_is_refused(setup, model, monkeypatch, option, value):
    """As the finished model has it, wherever it was set."""
    monkeypatch.setattr(routers(model[0])[-1].config, option, value)
    with pytest.raises(ReplayError, match=rf"ignore or bend the recorded routes:\n  - megatron.{option} must"):
        RouteReplay(model, setup.layout)


def test_experts_dropped_after_replay_are_noticed_without_any_guard(setup, monkeypatch):
    """The map that a router really returned is compared, so that options of other Megatron versions are caught as well."""
    monkeypatch.setattr(replay_module, "replay_problems", lambda options: [])
    model = setup.build(moe_expert_capacity_factor=0.5)
    with pytest.raises(ReplayError, match=r"layer 1: \d+ of 16 rows used other experts"):
        run_logprobs(model, [microbatch(setup.layout, 0, 16)], setup.ranks, replay=RouteReplay(model, setup.layout), **PASSES)


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_of_near_ties_keeps_the_layout(setup, model, replay, monkeypatch, kind):
    """The routers' own choice changes between forward and recomputation; what is replayed doesn't, and is used once in each."""
    again, batch, uses = setup.build(**RECOMPUTE[kind]), [microbatch(setup.layout, seed) for seed in range(3)], Counter()
    after_router = chooser.Chooser.after_router

    def counting(self, *args):
        uses[self.layer, chooser.in_backward()] += 1
        after_router(self, *args)

    def shaken(outputs, rows):
        for router in routers(again[0]):
            router.expert_bias.uniform_(-1, 1)
        return loss(outputs, rows)

    run_backward(model, batch, setup.ranks, loss_fn=loss, replay=replay, **PASSES)
    second = RouteReplay(again, setup.layout)
    before = run_logprobs(again, batch, setup.ranks, recorder=second, **PASSES)
    monkeypatch.setattr(chooser.Chooser, "after_router", counting)
    run_backward(again, batch, setup.ranks, loss_fn=shaken, replay=second, **PASSES)
    assert uses == {(layer, backward): 3 for layer in (1, 2, 3) for backward in (False, True)}
    after = run_logprobs(again, batch, setup.ranks, recorder=second, **PASSES)
    assert not any(np.array_equal(np.sort(a), np.sort(b)) for (_, a), (_, b) in zip(before, after, strict=True))
    assert torch.isfinite(gradient(again)).all()
    assert torch.equal(gradient(again), gradient(model))


def test_replay_never_leaks_into_other_passes(setup, model, replay):
    """A pass afterwards, and one of another model with its own replay meanwhile, see nothing of it."""
    reference, (one, other) = setup.build(), (microbatch(setup.layout, seed) for seed in range(2))
    theirs = RouteReplay(reference, setup.layout)
    natural = run_logprobs(model, [one], setup.ranks, **PASSES)[0][0]
    expected = run_logprobs(reference, [replace(one, routes=other.routes)], setup.ranks, replay=theirs, **PASSES)[0][0]
    with replay.forced([rows.routes for rows in local_rows([one], setup.ranks, replay)]):
        during = run_logprobs(reference, [replace(one, routes=other.routes)], setup.ranks, replay=theirs, **PASSES)[0][0]
        alone = run_logprobs(reference, [one], setup.ranks, **PASSES)[0][0]
        forced = run_logprobs(model, [one], setup.ranks, **PASSES)[0][0]
    assert np.array_equal(during, expected)
    assert np.array_equal(alone, natural)
    assert not np.array_equal(forced, natural)
    assert np.array_equal(run_logprobs(model, [one], setup.ranks, **PASSES)[0][0], natural)


def test_records_of_turns_grow_with_their_tokens():
    """And not with their square, as they would if every turn's record held all rows so far."""
    whole, inputs = random_trace(0, 500, Layout(tuple(range(48)), 128, 8))
    deltas = [whole.slice(first, first + 50, inputs).to_bytes() for first in range(0, 500, 50)]
    assert sum(map(len, deltas)) < 1.05 * len(whole.to_bytes())
    np.testing.assert_array_equal(join([Trace.from_bytes(delta) for delta in deltas]).ids, whole.ids)


@pytest.mark.parametrize("honest", [True, False])
def test_a_turn_sends_only_its_delta(honest):
    """An engine that ignores the row that was asked for, and sends the earlier turns' rows again, is caught."""
    sent, start, answer = [1, 5, 6, 7, 2, 9, 3], 4, [8, 2]
    ids = make_routes(len(sent) + len(answer) - 1)

    async def generate(body):
        (reply,) = [make_reply(sent, answer, rid=rid) for rid in body["rid"]]
        reply["meta_info"]["routed_experts"] = encode(ids[body["routed_experts_start_len"] if honest else 0 :])
        return [reply]

    async def turn():
        async with fake_engine() as engine, EngineClient(engine.url, 5.0, 10.0) as client:
            engine.handlers["/generate"] = generate
            return await client.generate(sent, rid="x", max_new_tokens=2, temperature=1.0, routes=True, routes_from=start)

    reply = run(turn())
    if honest:
        delta = to_trace(reply, sent, SMALL, layers=3, start=start)
        assert (delta.start, delta.rows) == (start, 4)
        np.testing.assert_array_equal(delta.ids, ids[start:, 1:])
    else:
        with pytest.raises(RolloutError, match="got 8 rows: 4 too many; is routed_experts_start_len ignored"):
            to_trace(reply, sent, SMALL, layers=3, start=start)
