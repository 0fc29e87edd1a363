"""The exact gate: nothing but right replay closes it.

Both sides compute in float32 with the same weights, except that the engine's correction bias is perturbed by N(0, 0.01): it
chooses other experts for a fifth of the decisions. The trainer alone is then off by a k3 of about 1e-3; forced onto the
recorded routes it must agree to rounding. Controls show that the gate notices wrong routes.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moerl.config.schema import Config
from moerl.convert.tiny import EOS, tiny_config, write_tiny
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import generate_groups
from moerl.rollout.sample import Group, Prompt
from moerl.rollout.server import EngineServer
from moerl.routing.compare import differing, k3
from moerl.routing.trace import Layout
from moerl.train import platform

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trainer's folder, and the engine's with its perturbed bias."""
    root = tmp_path_factory.mktemp("gate")
    trainer, engine = root / "trainer", root / "engine"
    # a wider initialisation than a real model's, so that which experts run matters to the logprobs
    architecture = {**tiny_config(initializer_range=0.1), "torch_dtype": "float32"}
    for folder in (trainer, engine):
        write_tiny(folder, architecture, seed=3)
    weights = load_file(engine / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in weights:
        if name.endswith(BIAS):
            weights[name] = weights[name] + rng.normal(0, 0.01, weights[name].shape).astype(np.float32)
    save_file(weights, engine / "model.safetensors", metadata={"format": "pt"})
    return trainer, engine


@pytest.fixture(scope="module")
def config(folders: tuple[Path, Path]) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folders[0])},
            "train": {"dtype": "float32", "tokens_per_microbatch": 2048},
            "engine": {"dtype": "float32", "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def groups(folders: tuple[Path, Path], config: Config, tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """64 sequences of 12 prompt and 32 sampled tokens, with routes, from the perturbed engine."""
    log = tmp_path_factory.mktemp("gate-logs") / "engine.log"
    server = EngineServer(str(folders[1]), config.engine, {}, port=None, log_path=log, version=0, seed=1)
    rng = np.random.default_rng(5)
    prompts = [Prompt(i, "", rng.integers(EOS + 1, 16, 12).tolist(), "") for i in range(16)]

    async def generate() -> list[Group]:
        async with EngineClient(server.url, 60.0, 120.0) as client:
            layout = Layout(tuple(range(1, 5)), 64, 8)
            return await generate_groups(
                [client], prompts, group_size=4, max_new_tokens=32, temperature=1.0, routes=True, layout=layout, layers=5, version=0
            )

    server.start()
    try:
        server.wait_healthy()
        return asyncio.run(generate())
    finally:
        server.stop()


@pytest.fixture(scope="module")
def gap(config: Config, groups: list[Group]) -> Iterator[Callable[..., tuple[np.ndarray, float]]]:
    """A function: how to change the routes, or None for natural routing -> (logprob gap per token, share of differing sets)."""
    platform.install("cpu")
    from moerl.models import read_spec
    from moerl.train import megatron, trainer
    from moerl.train.batch import pack, sequences
    from moerl.train.forward import compute_logprobs

    spec = read_spec(config.model.path)
    ranks = megatron.initialise(config.parallel, config.train, 1)
    try:
        built = trainer.build(config, spec, ranks)
        items = sequences(groups, built.layout, lambda rewards: rewards)

        def measure(change: Callable[[np.ndarray], np.ndarray] | None) -> tuple[np.ndarray, float]:
            micro = pack(items, tokens_per_microbatch=2048, dp=1, layout=built.layout)[0]
            if change is None:
                answers = compute_logprobs(built.model, micro, ranks, recorder=built.recorder, **built.passes)
                flips = np.concatenate([differing(r[m.real], m.routes[m.real]) for (_, r), m in zip(answers, micro, strict=True)]).mean()
            else:
                for one in micro:
                    starts = one.cu_seqlens[:-1]
                    for start, stop in zip(starts, one.cu_seqlens[1:], strict=True):
                        one.routes[start:stop] = change(one.routes[start:stop])
                answers = compute_logprobs(built.model, micro, ranks, replay=built.recorder, **built.passes)
                flips = 0.0
            pairs = zip(answers, micro, strict=True)
            return np.concatenate([(found - m.columns["engine_logprobs"])[m.loss_mask > 0] for (found, _), m in pairs]), float(flips)

        yield measure
    finally:
        megatron.shutdown()


def test_replay_closes_the_gap_exactly(gap: Callable[..., tuple[np.ndarray, float]]) -> None:
    natural, flips = gap(None)
    replayed, _ = gap(lambda routes: routes)
    assert len(natural) >= 64 * 16
    assert flips > 0.1
    assert k3(natural.astype(np.float64)).mean() > 1e-4
    assert k3(replayed.astype(np.float64)).mean() < 1e-9


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda routes: np.roll(routes, 1, axis=0), id="shifted by one position"),
        pytest.param(lambda routes: np.roll(routes, 1, axis=1), id="off by one layer"),
    ],
)
def test_wrong_routes_are_loud(gap: Callable[..., tuple[np.ndarray, float]], wrong: Callable[[np.ndarray], np.ndarray]) -> None:
    assert k3(gap(wrong)[0].astype(np.float64)).mean() > 1e-3
