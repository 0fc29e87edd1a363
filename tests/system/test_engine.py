"""A real SGLang server on CPU with a tiny DeepSeek-V3: routes, versions, checksums, and every way it may die."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.config.schema import Engine
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import EngineError, RolloutError
from moerl.models import read_spec
from moerl.rollout import plugin, server
from moerl.rollout.check import decode_routes
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import Sampling, generate_groups
from moerl.rollout.sample import Prompt
from moerl.rollout.server import EngineServer
from moerl.routing.trace import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = [Prompt(id=i, text="", tokens=[3 + i, 13, 4 + i, 14, 5 + i, 15], answer="0") for i in range(5)]
SETTINGS = Engine(device="cpu", dtype="float32", max_running_requests=16, max_total_tokens=8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine-model")
    write_tiny(folder, tiny_config(hidden=64, layers=3, experts=16, topk=4, groups=4, group_topk=2, initializer_range=0.1), seed=3)
    return folder


@pytest.fixture(scope="module")
def layout(folder: Path) -> Layout:
    spec = read_spec(folder)
    return Layout(spec.moe_layers, spec.experts, spec.topk)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    engine = EngineServer(folder, SETTINGS, {}, log_path=tmp_path_factory.mktemp("log") / "engine.log", version=4, seed=1)
    try:
        engine.start()
        engine.wait_healthy()
        yield engine
    finally:
        engine.stop()


def client(engine: EngineServer) -> EngineClient:
    return EngineClient(engine.url, 60, 120)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 180))


_calls = itertools.count()


async def groups_of(clients, layout, **changes):
    """With request ids of its own: an engine may still know those that were just aborted."""
    sampling = Sampling(12, 1.0, True, layout, 3)
    size, tag = changes.pop("group_size", 3), changes.pop("tag", f"group{next(_calls)}")
    return await generate_groups(clients, PROMPTS, replace(sampling, **changes), group_size=size, tag=tag)


def test_decoding_agrees_with_prefilling_the_same_tokens(engine, layout):
    """Logprobs and routes that were recorded while sampling are those of one forward pass over the finished sequence."""

    async def rescored(c, sample):
        body = {
            "input_ids": sample.tokens.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
        }
        reply = await c._post("/generate", body, 60)
        logprobs = [pair[0] for pair in reply["meta_info"]["input_token_logprobs"][len(sample.prompt_tokens) :]]
        return np.array(logprobs), decode_routes(reply["meta_info"], rows=len(sample.tokens), layout=layout, layers=3)[:-1]

    async def go():
        async with client(engine) as c:
            groups = await groups_of([c], layout, version=4)
            await c.flush_cache()
            return [(sample, *await rescored(c, sample)) for group in groups for sample in group.samples]

    compared = run(go())
    assert len(compared) == 15
    assert sum(len(sample.response_tokens) for sample, _, _ in compared) > 60
    for sample, logprobs, routes in compared:
        assert np.abs(sample.logprob_array - logprobs).max() < 1e-5
        assert np.array_equal(np.sort(sample.load_trace().ids, axis=-1), np.sort(routes, axis=-1))
        assert sample.versions == [(4, 0, len(sample.response_tokens))]
    finished = {sample.finish_reason for sample, _, _ in compared}
    assert finished <= {"stop", "length"}
    assert all(sample.response_tokens[-1] == 2 for sample, _, _ in compared if sample.finish_reason == "stop")


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_under_truncation_it_says_what_it_kept_and_logprobs_are_within_that(engine, layout, folder, top_p):
    """What it kept is the likeliest tokens of its own whole distribution, and logprobs are of those renormalised."""
    top_k, temperature, vocab = 8, 0.8, read_spec(folder).vocab_size

    async def rescored(c, sample):
        body = {
            "input_ids": sample.tokens.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": vocab,
        }
        reply = await c._post("/generate", body, 60)
        whole = np.full((len(sample.response_tokens), vocab), -np.inf)
        for row, tops in zip(whole, reply["meta_info"]["input_top_logprobs"][len(sample.prompt_tokens) :], strict=True):
            row[[token for _, token, _ in tops]] = [logprob / temperature for logprob, _, _ in tops]
        return whole - np.log(np.exp(whole).sum(1, keepdims=True))

    async def go():
        async with client(engine) as c:
            options = {"version": 4, "temperature": temperature, "top_p": top_p, "top_k": top_k, "vocab": vocab}
            groups = await groups_of([c], layout, **options)
            await c.flush_cache()
            return [(sample, await rescored(c, sample)) for group in groups for sample in group.samples]

    sizes = []
    for sample, whole in run(go()):
        mask = sample.load_mask()
        assert mask.rows == len(sample.response_tokens)
        for row, (token, logprob) in enumerate(zip(sample.response_tokens, sample.logprob_array, strict=True)):
            kept = mask.ids[mask.offsets[row] : mask.offsets[row + 1]]
            cut_off = np.delete(whole[row], kept)
            assert np.isfinite(whole[row]).all()
            assert whole[row, kept].min() > cut_off.max() - 1e-4
            assert logprob == pytest.approx(whole[row, token] - np.log(np.exp(whole[row, kept]).sum()), abs=1e-4)
            sizes.append(len(kept))
    assert len(sizes) > 60
    assert max(sizes) <= top_k
    assert set(sizes) == {top_k} if top_p == 1 else min(sizes) < top_k


def test_greedy_is_repeatable_and_needs_no_routes(engine, layout):
    async def go():
        async with client(engine) as c:
            return [await groups_of([c], layout, temperature=0.0, routes=False) for _ in range(2)]

    first, second = run(go())
    assert [[s.response_tokens for s in g.samples] for g in first] == [[s.response_tokens for s in g.samples] for g in second]
    assert all(group.samples[0].response_tokens == group.samples[1].response_tokens for group in first)
    assert all(sample.trace == b"" for group in first for sample in group.samples)


def test_checksums_are_those_of_the_checkpoint_and_cover_derived_tensors(engine, folder):
    async def go():
        async with client(engine) as c:
            return await c.checksums()

    (checksums,) = run(go())
    weights = load_file(folder / "model.safetensors")
    assert checksums["model.norm.weight"] == plugin.hash_tensor(weights["model.norm.weight"])
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn."
        kv_b = weights[attention + "kv_b_proj.weight"]
        assert checksums[attention + "kv_b_proj.weight"] == plugin.hash_tensor(kv_b)
        # Absorbed MLA: per head, the first 32 output rows make keys, the other 32 make values.
        keys, values = kv_b.unflatten(0, (4, 64)).split([32, 32], dim=1)
        assert checksums[attention + "w_kc"] == plugin.hash_tensor(keys)
        assert checksums[attention + "w_vc"] == plugin.hash_tensor(values.transpose(1, 2))
    down = torch.stack([weights[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] for expert in range(16)])
    assert checksums["model.layers.1.mlp.experts.w2_weight"] == plugin.hash_tensor(down)


def test_versions_follow_the_trainers_count(engine, layout):
    async def go():
        async with client(engine) as c:
            assert await c.version() == 4
            await c.set_version(5)
            try:
                assert await c.version() == 5
                groups = await groups_of([c], layout, version=5)
                with pytest.raises(RolloutError, match=r"serve weight version 4, but sampled with \[5\]"):
                    await groups_of([c], layout, version=4)
            finally:
                await c.set_version(4)
            return groups

    assert all(sample.versions[0][0] == 5 for group in run(go()) for sample in group.samples)


def test_a_paused_engine_holds_requests_until_it_is_resumed(engine, layout):
    async def go():
        async with client(engine) as c:
            await c.pause("in_place")
            try:
                pending = asyncio.create_task(groups_of([c], layout))
                await asyncio.sleep(1.0)
                held = not pending.done()
            finally:
                await c.resume()
            return held, await pending

    held, groups = run(go())
    assert held
    assert len(groups) == 5


STARTER = """
import sys
from pathlib import Path
from moerl.config.schema import Engine
from moerl.errors import EngineError
from moerl.rollout import server

complete = server.command_line
server.command_line = lambda *a, **k: [x for x in complete(*a, **k) if x != "--enable-return-routed-experts"]
engine = server.EngineServer(sys.argv[1], Engine(device="cpu", dtype="float32"), {}, log_path=Path(sys.argv[2]), seed=1)
engine.start()
try:
    engine.wait_healthy()
    print(engine.process.pid, "healthy", flush=True)
except EngineError as error:
    print(engine.process.pid, error, flush=True)
sys.stdin.read()
"""


def test_without_the_routes_flag_it_is_refused_and_it_dies_with_its_starter(folder, tmp_path):
    arguments = [sys.executable, "-c", STARTER, str(folder), str(tmp_path / "engine.log")]
    env = os.environ | {"PYTHONPATH": str(server.PACKAGE_ROOT)}
    starter = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        group, _, message = starter.stdout.readline().partition(" ")
        assert "runs without --enable-return-routed-experts" in message
        assert len(server._group_members(int(group))) >= 3
    finally:
        starter.kill()
        starter.communicate()
    deadline = time.monotonic() + 10
    while (left := server._group_members(int(group))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_model_that_sglang_cannot_load_shows_its_log(folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[: 2000 if path.suffix == ".safetensors" else None])
    engine = EngineServer(broken, SETTINGS, {}, log_path=tmp_path / "engine.log", seed=1)
    engine.start()
    try:
        with pytest.raises(EngineError, match=r"(exited with code|was killed by)(?s:.)*safetensors"):
            engine.wait_healthy()
    finally:
        engine.stop()


def test_an_engine_that_dies_while_generating_is_reported_at_once(engine, layout):
    """Last in this module: it costs the engine."""
    group = engine.process.pid
    assert len(server._group_members(group)) >= 3

    async def go():
        async with client(engine) as c:
            await c.pause("in_place")  # so that the requests are certainly under way at its death, however quick it is
            pending = asyncio.create_task(groups_of([c], layout))
            await asyncio.sleep(0.5)
            assert not pending.done()
            os.kill(group, signal.SIGKILL)
            with pytest.raises(EngineError, match="the connection broke|cannot connect"):
                await asyncio.wait_for(pending, 30)

    run(go())
    engine.process.wait(5)
    assert not engine.alive()
    message = str(engine.died())
    assert "was killed by SIGKILL" in message
    assert "engine.log" in message
    engine.stop()
    assert server._group_members(group) == []
