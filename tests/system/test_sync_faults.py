"""What goes wrong during a push into real SGLang servers: nothing incomplete is ever served, and the next complete push repairs it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moerl.errors import EngineError, ReshardError
from moerl.reshard import direct, orders
from tests.system.sync_harness import PROMPTS, ClientLink, answer, make_sync, opening, same, whole_shards
from tests.torchrun import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAMILY, OLD, NEW = "deepseek", 0, 1
HELD_S = 0.7
"""A request that was not answered for so long is held."""


@pytest.fixture
def opened(fleet):
    """Engines by (tp, number) -> (link to them, engines). Whatever the test did, at the end one push makes each what it was."""
    links = []

    def open_link(*wanted):
        engines = fleet.get(FAMILY, *wanted)
        links.append((ClientLink([engine.server.url for engine in engines], engines[0].tp), engines))
        return links[-1]

    yield open_link
    for link, engines in links:
        link.before.clear()
        link.close()
        for engine in engines:
            if engine.server.alive():
                repaired(fleet, engine)


def repaired(fleet, engine):
    """Give an engine NEW, and see that it is whole."""
    link, version = ClientLink([engine.server.url], engine.tp), fleet.version()
    push(fleet, link, NEW, version)
    assert link.each("checksums") == [engine.checksums]
    assert same(link.answers(version), engine.answers)
    link.close()


@pytest.fixture
def shards(fleet):
    return [whole_shards(fleet.spec(FAMILY), folder) for folder in fleet.checkpoints(FAMILY)]


def push(fleet, link, weights, version, *, family=FAMILY, **settings):
    """By a trainer of its own."""
    spec = fleet.spec(family)
    sync = make_sync(spec, link, **{"way": "direct"} | settings)
    try:
        return sync.push(whole_shards(spec, fleet.checkpoints(family)[weights]), version)
    finally:
        sync.close()


def alter_sends(patch, alter):
    """Before a bucket leaves the trainer: `alter(peer, header, bucket)` may change the bytes, and returns the header to send."""

    def altering(transport):
        plain_room, plain_send, rooms = transport.room, transport.send, {}

        def room(peer, deadline):
            rooms[peer] = plain_room(peer, deadline)
            return rooms[peer]

        def send(peer, header, nbytes, deadline):
            plain_send(peer, alter(peer, header, rooms[peer][:nbytes]), nbytes, deadline)

        transport.room, transport.send = room, send

    patch.setattr(direct, "open_transport", opening(altering))


def flip(peers, times):
    """Flip a bit in `times` buckets to `peers`."""
    left = [times]

    def alter(peer, header, bucket):
        if peer in peers and left[0]:
            left[0] -= 1
            bucket[len(bucket) * 3 // 4] ^= 16
        return header

    return alter


def refuse():
    raise EngineError("not now")


def assert_closed(link):
    """Every engine refuses to go on, and holds what it is asked."""
    for number, client in enumerate(link.clients):
        with pytest.raises(EngineError, match=r"continue_generation answered HTTP 409.*complete version"):
            link.run(client.resume())
        held = link.ask(PROMPTS[:1], 1, 0, number)
        time.sleep(HELD_S)
        assert not held.done()
        held.cancel()


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_a_byte_that_changes_on_the_way_is_never_written_and_sent_again(fleet, opened, shards, monkeypatch, transport):
    link, (engine,) = opened((1, 0))
    push(fleet, link, OLD, fleet.version())
    with monkeypatch.context() as patch:
        alter_sends(patch, flip({1}, 1))
        new = fleet.version()
        report = push(fleet, link, NEW, new, transport=transport)
    assert report.attempts == 2
    assert link.each("checksums") == [engine.checksums]
    assert same(link.answers(new), engine.answers)


def test_bytes_that_change_every_time_leave_the_engine_closed_until_a_complete_push(fleet, opened, monkeypatch):
    link, (engine,) = opened((1, 0))
    old = fleet.version()
    push(fleet, link, OLD, old)
    before = link.each("checksums")
    with monkeypatch.context() as patch:
        alter_sends(patch, flip({1}, 100))
        with pytest.raises(
            ReshardError, match=r"(?s)bucket \d+ of version \d+ from trainer rank 0 is damaged.*nothing of it was written.*closed"
        ):
            push(fleet, link, NEW, fleet.version())
    assert link.state == "fenced"
    assert link.each("version") == [old]
    assert link.each("checksums") == before, "the first bucket was damaged, so nothing was written"
    assert_closed(link)
    link.before["Join"] = refuse
    with pytest.raises(ReshardError, match="failed while joining the engines: not now"):
        push(fleet, link, NEW, fleet.version())
    assert_closed(link)
    link.before.clear()
    new = fleet.version()
    push(fleet, link, NEW, new)
    assert link.each("checksums") == [engine.checksums]
    assert link.each("version") == [new]


@pytest.mark.parametrize(
    ("tp", "transport", "next_way"),
    [(1, "gloo", "direct"), (2, "gloo", "compatible"), (1, "shared_memory", "compatible"), (2, "shared_memory", "direct")],
)
def test_a_trainer_that_is_killed_in_the_middle(fleet, opened, tp, transport, next_way):
    """The engine notices at once, holds what it is asked, and serves it once another trainer has sent everything."""
    link, (engine,) = opened((tp, 0))
    old, torn, new = fleet.version(), fleet.version(), fleet.version()
    push(fleet, link, OLD, old)
    before = link.each("checksums")
    arguments = [engine.server.url, str(tp), str(fleet.checkpoints(FAMILY)[NEW]), str(torn), transport, "5"]
    trainer = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("sync_trainer.py")), *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert trainer.wait(120) == -signal.SIGKILL
    died = time.monotonic()
    link.order(orders.Describe())
    noticed_s = time.monotonic() - died
    print(f"tp={tp} {transport}: the engine answers {noticed_s:.2f} s after its trainer was killed")
    assert noticed_s < 2
    assert link.each("version") == [old]
    assert link.each("checksums")[0] not in (before[0], engine.checksums), "some of it was written"
    assert_closed(link)
    held = link.ask(PROMPTS, 12, new)
    report = push(fleet, link, NEW, new, way=next_way)
    replies = held.result(60)
    assert report.attempts == 1
    assert link.each("checksums") == [engine.checksums]
    assert [reply["meta_info"]["weight_version"] for reply in replies] == [str(new)] * len(PROMPTS)
    assert same([answer(reply) for reply in replies], engine.answers)


def test_a_failure_on_one_rank_is_one_of_the_engine(fleet, opened, monkeypatch):
    link, (engine,) = opened((2, 0))

    def for_rank_one(peer, header, bucket):
        return (header[0] + 100, *header[1:]) if peer == 2 else header

    with monkeypatch.context() as patch:
        alter_sends(patch, for_rank_one)
        with pytest.raises(
            ReshardError, match=r"(?s)rank 1: ReshardError: expected bucket \d+ .*got bucket 10\d.*nothing of it was written"
        ) as caught:
            push(fleet, link, OLD, fleet.version())
    assert "rank 0: " not in str(caught.value), "it only lost the other"
    assert_closed(link)
    new = fleet.version()
    push(fleet, link, NEW, new)
    assert link.each("checksums") == [engine.checksums]


def test_a_rank_that_never_joins_costs_the_deadline_and_nothing_is_written(fleet, opened):
    link, (engine,) = opened((2, 0))
    new = fleet.version()
    push(fleet, link, NEW, new)
    (second,) = (p for p in psutil.Process(engine.server.process.pid).children(recursive=True) if "scheduler_TP1" in " ".join(p.cmdline()))
    link.before["Join"] = second.suspend
    start = time.monotonic()
    try:
        with pytest.raises(ReshardError, match=r"(?s)failed while joining the engines.*deadline of 4 s.*Nothing was written") as caught:
            push(fleet, link, OLD, fleet.version(), timeout_s=4.0)
        print(f"after {time.monotonic() - start:.1f} s: {caught.value}")
        assert time.monotonic() - start < 30
        assert link.state == new
    finally:
        second.resume()
    assert link.each("version") == [new]
    assert same(link.answers(new), engine.answers)
    assert link.each("checksums") == [engine.checksums]


def test_an_engine_that_comes_back_with_another_topology_is_refused_untouched(fleet, opened, shards):
    link, _ = opened((1, 0))
    pair = fleet.get(FAMILY, (2, 0))[0]
    sync = make_sync(fleet.spec(FAMILY), link, way="direct")
    sync.push(shards[OLD], fleet.version())
    link.lead_to([pair.server.url], 2)
    link.epoch += 1
    with pytest.raises(ReshardError, match=r"(?s)reports parameters of 2 ranks, the plan is for 1.*Nothing was written"):
        sync.push(shards[OLD], fleet.version())
    sync.close()
    assert link.each("checksums") == [pair.checksums]
    assert same(link.answers(0), pair.answers)
    new = fleet.version()
    assert push(fleet, link, NEW, new).engine_versions == [new]
    assert link.each("checksums") == [pair.checksums]


def test_an_engine_that_was_replaced_by_its_like_gets_everything(fleet, opened, shards):
    link, (_, other) = opened((1, 0), (1, 1))
    link.lead_to(link.names[:1], 1)
    sync = make_sync(fleet.spec(FAMILY), link, way="direct", delta=True)
    sync.push(shards[NEW], fleet.version())
    link.lead_to([other.server.url], 1)
    link.epoch += 1
    new = fleet.version()
    report = sync.push(shards[NEW], new)
    sync.close()
    assert (report.attempts, report.moved.changed_share) == (1, None)
    assert link.each("version") == [new]
    assert link.each("checksums") == [other.checksums]


def test_changes_since_a_version_that_another_trainer_replaced_are_refused_and_everything_is_sent(fleet, opened, shards):
    link, (engine,) = opened((1, 0))
    base, between, new = fleet.version(), fleet.version(), fleet.version()
    sync = make_sync(fleet.spec(FAMILY), link, way="direct", delta=True)
    sync.push(shards[NEW], base)
    push(fleet, link, OLD, between)
    before, refused = link.each("checksums"), []
    link.before["Describe"] = lambda: refused.extend(link.each("checksums"))  # the second attempt starts
    report = sync.push(shards[NEW], new)
    sync.close()
    assert refused == before, "nothing was written before everything was sent"
    assert (report.attempts, report.way, report.moved.changed_share) == (2, "direct", None)
    assert link.each("checksums") == [engine.checksums]
    assert same(link.answers(new), engine.answers)


def test_one_of_two_engines_fails_and_neither_answers_until_both_are_whole(fleet, opened, monkeypatch):
    link, engines = opened((1, 0), (1, 1))
    push(fleet, link, OLD, fleet.version())
    with monkeypatch.context() as patch:
        alter_sends(patch, flip({2}, 100))
        with pytest.raises(ReshardError, match=r"(?s)damaged.*closed until a complete version arrives"):
            push(fleet, link, NEW, fleet.version())
    assert_closed(link)
    new = fleet.version()
    held = [link.ask(PROMPTS, 12, new, number) for number in range(2)]
    time.sleep(HELD_S)
    assert not any(one.done() for one in held)
    assert push(fleet, link, NEW, new).engine_versions == [new, new]
    for one, engine in zip(held, engines, strict=True):
        replies = one.result(60)
        assert {reply["meta_info"]["weight_version"] for reply in replies} == {str(new)}
        assert same([answer(reply) for reply in replies], engine.answers)
    assert link.each("checksums") == [engine.checksums for engine in engines]


def test_an_engine_that_dies_in_the_middle_is_an_error_before_the_deadline(fleet, opened, monkeypatch):
    """Near the end of this module: it costs an engine."""
    link, engines = opened((1, 0), (1, 1))
    kill = killing_at_third(engines[1])
    with monkeypatch.context() as patch:
        alter_sends(patch, lambda peer, header, bucket: (kill(), header)[1])
        assert_fails_soon(fleet, link, way="direct")
    link.lead_to(link.names[:1], 1)
    assert_closed(link)
    push(fleet, link, NEW, fleet.version())
    assert link.each("checksums") == [engines[0].checksums]


def test_an_engine_that_dies_in_the_middle_of_the_compatible_way(fleet):
    """At the end of this module: it costs an engine, of the other family because nobody needs that one any more."""
    (engine,) = fleet.get("qwen3", (1, 0))
    link = ClientLink([engine.server.url], 1)
    link.before["receive_bucket"] = killing_at_third(engine)
    assert_fails_soon(fleet, link, way="compatible", family="qwen3")
    link.close()


def killing_at_third(engine):
    """To be called for each bucket; the third is an engine's last."""
    calls = []

    def count():
        calls.append(None)
        if len(calls) == 3:
            os.killpg(engine.server.process.pid, signal.SIGKILL)

    return count


def assert_fails_soon(fleet, link, **settings):
    start = time.monotonic()
    with pytest.raises(ReshardError, match="(?s)failed while sending the weights.*restart those that died") as caught:
        push(fleet, link, OLD, fleet.version(), **settings)
    print(f"{settings} after {time.monotonic() - start:.1f} s: {caught.value}")
    assert time.monotonic() - start < 30
    assert link.state == "fenced"
