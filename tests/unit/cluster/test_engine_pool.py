"""The pool's own logic over real Ray actors that only pretend to have an engine."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from moerl.cluster import engines
from moerl.cluster.engines import EnginePool
from moerl.config.schema import Config, Engine, Model, Rollout
from moerl.convert.tiny import tiny_config
from moerl.errors import EngineError, WaitTimeout
from moerl.models import deepseek
from moerl.rollout.sample import Group, Prompt, Sample


@pytest.fixture
def pretend(monkeypatch, tmp_path, local_ray):
    """Replace the actor; what it does is decided by files in `tmp_path`: `<number>.<method>` holds a trouble."""

    class PretendActor:
        def __init__(self, config, number, log_path, version):
            self.number, self.version, self.folder = number, version, Path(log_path).parent
            self.up = False

        def _trouble(self, method):
            with (self.folder / "calls").open("a") as calls:
                calls.write(f"{self.number}.{method}\n")
            file = self.folder / f"{self.number}.{method}"
            trouble = file.read_text() if file.exists() else ""
            if trouble == "raise":
                raise EngineError(f"engine {self.number} refused {method}")
            if trouble == "exit":
                import os

                os._exit(9)
            return trouble

        async def start(self):
            self._trouble("start")
            self.up = True
            return "http://nowhere"

        async def call(self, method, arguments):
            if self._trouble(method) == "hang":
                await asyncio.sleep(600)
            if method == "set_version":
                self.version = arguments["version"]
            return {"version": self.version, "echo": arguments}.get(method)

        async def generate(self, prompts, sampling, group_size, tag):
            if self._trouble("generate") == "hang":
                await asyncio.sleep(600)
            return msgspec.msgpack.encode(
                [
                    Group(p.id, p.answer, [Sample(p.id, 0, p.tokens, [2], b"", b"", [(sampling.version, 0, 1)], "", "stop", self.number)])
                    for p in msgspec.msgpack.decode(prompts, type=list[Prompt])
                ]
            )

        async def alive(self):
            return self._trouble("alive") != "dead"

        async def stop(self):
            self._trouble("stop")

    monkeypatch.setattr(engines, "EngineActor", PretendActor)
    config = Config(
        model=Model(path="unused"),
        engine=Engine(count=2, device="cpu", request_timeout_s=2, max_restarts=1),
        rollout=Rollout(request_timeout_s=20),
    )
    pool = EnginePool(config, deepseek.spec(tiny_config()), local_ray, log_dir=tmp_path, version=3)
    yield pool
    pool.stop()


PROMPTS = [Prompt(i, "q", [1, i], "a") for i in (5, 3, 8, 1, 9)]


def generate(pool, prompts=PROMPTS):
    return pool.generate(prompts, group_size=1, max_new_tokens=4, temperature=1.0)


def called(tmp_path):
    return (tmp_path / "calls").read_text().split()


def test_groups_come_back_in_the_order_of_their_prompts_from_both_engines(pretend):
    with pretend as pool:
        groups = generate(pool)
    assert [group.prompt_id for group in groups] == [5, 3, 8, 1, 9]
    assert [group.samples[0].engine for group in groups] == [0, 1, 0, 1, 0]
    assert groups[0].samples[0].versions == [(3, 0, 1)]


def test_fewer_prompts_than_engines(pretend):
    with pretend as pool:
        assert [group.prompt_id for group in generate(pool, PROMPTS[:1])] == [5]


def test_a_fenced_pool_refuses_to_generate_until_a_version_is_published(pretend):
    with pretend as pool:
        pool.fence()
        with pytest.raises(EngineError, match="no complete version"):
            generate(pool)
        pool.publish(4)
        assert generate(pool)[0].samples[0].versions == [(4, 0, 1)]


def test_each_engine_gets_its_own_arguments(pretend):
    class Forever:
        def left(self, waiting_for):
            return 10.0

    with pretend as pool:
        assert pool.start("echo", [{"x": 0}, {"x": 1}]).wait(Forever()) == [{"x": 0}, {"x": 1}]
        assert pool.versions() == [3, 3]


def test_a_failed_generation_does_not_wait_for_the_other_engine_and_aborts_it(pretend, tmp_path):
    (tmp_path / "0.generate").write_text("hang")
    (tmp_path / "1.generate").write_text("raise")
    with pretend as pool:
        start = time.monotonic()
        with pytest.raises(EngineError, match="engine 1 refused generate"):
            generate(pool)
        assert time.monotonic() - start < 10
    assert {"0.abort_all", "1.abort_all"} <= set(called(tmp_path))


def test_an_engine_that_hangs_is_named_at_the_deadline(pretend, tmp_path):
    (tmp_path / "1.version").write_text("hang")
    with pretend as pool, pytest.raises(WaitTimeout, match="12 s for version on engine 1"):
        pool.versions()


def test_a_supervisor_that_dies_is_an_error_with_the_end_of_the_log(pretend, tmp_path):
    (tmp_path / "1.generate").write_text("exit")
    (tmp_path / "engine-1.log").write_text("first line\nRuntimeError: out of luck\n")
    with pretend as pool:
        with pytest.raises(EngineError, match=r"(?s)supervisor of engine 1 died.*RuntimeError: out of luck"):
            generate(pool)
        assert pool.dead() == [1]


def test_a_dead_engine_is_restarted_once_and_the_pool_stays_fenced(pretend, tmp_path):
    with pretend as pool:
        assert pool.restart_dead() == []
        (tmp_path / "1.alive").write_text("dead")
        assert pool.restart_dead() == [1]
        assert (pool.epoch, pool.version) == (1, None)
        with pytest.raises(EngineError, match=r"engine 1 is dead and was restarted 1 times already \(engine.max_restarts = 1\)"):
            pool.restart_dead()
    assert called(tmp_path).count("1.start") == 2
    assert called(tmp_path).count("0.start") == 1


def test_an_engine_that_does_not_start_stops_the_others(pretend, tmp_path):
    (tmp_path / "1.start").write_text("raise")
    with pytest.raises(EngineError, match="engine 1 refused start"), pretend:
        pass
    assert "0.stop" in called(tmp_path)


def test_stopping_twice_is_harmless_and_a_stopped_pool_is_dead(pretend):
    with pretend as pool:
        pool.stop()
        assert pool.dead() == [0, 1]


class PretendServer:
    """`EngineServer` that does not get up until `ends` is used up: whether each end was for a port."""

    url = "http://127.0.0.1:9"
    ends: list[bool]

    def __init__(self, *args, **options):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def wait_healthy(self):
        if self.ends:
            raise EngineError("exited with code 1")

    def met_a_taken_port(self):
        return self.ends.pop(0)

    def stop(self):
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("ends", "calls", "fails"),
    [
        ([], ["start"], False),
        ([True, True], ["start", "stop", "start", "stop", "start"], False),
        ([False], ["start"], True),
        ([True, False], ["start", "stop", "start"], True),
        ([True, True, True], ["start", "stop", "start", "stop", "start"], True),
    ],
)
def test_a_taken_port_costs_an_engine_another_start_and_nothing_else_does(monkeypatch, tmp_path, ends, calls, fails):
    monkeypatch.setattr(engines, "EngineServer", PretendServer)
    monkeypatch.setattr(PretendServer, "ends", list(ends), raising=False)
    actor = engines.EngineActor(Config(model=Model(path="unused")), 0, str(tmp_path / "log"), 0)

    async def start():
        try:
            return await actor.start()
        finally:
            if actor._client is not None:
                await actor._client.__aexit__(None, None, None)

    if fails:
        with pytest.raises(EngineError, match="exited with code 1"):
            asyncio.run(start())
    else:
        assert asyncio.run(start()) == PretendServer.url
    assert actor._server.calls == calls
