"""Groups: order, distribution over engines, and what happens when one request fails."""

import asyncio
import time

import pytest
from aiohttp import web

from moerl.errors import EngineError, RolloutError
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import generate_groups
from moerl.rollout.sample import Prompt
from tests.unit.rollout.fakes import LAYERS, LAYOUT, fake_engine, make_reply, run

PROMPTS = [Prompt(id=100 + i, text="", tokens=[3 + i, 15], answer=str(i)) for i in range(5)]
OPTIONS = {"group_size": 3, "max_new_tokens": 4, "temperature": 1.0, "routes": True, "layout": LAYOUT, "layers": LAYERS, "version": 3}


async def slow_first(body):
    """Early prompts finish last."""
    await asyncio.sleep(0.02 * (8 - body["input_ids"][0][0]))
    return [make_reply(p, [p[0], 2], rid=rid) for p, rid in zip(body["input_ids"], body["rid"], strict=True)]


def test_groups_keep_the_order_of_the_prompts_and_alternate_engines():
    async def go():
        async with fake_engine() as a, fake_engine() as b, EngineClient(a.url, 5, 5) as ca, EngineClient(b.url, 5, 5) as cb:
            a.handlers["/generate"] = b.handlers["/generate"] = slow_first
            return await generate_groups([ca, cb], PROMPTS, **OPTIONS), a.seen, b.seen

    groups, seen_a, seen_b = run(go())
    assert [group.prompt_id for group in groups] == [100, 101, 102, 103, 104]
    assert [group.answer for group in groups] == ["0", "1", "2", "3", "4"]
    assert all([sample.index for sample in group.samples] == [0, 1, 2] for group in groups)
    assert [group.samples[0].response_tokens[0] for group in groups] == [3, 4, 5, 6, 7]
    assert [group.samples[0].engine for group in groups] == [0, 1, 0, 1, 0]
    assert sorted(body["rid"][0] for _, body in seen_a) == ["group.0.0", "group.2.0", "group.4.0"]
    assert sorted(body["rid"] for _, body in seen_b)[0] == ["group.1.0", "group.1.1", "group.1.2"]


def test_a_failing_engine_fails_the_call_and_aborts_the_rest():
    async def go():
        async with fake_engine() as a, fake_engine() as b, EngineClient(a.url, 5, 60) as ca, EngineClient(b.url, 5, 60) as cb:

            async def hang(body):
                await asyncio.sleep(60)

            async def refuse(body):
                return web.json_response({"error": "out of memory"}, status=500)

            a.handlers["/generate"], b.handlers["/generate"] = hang, refuse
            with pytest.raises(EngineError, match="HTTP 500.*out of memory"):
                await generate_groups([ca, cb], PROMPTS, **OPTIONS, tag="train")
            return a.seen

    start = time.monotonic()
    seen_a = run(go())
    assert time.monotonic() - start < 5
    aborted = [body["rid"] for path, body in seen_a if path == "/abort_request"]
    assert sorted(aborted) == [f"train.{position}.{index}" for position in (0, 2, 4) for index in range(3)]


def test_a_dead_engine_is_reported_even_though_it_cannot_abort():
    async def go():
        async with fake_engine() as engine, EngineClient("http://127.0.0.1:9", 5, 5) as dead, EngineClient(engine.url, 5, 60) as alive:
            engine.handlers["/generate"] = lambda body: asyncio.sleep(60)
            await generate_groups([alive, dead], PROMPTS, **OPTIONS)

    with pytest.raises(EngineError, match="cannot connect"):
        run(go())


def test_a_stale_engine_is_refused():
    async def go():
        async with fake_engine("2") as engine, EngineClient(engine.url, 5, 5) as c:
            await generate_groups([c], PROMPTS, **OPTIONS)

    with pytest.raises(RolloutError, match="serve weight version 3"):
        run(go())


def test_no_engine_at_all():
    with pytest.raises(EngineError, match="no engine"):
        run(generate_groups([], PROMPTS, **OPTIONS))
