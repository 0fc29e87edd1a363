"""Whose experts each pass of a step uses, under every setting of `[replay]`: seen at the routers of a real model, in one process."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moerl.config.rules import rule_problems
from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ReplayError, TrainError
from moerl.routing.replay import routers
from moerl.train import megatron, trainer
from moerl.train.batch import Part, Sequence, cut, pack
from moerl.train.forward import compute_logprobs, localise
from tests.unit.routing.routes import random_ids

LAYERS = (1, 2, 3)
"""MoE layers of the model, 0-based."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    config = tiny_config(hidden=32, layers=4, experts=8, topk=2, groups=4, group_topk=2, expert_width=16, initializer_range=0.2)
    spec = write_tiny(folder, config, seed=4)

    def build(replay=None, *, epochs=1, every=0, kl=0.0, lr=1e-2, **native):
        """A trainer and its config: `epochs` updates per batch, a mismatch pass `every` n steps, weight `kl` of the reference."""
        config = Config(
            model={"path": str(folder)},
            train={"dtype": "float32", "device": "cpu", "lr": lr},
            replay=replay or {},
            objective={"epochs_per_batch": epochs, "kl_coef": kl},
            diagnostics={"mismatch_every_steps": every},
            megatron=native,
        )
        return trainer.build(config, spec, ranks)

    defaults = Config(model={"path": str(folder)}, train={"device": "cpu"})
    ranks = megatron.initialise(defaults.parallel, defaults.train, seed=1)
    yield SimpleNamespace(build=build, ranks=ranks, spec=spec)
    megatron.shutdown()


def parts_of(built: trainer.Trainer, *, recorded: float = 1.0, engine: list[np.ndarray] | None = None) -> list[Part]:
    """Two microbatches of sequences with random routes of an engine, of which a share of rows was `recorded`."""
    rng, items = np.random.default_rng(0), []
    for number, length in enumerate([9, 14, 6, 11]):
        mask = np.ones(length - 1, np.float32)
        known = None if recorded == 1.0 else rng.random(length - 1) < recorded
        columns = {"advantages": mask * (-1) ** number, "engine_logprobs": -2 * mask}
        items.append(Sequence(rng.integers(3, 16, length), mask, random_ids(number, length - 1, 3, 8, 2), columns, known))
    micro = pack(items, tokens_per_microbatch=24, dp=1, multiple=4, layout=built.layout)[0]
    if engine is not None:
        micro = [replace(one, columns={**one.columns, "engine_logprobs": found}) for one, found in zip(micro, engine, strict=True)]
    return [cut(one, built.place) for one in micro]


class Seen:
    """What happened in a step.

    Attributes:
        used: (phase, model, layer) -> int[n, k], ascending, experts that the router returned, one array per call.
        native: the same for what it would have chosen on the same hidden states.
        losses: (logprobs float32[n], columns) of each microbatch of each update.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.used: dict[tuple[str, str, int], list[np.ndarray]] = defaultdict(list)
        self.native: dict[tuple[str, str, int], list[np.ndarray]] = defaultdict(list)
        self.losses: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        self.metrics: dict[str, float] = {}

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.phase = name
        yield

    def note(self, model: str, layer: int, router: torch.nn.Module, hidden: torch.Tensor, routing_map: torch.Tensor) -> None:
        key = (self.phase, model, layer)
        self.used[key].append(experts(routing_map))
        self.native[key].append(experts(own_choice(router, hidden)))

    def phases(self) -> set[str]:
        return {phase for phase, _, _ in self.used}


def experts(routing_map: torch.Tensor) -> np.ndarray:
    return routing_map.nonzero()[:, 1].reshape(len(routing_map), -1).numpy()


@torch.no_grad()
def own_choice(router: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's rule: the groups with the best two experts are open, and the best experts of those are chosen."""
    config = router.config
    scores = router.gating(hidden).view(-1, config.num_moe_experts).float().sigmoid() + router.expert_bias
    grouped = scores.unflatten(1, (config.moe_router_num_groups, -1))
    open_groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(config.moe_router_group_topk, dim=-1)[1]
    shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, open_groups, False)
    chosen = grouped.masked_fill(shut[..., None], -torch.inf).flatten(1).topk(router.topk, dim=-1)[1]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def step(built: trainer.Trainer, parts: list[Part], monkeypatch: pytest.MonkeyPatch, number: int = 0) -> Seen:
    """One `train_step`, watched from outside."""
    seen, loss, handles = Seen(), trainer.grpo_loss, []

    def watch(name, layer):
        return lambda router, args, output: seen.note(name, layer, router, args[0], output[1])

    def watched_loss(objective, logprobs, entropy, mask, columns):
        seen.losses.append((logprobs.detach().clone(), columns))
        return loss(objective, logprobs, entropy, mask, columns)

    for name, model in {"actor": built.model, "reference": built.reference or []}.items():
        for layer, router in zip(LAYERS, (router for chunk in model for router in routers(chunk)), strict=False):
            handles.append(router.register_forward_hook(watch(name, layer)))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "grpo_loss", watched_loss)
        seen.metrics = trainer.train_step(built, parts, number, seen.named)
    for handle in handles:
        handle.remove()
    return seen


def same(found: list[np.ndarray], wanted: list[np.ndarray], parts: list[Part]) -> bool:
    """Whether the experts of all real rows are equal; `found` may hold several passes over the microbatches."""
    assert len(found) % len(parts) == 0
    assert len(found) > 0
    wanted, kept = (list(arrays) * (len(found) // len(parts)) for arrays in (wanted, [part.router_real for part in parts]))
    return all(np.array_equal(a[real], b[real]) for a, b, real in zip(found, wanted, kept, strict=True))


def engines(parts: list[Part], layer: int) -> list[np.ndarray]:
    return [np.sort(part.routes[:, LAYERS.index(layer)], axis=-1) for part in parts]


def follows_engine(seen: Seen, phase: str, parts: list[Part], model: str = "actor") -> list[bool]:
    return [same(seen.used[phase, model, layer], engines(parts, layer), parts) for layer in LAYERS]


def chooses_itself(seen: Seen, phase: str, parts: list[Part], model: str = "actor") -> list[bool]:
    return [same(seen.used[phase, model, layer], seen.native[phase, model, layer][: len(parts)], parts) for layer in LAYERS]


def logprobs_of(model, built: trainer.Trainer, parts: list[Part], replay=None) -> list[np.ndarray]:
    """Of a pass outside any step: forced onto the engine's routes with `replay`, else by its own."""
    local = localise(parts, built.ranks)
    with trainer._forced(replay, [rows.routes for rows in local]):
        return [found.numpy() for found in compute_logprobs(model, local, built.ranks, **built.passes)]


def chosen_by_itself(built: trainer.Trainer, parts: list[Part]) -> list[list[np.ndarray]]:
    """Per layer and microbatch: what the actor chooses now."""
    local = localise(parts, built.ranks)
    with built.replay.recorded([rows.real for rows in local]) as own:
        compute_logprobs(built.model, local, built.ranks, **built.passes)
    return [[np.sort(own.ids(number)[:, i], axis=-1) for number in range(len(parts))] for i in range(len(LAYERS))]


def test_the_update_follows_the_engine(setup, monkeypatch):
    built = setup.build({"actor": "rollout"}, epochs=2)
    parts = parts_of(built)
    seen = step(built, parts, monkeypatch)
    assert len(parts) == 2
    assert len(seen.used["forward_backward", "actor", 1]) == 4, "2 updates on 2 microbatches"
    assert follows_engine(seen, "forward_backward", parts) == [True] * 3
    assert seen.metrics["replay_agreement"] == 1.0
    assert "kl_replay" in seen.metrics


def test_a_proximal_update_follows_the_pass_for_the_old_logprobs(setup, monkeypatch):
    """Also in the second update, when the router by itself would choose otherwise; the engine's routes are in no one's way."""
    built = setup.build({"actor": "proximal"}, epochs=2)
    parts = parts_of(built)
    seen = step(built, parts, monkeypatch)
    assert chooses_itself(seen, "logprobs", parts) == [True] * 3
    assert not any(follows_engine(seen, "logprobs", parts))
    for layer in LAYERS:
        assert same(seen.used["forward_backward", "actor", layer], seen.used["logprobs", "actor", layer], parts)
    later = [seen.native["forward_backward", "actor", layer][2:] for layer in LAYERS]
    assert not any(same(seen.used["logprobs", "actor", layer], own, parts) for layer, own in zip(LAYERS, later, strict=True))
    assert seen.metrics["replay_agreement"] == 1.0


def test_without_replay_the_update_chooses_by_itself(setup, monkeypatch):
    built = setup.build({"actor": "off"}, epochs=2)
    parts = parts_of(built)
    seen = step(built, parts, monkeypatch)
    assert not any(follows_engine(seen, "forward_backward", parts))
    for key, used in seen.used.items():
        assert all(map(np.array_equal, used, seen.native[key])), key
    assert "replay_agreement" not in seen.metrics
    assert "kl_replay" not in seen.metrics
    assert "kl_trained" in seen.metrics


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("actor", ["rollout", "proximal", "off"])
def test_the_ratio_starts_at_one(setup, monkeypatch, actor, epochs):
    """The old logprobs are those of the first update, which they can only be under the same routing; later ones differ."""
    built = setup.build({"actor": actor}, epochs=epochs)
    parts = parts_of(built)
    seen = step(built, parts, monkeypatch)
    assert len(seen.losses) == epochs * len(parts)
    for number, (logprobs, columns) in enumerate(seen.losses):
        if epochs == 1 and actor != "proximal":
            assert "old_logprobs" not in columns
        elif number < len(parts):
            assert torch.equal(columns["old_logprobs"], logprobs)
        else:
            assert (columns["old_logprobs"] - logprobs).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("replay", "epochs", "routed"),
    [
        ({"actor": "rollout"}, 1, None),
        ({"actor": "rollout"}, 2, "engine"),
        ({"actor": "proximal"}, 1, "own"),
        ({"actor": "off"}, 1, None),
        ({"actor": "off"}, 2, "own"),
        ({"actor": "rollout", "old_logprobs": "off"}, 2, "own"),
    ],
)
def test_the_pass_for_the_old_logprobs(setup, monkeypatch, replay, epochs, routed):
    built = setup.build(replay, epochs=epochs)
    parts = parts_of(built)
    seen = step(built, parts, monkeypatch)
    assert ("logprobs" in seen.phases()) == (routed is not None)
    if routed:
        assert follows_engine(seen, "logprobs", parts) == [routed == "engine"] * 3
        assert chooses_itself(seen, "logprobs", parts) == [routed == "own"] * 3


@pytest.mark.parametrize(
    ("actor", "mode"),
    [
        ("rollout", "off"),
        ("rollout", "rollout"),
        ("proximal", "off"),
        ("proximal", "proximal"),
        ("proximal", "rollout"),
        ("off", "rollout"),
    ],
)
def test_the_reference_sees_the_routes_it_should(setup, monkeypatch, actor, mode):
    """After an update, so that actor and reference have different weights and routers."""
    built = setup.build({"actor": actor, "reference": mode}, kl=0.1)
    parts = parts_of(built)
    step(built, parts, monkeypatch)
    chosen = chosen_by_itself(built, parts)
    seen = step(built, parts, monkeypatch, 1)
    natural = logprobs_of(built.reference, built, parts)
    if mode == "off":
        assert chooses_itself(seen, "logprobs", parts, "reference") == [True] * 3
    elif mode == "rollout":
        assert follows_engine(seen, "logprobs", parts, "reference") == [True] * 3
        natural = logprobs_of(built.reference, built, parts, built.reference_replay)
    else:
        for layer, own in zip(LAYERS, chosen, strict=True):
            assert same(seen.used["logprobs", "reference", layer], own, parts)
            assert not same(seen.native["logprobs", "reference", layer], own, parts)
    if mode != "proximal":
        assert [np.array_equal(columns["reference_logprobs"], one) for (_, columns), one in zip(seen.losses, natural, strict=True)] == [
            True
        ] * 2
    assert follows_engine(seen, "forward_backward", parts) == [actor == "rollout"] * 3
    assert seen.metrics["reference_kl"] > 0


def test_evaluation_without_replay_measures_the_gap_that_replay_closes(setup, monkeypatch):
    built = setup.build({"evaluation": "off"}, every=1)
    engine = logprobs_of(built.model, built, parts_of(built), built.replay)
    parts = parts_of(built, engine=engine)
    seen = step(built, parts, monkeypatch)
    assert chooses_itself(seen, "natural", parts) == [True] * 3
    differ = [
        (own != routes).any(axis=-1)[part.router_real].mean()
        for layer in LAYERS
        for own, routes, part in zip(seen.used["natural", "actor", layer], engines(parts, layer), parts, strict=True)
    ]
    rows = [part.router_real.sum() for part in parts] * 3
    assert seen.metrics["natural_flip_share"] == pytest.approx(np.average(differ, weights=rows))
    assert seen.metrics["kl_natural"] > 1e-3
    assert seen.metrics["kl_replay"] == pytest.approx(0, abs=1e-9)
    assert not any(name.endswith("_forced") for name in seen.metrics)


def test_evaluation_under_replay_measures_what_is_left(setup, monkeypatch):
    built = setup.build({"evaluation": "rollout", "actor": "off"}, every=2)
    engine = logprobs_of(built.model, built, parts_of(built), built.replay)
    parts = parts_of(built, engine=engine)
    seen = step(built, parts, monkeypatch)
    assert follows_engine(seen, "natural", parts) == [True] * 3
    assert seen.metrics["kl_forced"] == pytest.approx(0, abs=1e-9)
    assert seen.metrics["kl_trained"] > 1e-3
    assert not any(name.endswith("_natural") or name == "natural_flip_share" for name in seen.metrics)
    assert "natural" not in step(built, parts, monkeypatch, 1).phases()


def test_rows_without_routes_choose_natively_and_the_others_follow(setup, monkeypatch):
    built = setup.build({"missing": "native"}, epochs=2)
    parts = parts_of(built, recorded=0.6)
    seen = step(built, parts, monkeypatch)
    differing = 0
    for layer in LAYERS:
        used, native = (calls["forward_backward", "actor", layer] for calls in (seen.used, seen.native))
        for number, (found, own) in enumerate(zip(used, native, strict=True)):
            part = parts[number % len(parts)]
            follows, chooses = part.router_real & part.forced, part.router_real & ~part.forced
            assert follows.any()
            assert chooses.any()
            assert np.array_equal(found[follows], engines([part], layer)[0][follows])
            assert np.array_equal(found[chooses], own[chooses])
            differing += (found[follows] != own[follows]).any()
    assert differing > 0
    assert seen.metrics["replay_agreement"] == 1.0


def left_on(built: trainer.Trainer) -> list[object]:
    """Whatever a pass may have put on the routers and layers, and their replay objects."""
    modules = [module for model in (built.model, built.reference or []) for chunk in model for module in megatron.unwrap(chunk).modules()]
    hooks = [hook for module in modules for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
    losses = [name for module in modules for name in vars(module) if name.startswith("_apply_")]
    return [*hooks, *losses, *(module.router_replay for module in modules if hasattr(module, "router_replay"))]


@pytest.mark.parametrize("actor", ["rollout", "proximal"])
def test_nothing_is_left_on_the_routers_after_a_step(setup, monkeypatch, actor):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    built = setup.build({"actor": actor, "reference": actor, "aux_loss": "replayed"}, epochs=2, every=1, kl=0.1, **balancing)
    before, parts = left_on(built), parts_of(built)
    assert [type(one) for one in before] == [RouterReplay] * 6
    step(built, parts, monkeypatch)
    assert left_on(built) == before
    weights = [parameter.detach().clone() for parameter in built.model[0].parameters()]
    with pytest.raises(TrainError, match="loss is nan"):
        infinite = [replace(part, columns=part.columns | {"advantages": part.loss_mask * np.float32("nan")}) for part in parts]
        trainer.train_step(built, infinite, 0, Seen().named)
    assert left_on(built) == before
    assert all(map(torch.equal, weights, built.model[0].parameters()))


def test_without_any_replay_megatron_has_all_its_options(setup):
    capacity = {"moe_expert_capacity_factor": 1.0}
    built = setup.build({"actor": "off"}, **capacity)
    assert not built.config.replays
    assert rule_problems(built.config, {}, set()) == []
    assert (built.replay, built.reference_replay) == (None, None)
    assert [router.router_replay for router in routers(built.model[0])] == [None] * 3
    metrics = trainer.train_step(built, parts_of(built), 0, Seen().named)
    assert np.isfinite(metrics["loss"])
    assert "replay_agreement" not in metrics


@pytest.mark.parametrize(("replay", "every"), [({"actor": "rollout"}, 0), ({"actor": "proximal"}, 0), ({"actor": "off"}, 1)])
def test_with_any_replay_a_defeating_option_is_refused_twice(setup, replay, every):
    """Before anything starts, and by the finished model."""
    config = Config(
        model={"path": "unused"}, replay=replay, diagnostics={"mismatch_every_steps": every}, megatron={"moe_expert_capacity_factor": 1.0}
    )
    assert any("moe_expert_capacity_factor must be unset" in problem for problem in rule_problems(config, {}, set()))
    with pytest.raises(ReplayError, match="moe_expert_capacity_factor must be unset"):
        setup.build(replay, every=every, moe_expert_capacity_factor=1.0)


def test_a_pass_that_replays_the_engine_needs_its_routes(setup, monkeypatch):
    parts = [replace(part, routes=None) for part in parts_of(setup.build())]
    with pytest.raises(TrainError, match="microbatch 0 carries no routes, but a pass replays the engine's"):
        trainer.train_step(setup.build({"actor": "rollout"}), parts, 0, Seen().named)
    metrics = step(setup.build({"actor": "proximal"}, every=1), parts, monkeypatch).metrics
    assert metrics["replay_agreement"] == 1.0
    assert "natural_flip_share" not in metrics
    assert "expert_load_max" not in metrics
