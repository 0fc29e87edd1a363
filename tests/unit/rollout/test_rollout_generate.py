"""Groups: order, distribution over engines, and what happens when one request fails."""

import asyncio
import time
from dataclasses import replace

import pytest
from aiohttp import web

from moerl.errors import EngineError, RolloutError
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import Sampling, generate_groups, generate_some
from moerl.rollout.sample import Prompt
from tests.unit.rollout.fakes import LAYERS, LAYOUT, encode, fake_engine, make_reply, make_routes, run

PROMPTS = [Prompt(id=100 + i, text="", tokens=[3 + i, 15], answer=str(i)) for i in range(5)]
SAMPLING = Sampling(4, 1.0, True, LAYOUT, LAYERS, version=3)


async def slow_first(body):
    """Early prompts finish last."""
    await asyncio.sleep(0.02 * (8 - body["input_ids"][0][0]))
    return [make_reply(p, [p[0], 2], rid=rid) for p, rid in zip(body["input_ids"], body["rid"], strict=True)]


def test_groups_keep_the_order_of_the_prompts_and_alternate_engines():
    async def go():
        async with fake_engine() as a, fake_engine() as b, EngineClient(a.url, 5, 5) as ca, EngineClient(b.url, 5, 5) as cb:
            a.handlers["/generate"] = b.handlers["/generate"] = slow_first
            return await generate_groups([ca, cb], PROMPTS, SAMPLING, group_size=3), a.seen, b.seen

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
                await generate_groups([ca, cb], PROMPTS, SAMPLING, group_size=3, tag="train")
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
            await generate_groups([alive, dead], PROMPTS, SAMPLING, group_size=3)

    with pytest.raises(EngineError, match="cannot connect"):
        run(go())


def test_a_stale_engine_is_refused():
    async def go():
        async with fake_engine("2") as engine, EngineClient(engine.url, 5, 5) as c:
            await generate_groups([c], PROMPTS, SAMPLING, group_size=3)

    with pytest.raises(RolloutError, match="serve weight version 3"):
        run(go())


def test_no_engine_at_all():
    with pytest.raises(EngineError, match="no engine"):
        run(generate_groups([], PROMPTS, SAMPLING, group_size=3))


def partial(tokens, response, *, seen, routes=True, versions=None, start=0):
    """What SGLang answers when a request is cut off: the tokens it had, and their rows from `start` on."""
    reply = make_reply(tokens, response)
    meta = reply["meta_info"]
    meta["finish_reason"] = {"type": "abort", "message": "paused"}
    meta["routed_experts"] = encode(make_routes(len(tokens) + len(response) - 1)[start:]) if routes else None
    meta["weight_versions"] = versions or [{"version": "3", "start": 0, "end": len(response)}]
    return reply | {"meta_info": {**meta, "id": seen}}


def interrupted(replies):
    """An engine that answers each request with the next of `replies(body)`."""
    left = list(replies)

    async def handler(body):
        return left.pop(0)(body)

    return handler


def whole(body, response, version="4"):
    """An answer that ends by itself, with only the rows that were asked for."""
    (tokens,), (rid,), start = body["input_ids"], body["rid"], body["routed_experts_start_len"]
    reply = make_reply(tokens, response, version=version, rid=rid)
    reply["meta_info"]["routed_experts"] = encode(make_routes(len(tokens) + len(response) - 1)[start:])
    return [reply]


def one_sample(replies, sampling):
    async def go():
        async with fake_engine() as engine, EngineClient(engine.url, 5, 5) as c:
            engine.handlers["/generate"] = interrupted(replies)
            (group,) = await generate_groups([c], PROMPTS[:1], sampling, group_size=1)
            return group.samples[0], [body for path, body in engine.seen if path == "/generate"]

    return run(go())


ANY = Sampling(6, 1.0, True, LAYOUT, LAYERS, shares=3)


def test_a_completion_that_is_cut_off_is_resumed_and_keeps_what_it_has():
    prompt = PROMPTS[0].tokens
    replies = [
        lambda body: [partial(prompt, [10, 11], seen=body["rid"][0])],
        lambda body: [partial([*prompt, 10, 11], [12], seen=body["rid"][0], start=3, versions=[{"version": "4", "start": 0, "end": 1}])],
        lambda body: whole(body, [13, 2], version="5"),
    ]
    sample, bodies = one_sample(replies, ANY)
    assert sample.response_tokens == [10, 11, 12, 13, 2]
    assert sample.versions == [(3, 0, 2), (4, 2, 3), (5, 3, 5)]
    assert [body["input_ids"][0] for body in bodies] == [prompt, [*prompt, 10, 11], [*prompt, 10, 11, 12]]
    assert [body["routed_experts_start_len"] for body in bodies] == [0, 3, 4]
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [6, 4, 3]
    assert len({body["rid"][0] for body in bodies}) == 3
    trace = sample.load_trace()
    assert trace.rows == len(sample.tokens) - 1
    assert [tuple(run) for run in trace.versions] == [(3, 0, 3), (4, 3, 4), (5, 4, 6)]
    assert len(sample.logprob_array) == 5


def test_a_reply_that_was_cut_off_while_it_waited_is_asked_for_again():
    prompt = PROMPTS[0].tokens
    replies = [
        lambda body: [partial(prompt, [], seen=body["rid"][0], routes=False)],
        lambda body: [partial(prompt, [10, 11], seen=body["rid"][0], routes=False)],
        lambda body: [partial(prompt, [12], seen=body["rid"][0])],
        lambda body: [partial([*prompt, 12], [13], seen=body["rid"][0], routes=False)],
        lambda body: whole(body, [14, 2]),
    ]
    sample, bodies = one_sample(replies, ANY)
    assert sample.response_tokens == [12, 14, 2], "tokens without their routes are not kept"
    assert [body["routed_experts_start_len"] for body in bodies] == [0, 0, 0, 2, 2]
    assert sample.load_trace().rows == 4


def test_what_was_kept_survives_an_interruption():
    prompt = PROMPTS[0].tokens

    def kept(reply, rows):
        reply["meta_info"] |= {"output_token_sampling_mask": rows, "output_token_sampling_logprobs": [-0.5] * len(rows)}
        return [reply]

    replies = [
        lambda body: [partial(prompt, [9, 9], seen=body["rid"][0])],  # waiting requests are answered without their masks
        lambda body: kept(partial(prompt, [10, 11], seen=body["rid"][0]), [[1, 10], [11]]),
        lambda body: kept(whole(body, [12, 2])[0], [[12, 3], [2]]),
    ]
    sample, bodies = one_sample(replies, replace(ANY, top_p=0.9, top_k=8, vocab=16))
    assert sample.response_tokens == [10, 11, 12, 2]
    assert sample.load_mask().ids.tolist() == [1, 10, 11, 3, 12, 2]
    assert sample.load_mask().offsets.tolist() == [0, 2, 3, 5, 6]
    assert all(body["return_sampling_mask"] and body["sampling_params"]["top_k"] == 8 for body in bodies)


def test_a_completion_that_was_cut_off_at_its_limit_has_ended():
    sample, bodies = one_sample([lambda body: [partial(PROMPTS[0].tokens, [10] * 6, seen=body["rid"][0])]], ANY)
    assert sample.finish_reason == "length"
    assert len(bodies) == 1


def test_who_is_cut_off_for_ever_says_so():
    replies = [lambda body: [partial(body["input_ids"][0], [], seen=body["rid"][0], routes=False)]] * 100
    with pytest.raises(EngineError, match="cut off 64 times"):
        one_sample(replies, ANY)


def test_a_retracted_completion_has_no_rows_for_what_was_recomputed():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]

    def spanning(body):
        reply = make_reply(PROMPTS[0].tokens, [10, 11, 12, 2], rid=body["rid"][0])
        reply["meta_info"]["weight_versions"] = spans
        return [reply]

    kept, _ = one_sample([spanning], ANY)
    assert kept.load_trace().valid is None
    dropped, _ = one_sample([spanning], replace(ANY, retracted=True))
    assert dropped.load_trace().valid.tolist() == [False, False, False, True, True]
    assert dropped.response_tokens == kept.response_tokens


def test_over_sampled_completions_are_aborted_when_enough_have_ended():
    async def go():
        async with fake_engine() as engine, EngineClient(engine.url, 5, 5) as c:
            aborted = {}

            async def generate(body):
                (rid,), (tokens,) = body["rid"], body["input_ids"]
                if rid in ("g.1", "g.3"):
                    aborted[rid] = asyncio.Event()
                    await aborted[rid].wait()
                    return [partial(tokens, [10, 11, 12], seen=rid, routes=rid == "g.1")]
                return [make_reply(tokens, [10, 2], rid=rid)]

            async def abort(body):
                aborted[body["rid"]].set()
                return {"success": True}

            engine.handlers |= {"/generate": generate, "/abort_request": abort}
            return await generate_some(c, PROMPTS[0], ANY, indices=range(4), keep=2, rid="g"), engine.paths()

    outcome, paths = run(go())
    assert sorted(sample.index for sample in outcome.samples) == [0, 2]
    assert outcome.cut == {1: 3, 3: 3}, "what was spent on them is known"
    assert outcome.failed == {}
    assert paths.count("/generate") == 4, "what was aborted is not resumed"


def test_a_call_that_is_told_that_it_is_enough_returns_at_once_with_what_it_has():
    """One request carries all three; the first has ended, the others are cut off after 3 tokens and after none."""

    async def go():
        async with fake_engine() as engine, EngineClient(engine.url, 5, 60) as c:
            aborted, enough = [], asyncio.Event()

            async def generate(body):
                while len(aborted) < 3:
                    await asyncio.sleep(0.005)
                tokens, (first, second, third) = body["input_ids"][0], body["rid"]
                cut = partial(tokens, [10, 11, 12], seen=second), partial(tokens, [], seen=third, routes=False)
                return [make_reply(tokens, [10, 2], rid=first), *cut]

            async def abort(body):
                aborted.append(body["rid"])
                return {"success": True}

            engine.handlers |= {"/generate": generate, "/abort_request": abort}
            call = asyncio.create_task(generate_some(c, PROMPTS[0], ANY, indices=range(3), keep=3, rid="g", enough=enough))
            await asyncio.sleep(0.05)
            assert not call.done()
            enough.set()
            return await call, aborted, engine.paths()

    outcome, aborted, paths = run(go())
    assert [sample.index for sample in outcome.samples] == [0]
    assert outcome.cut == {1: 3, 2: 0}
    assert outcome.tokens == 2 + 3
    assert aborted == ["g.0", "g.1", "g.2"]
    assert paths.count("/generate") == 1, "nothing is resumed"


def test_all_completions_of_a_group_travel_in_one_request_if_all_are_kept():
    async def go():
        async with fake_engine() as engine, EngineClient(engine.url, 5, 5) as c:
            return await generate_some(c, PROMPTS[0], ANY, indices=[4, 5, 6], keep=3, rid="g"), engine.seen

    outcome, seen = run(go())
    assert [sample.index for sample in outcome.samples] == [4, 5, 6]
    assert [body["rid"] for _, body in seen] == [["g.4", "g.5", "g.6"]]


def test_a_completion_that_proves_nothing_costs_only_itself():
    async def go():
        async with fake_engine() as engine, EngineClient(engine.url, 5, 5) as c:

            async def generate(body):
                replies = [make_reply(tokens, [10, 2], rid=rid) for tokens, rid in zip(body["input_ids"], body["rid"], strict=True)]
                replies[1]["meta_info"]["routed_experts"] = None
                return replies

            engine.handlers["/generate"] = generate
            return await generate_some(c, PROMPTS[0], ANY, indices=range(3), keep=3, rid="g")

    outcome = run(go())
    assert [sample.index for sample in outcome.samples] == [0, 2]
    assert list(outcome.failed) == [1]
    assert "returned no routes" in outcome.failed[1][0]
    assert outcome.failed[1][1] == 2
