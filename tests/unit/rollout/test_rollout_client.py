"""The client says which engine, which endpoint and why; and sends what SGLang expects."""

import asyncio
import socket
import time

import pytest
from aiohttp import web

from moerl.errors import EngineError
from moerl.rollout.client import EngineClient
from tests.unit.rollout.fakes import fake_engine, make_reply, run


def client(url: str, request_timeout_s: float = 5.0, generate_timeout_s: float = 5.0) -> EngineClient:
    return EngineClient(url, request_timeout_s, generate_timeout_s)


def test_generate_spells_out_the_sampling_distribution():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:
            reply = await c.generate([7, 13], rid="a", max_new_tokens=5, temperature=0.0, routes=True)
            return reply, engine.seen

    reply, [(path, body)] = run(go())
    assert path == "/generate"
    assert reply["meta_info"]["id"] == "a"
    assert body["input_ids"] == [[7, 13]]
    assert body["return_logprob"]
    assert body["return_routed_experts"]
    assert body["routed_experts_start_len"] == 0
    sampling = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body["sampling_params"] == sampling


def test_rows_that_are_known_are_not_asked_for_again():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:
            await c.generate([7, 13, 4], rid="a", max_new_tokens=5, temperature=1.0, routes=True, routes_from=2)
            return engine.seen

    [(_, body)] = run(go())
    assert body["routed_experts_start_len"] == 2


def test_replies_are_matched_to_requests_by_id_not_by_order():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def reversed_replies(body):
                return [make_reply(p, [p[0]], rid=rid) for p, rid in zip(body["input_ids"], body["rid"], strict=True)][::-1]

            engine.handlers["/generate"] = reversed_replies
            return await c.generate_many([[1], [2], [3]], rids=["a", "b", "c"], max_new_tokens=1, temperature=1.0, routes=False)

    assert [reply["output_ids"] for reply in run(go())] == [[1], [2], [3]]


def test_a_missing_reply_is_named():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def wrong(body):
                return [make_reply([1], [2], rid="a"), make_reply([1], [2], rid="a")]

            engine.handlers["/generate"] = wrong
            await c.generate_many([[1], [1]], rids=["a", "b"], max_new_tokens=1, temperature=1.0, routes=False)

    with pytest.raises(EngineError, match="no reply to request b"):
        run(go())


def test_update_endpoints_send_what_sglang_expects():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:
            await c.init_group("127.0.0.1", 29500, 1, 3, "sync", "gloo")
            await c.pause("in_place")
            await c.begin_update()
            await c.receive_bucket(["a", "b"], ["bfloat16"] * 2, [(2, 3), (4,)], "sync", 6, True)
            await c.receive_bucket(["c"], ["float32"], [(1,)], "sync", None, False)
            await c.end_update()
            await c.set_version(6)
            await c.flush_cache()
            await c.resume()
            await c.destroy_group("sync")
            await c.abort_all()
            return engine.seen

    seen = run(go())
    group = {
        "rank_offset": 1,
        "world_size": 3,
        "group_name": "sync",
        "backend": "gloo",
        "master_address": "127.0.0.1",
        "master_port": 29500,
    }
    assert seen[0] == ("/init_weights_update_group", group)
    assert seen[1] == ("/pause_generation", {"mode": "in_place"})
    first, second = seen[3][1], seen[4][1]
    assert first["shapes"] == [[2, 3], [4]]
    assert first["load_format"] == "flattened_bucket"
    assert (first["weight_version"], first["flush_cache"]) == ("6", True)
    assert (second["weight_version"], second["flush_cache"]) == (None, False)
    assert seen[6] == ("/update_weight_version", {"new_version": "6", "abort_all_requests": False})
    assert [path for path, _ in seen[7:]] == ["/flush_cache", "/continue_generation", "/destroy_weights_update_group", "/abort_request"]


def test_checksums_come_in_rank_order():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def ranks(body):
                info = [{"checksums": {"w": str(rank)}, "parallelism_info": [{"tp_rank": rank}]} for rank in (1, 0)]
                return {"success": True, "message": "", "ranks": info}

            engine.handlers["/weights_checker"] = ranks
            return await c.checksums()

    assert run(go()) == [{"w": "0"}, {"w": "1"}]


@pytest.mark.parametrize(("version", "expected"), [("12", 12), ("default", None)])
def test_version_is_a_whole_number(version, expected):
    async def go():
        async with fake_engine(version) as engine, client(engine.url) as c:
            return await c.version()

    if expected is None:
        with pytest.raises(EngineError, match="got 'default'"):
            run(go())
    else:
        assert run(go()) == expected


def test_a_refused_command_shows_status_and_message():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def refuse(body):
                return web.json_response({"success": False, "message": "requests are running"}, status=400)

            engine.handlers["/begin_weight_update"] = refuse
            await c.begin_update()

    with pytest.raises(EngineError, match=r"/begin_weight_update answered HTTP 400.*requests are running"):
        run(go())


def test_a_200_that_says_no_is_an_error():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def refuse(body):
                return {"success": False, "message": "unknown group"}

            engine.handlers["/destroy_weights_update_group"] = refuse
            await c.destroy_group("sync")

    with pytest.raises(EngineError, match="was refused: unknown group"):
        run(go())


def test_the_deadline_is_named():
    async def go():
        async with fake_engine() as engine, client(engine.url, request_timeout_s=0.2) as c:

            async def hang(body):
                await asyncio.sleep(30)

            engine.handlers["/end_weight_update"] = hang
            await c.end_update()

    with pytest.raises(EngineError, match=r"/end_weight_update did not answer within 0.2 s"):
        run(go())


def test_an_engine_that_breaks_the_connection():
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:

            async def die(body):
                raise asyncio.CancelledError

            engine.handlers["/generate"] = die
            await c.generate([1], rid="a", max_new_tokens=1, temperature=1.0, routes=False)

    with pytest.raises(EngineError, match=r"/generate: the connection broke"):
        run(go())


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_engine_listens_and_commands_are_sent_once():
    async def go():
        async with client(f"http://127.0.0.1:{unused_port()}") as c:
            await c.begin_update()

    start = time.monotonic()
    with pytest.raises(EngineError, match="cannot connect.*not running"):
        run(go())
    assert time.monotonic() - start < 2


def test_reading_is_repeated_until_the_engine_listens():
    async def go():
        port = unused_port()
        async with client(f"http://127.0.0.1:{port}") as c:
            reading = asyncio.create_task(c.version())
            await asyncio.sleep(0.05)
            app = web.Application()

            async def info(request):
                return web.json_response({"weight_version": "9"})

            app.router.add_get("/model_info", info)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            try:
                return await reading
            finally:
                await runner.cleanup()

    assert run(go()) == 9


def test_a_closed_client_says_so():
    with pytest.raises(EngineError, match="this client is closed"):
        run(client("http://127.0.0.1:9").version())


@pytest.mark.parametrize(("options", "asks"), [({}, False), ({"top_k": 8}, True), ({"top_p": 0.9, "top_k": 64}, True)])
def test_what_was_kept_is_asked_for_whenever_something_is_cut_off(options, asks):
    async def go():
        async with fake_engine() as engine, client(engine.url) as c:
            await c.generate([7, 13], rid="a", max_new_tokens=5, temperature=1.0, routes=True, **options)
            return engine.seen

    [(_, body)] = run(go())
    assert body["return_sampling_mask"] is asks
    sent = body["sampling_params"]
    assert (sent["top_p"], sent["top_k"]) == (options.get("top_p", 1.0), options.get("top_k", -1))
