"""Pushes into real SGLang servers while requests run: what becomes of them, and that nothing computed by the old weights is used again."""

import time

import pytest

from tests.system.sync_harness import PROMPTS, TOLERANCE, WATCHDOG_S, ClientLink, answer, difference, make_sync, same, whole_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OLD, NEW = 0, 1
TOKENS = 400
LEAKED = 100 * TOLERANCE
"""Log-probabilities that differ by more were computed from something else than the new weights alone."""


@pytest.fixture
def interrupted(fleet):
    """(family, tp, settings of `[sync]`, hooks of the link) -> an engine that was given NEW while it answered `PROMPTS` under OLD."""
    links = []

    def interrupt(family, tp, hooks=None, **settings):
        (engine,) = fleet.get(family, (tp, 0))
        link = ClientLink([engine.server.url], tp)
        links.append(link)
        old, new = fleet.version(), fleet.version()
        sync = make_sync(fleet.spec(family), link, way="direct", **settings)
        shards = [whole_shards(fleet.spec(family), folder) for folder in fleet.checkpoints(family)]
        try:
            sync.push(shards[OLD], old)
            running = link.ask(PROMPTS, TOKENS, old)
            wait_until_some_run(link)
            link.before |= hooks or {}
            report = sync.push(shards[NEW], new)
        finally:
            sync.close()
        print(f"{family} tp={tp} {settings['interrupt']}: {report.seconds}")
        assert report.attempts == 1
        return engine, link, old, new, running.result(120)

    yield interrupt
    for link in links:
        link.close()


def wait_until_some_run(link):
    """Until every prompt's request is decoding, for a moment."""
    end = time.monotonic() + 60
    while sum(load["num_running_reqs"] for load in link.run(link.clients[0]._get("/v1/loads"))["loads"]) < len(PROMPTS):
        assert time.monotonic() < end, "the requests do not run"
        time.sleep(0.02)
    time.sleep(0.2)


def spans(reply):
    """(version, tokens) of the runs of equal version."""
    return [(int(run["version"]), run["end"] - run["start"]) for run in reply["meta_info"]["weight_versions"]]


def assert_only_new_weights(fleet, engine, link, new):
    """A new request, on prompts whose keys and values the old weights have computed, is answered as by an engine that never saw them."""
    assert link.each("checksums") == [engine.checksums]
    replies = link.ask(PROMPTS, 12, new).result(60)
    assert [spans(reply) for reply in replies] == [[(new, 12)]] * len(PROMPTS)
    assert same([answer(reply) for reply in replies], engine.answers)


@pytest.mark.parametrize("tp", [1, 2])
def test_aborted_requests_end_where_they_are(fleet, interrupted, tp):
    engine, link, old, new, replies = interrupted("deepseek", tp, interrupt="abort")
    for reply in replies:
        tokens = len(reply["output_ids"])
        assert 0 < tokens < TOKENS
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert spans(reply) == [(old, tokens)]
    assert_only_new_weights(fleet, engine, link, new)
    assert same(link.answers(old), engine.answers), "the cache was dropped"


@pytest.mark.parametrize("tp", [1, 2])
def test_retracted_requests_are_computed_again_and_go_on(fleet, interrupted, tp):
    engine, link, old, new, replies = interrupted("deepseek", tp, interrupt="retract")
    assert_continued(replies, old, new)
    assert_only_new_weights(fleet, engine, link, new)
    assert same(link.answers(old), engine.answers), "nothing that the old weights computed is left"


@pytest.mark.parametrize(("family", "tp"), [("deepseek", 1), ("deepseek", 2), ("qwen3", 2)])
def test_requests_go_on_in_place_and_leave_nothing_to_those_that_come_later(fleet, interrupted, family, tp):
    engine, link, old, new, replies = interrupted(family, tp, interrupt="in_place")
    assert_continued(replies, old, new)
    assert_only_new_weights(fleet, engine, link, new)
    leaked = difference(link.answers(old), engine.answers)
    print(f"{family} tp={tp}: with the old version's prefixes, logprobs are off by {leaked:.3f}")
    assert leaked > LEAKED, "under the old version's key the prompts' old keys and values are there: what the new key is for"


def assert_continued(replies, old, new):
    for reply in replies:
        assert len(reply["output_ids"]) == TOKENS
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
        (first, before), (second, after) = spans(reply)
        assert (first, second, before + after) == (old, new, TOKENS)
        assert before > 0
        assert after > 0


def test_a_long_pause_in_place_does_not_wake_the_watchdog(fleet, interrupted):
    """SGLang's watchdog ends a server whose batch makes no progress; here a batch waits for a slow trainer."""
    (engine,) = fleet.get("deepseek", (1, 0))
    before = barks(engine)
    _, link, old, new, replies = interrupted("deepseek", 1, {"Close": lambda: time.sleep(2.5 * WATCHDOG_S)}, interrupt="in_place")
    assert barks(engine) == before
    assert_continued(replies, old, new)
    assert_only_new_weights(fleet, engine, link, new)


def barks(engine):
    return engine.server.log_path.read_text().count("watchdog timeout")
