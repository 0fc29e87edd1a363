"""Weight updates in the middle of completions: token, logprob, route and version of each still come from one forward pass.

A real engine is given NEW and then OLD again while `generate_some` runs on it. Afterwards it scores all tokens of the completions in one
pass, under each of the two; that pass is the truth for every row whose keys and values all come from the weights of its own version:

    abort     all rows: what was cut off is resumed with a prefix that the new weights have computed
    in_place  the rows before the first update; later ones read keys and values of older weights
    retract   the rows since the last update; the routes of those before it were overwritten, their logprobs stay true
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moerl.models import ModelSpec
from moerl.rollout.check import decode_routes
from moerl.rollout.client import EngineClient
from moerl.rollout.generate import Sampling, generate_some
from moerl.rollout.sample import Prompt, Sample
from moerl.routing.compare import differing
from moerl.routing.layout import Layout
from tests.system.sync_harness import PROMPTS, TOLERANCE, ClientLink, Fleet, make_sync, whole_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OLD, NEW = 0, 1
TOKENS = 300
BETWEEN = 15
"""Tokens that every completion samples, at least about, between two updates."""
LEAKED = 100 * TOLERANCE
"""Log-probabilities that differ by more were computed from other weights, or from keys and values of others."""


class Tireless(EngineClient):
    """Whose requests go on after a stop token; `sent` has the number of tokens in each."""

    sent: list[int]

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        if path == "/generate":
            self.sent += map(len, body["input_ids"])
            body = body | {"sampling_params": body["sampling_params"] | {"ignore_eos": True}}
        return await super()._post(path, body, timeout_s)


@dataclass(frozen=True)
class Scored:
    """One pass over a sequence of n tokens.

    Attributes:
        logprobs: float32[n - 1], of all tokens but the first.
        ids: uint8[n - 1, moe_layer, k].
    """

    logprobs: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Interrupted:
    """A completion that was sampled by three versions in turn.

    Attributes:
        versions: their numbers; OLD, NEW, OLD.
        scored: under OLD and NEW.
    """

    sample: Sample
    versions: list[int]
    scored: list[Scored]

    def segments(self) -> list[tuple[slice, Scored, Scored]]:
        """Rows of one version each, with the truth of its weights and that of the others."""
        runs = self.sample.load_trace().versions
        return [(slice(run.start, run.stop), self.scored[i % 2], self.scored[1 - i % 2]) for i, run in enumerate(runs)]

    def routes_off(self, rows: slice, truth: Scored) -> np.ndarray:
        """bool[row, moe_layer], whether other experts were recorded."""
        return differing(self.sample.load_trace().ids[rows], truth.ids[rows])

    def logprobs_off(self, rows: slice, truth: Scored) -> np.ndarray:
        """float32[row], of the rows that tokens were sampled from."""
        first = len(self.sample.prompt_tokens) - 1
        sampled = slice(max(rows.start, first), rows.stop)
        return np.abs(self.sample.logprob_array[sampled.start - first : sampled.stop - first] - truth.logprobs[sampled])

    def agrees(self, rows: slice, truth: Scored) -> bool:
        return not self.routes_off(rows, truth).any() and self.logprobs_off(rows, truth).max() <= TOLERANCE


@dataclass(frozen=True)
class Rollout:
    """Attributes:
    requests: that were sent for all completions together.
    """

    completions: list[Interrupted]
    requests: int


@pytest.fixture
def roll_out(fleet: Fleet) -> Iterator[Callable[[str], Rollout]]:
    """Completions of `PROMPTS`, with two updates in the middle that interrupt them in the given way."""
    (engine,) = fleet.get("deepseek", (1, 0))
    link = ClientLink([engine.server.url], 1)
    client = link.run(Tireless(engine.server.url, 60, 120).__aenter__())
    client.sent = []
    spec = fleet.spec("deepseek")
    layout = Layout(spec.moe_layers, spec.experts, spec.topk)
    shards = [whole_shards(spec, folder) for folder in fleet.checkpoints("deepseek")]

    def roll_out(interrupt: str) -> Rollout:
        first, second, third, last = (fleet.version() for _ in range(4))
        sampling = Sampling(TOKENS, 1.0, True, layout, spec.layers, shares=first, retracted=interrupt == "retract")
        sync = make_sync(spec, link, way="direct", interrupt=interrupt)
        try:
            sync.push(shards[OLD], first)
            running = [
                link.submit(generate_some(client, Prompt(i, "", tokens, ""), sampling, indices=[0], keep=1, rid=f"{interrupt}.{i}"))
                for i, tokens in enumerate(PROMPTS)
            ]
            for weights, version in ((NEW, second), (OLD, third)):
                wait_until_all_went_on(link)
                sync.push(shards[weights], version)
            samples = [sample for call in running for sample in call.result(120).samples]
            requests = len(client.sent)
            under_old = [score(link, client, sample, f"scored {third}", spec) for sample in samples]
            sync.push(shards[NEW], last)
            under_new = [score(link, client, sample, f"scored {last}", spec) for sample in samples]
        finally:
            sync.close()
        truths = zip(under_old, under_new, strict=True)
        return Rollout(
            [Interrupted(sample, [first, second, third], [*truth]) for sample, truth in zip(samples, truths, strict=True)], requests
        )

    yield roll_out
    link.run(client.__aexit__(None, None, None))
    link.close()


def wait_until_all_went_on(link: ClientLink) -> None:
    """Until every request is decoding, and all together hold `BETWEEN` tokens more for each of them."""
    end, begun = time.monotonic() + 60, None
    while True:
        (load,) = link.run(link.clients[0]._get("/v1/loads"))["loads"]
        if load["num_running_reqs"] == len(PROMPTS):
            begun = load["num_used_tokens"] if begun is None else begun
            if load["num_used_tokens"] >= begun + BETWEEN * len(PROMPTS):
                return
        assert time.monotonic() < end, f"the requests do not go on: {load}"
        time.sleep(0.02)


def score(link: ClientLink, client: EngineClient, sample: Sample, key: str, spec: ModelSpec) -> Scored:
    """One pass of the engine over all of a sample's tokens; `key` keeps it from the keys and values of other passes."""
    tokens, layout = sample.tokens.tolist(), Layout(spec.moe_layers, spec.experts, spec.topk)
    body = {
        "input_ids": [tokens],
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": True,
        "extra_key": key,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }
    (reply,) = link.run(client._post("/generate", body, 60))
    meta = reply["meta_info"]
    assert meta["cached_tokens"] == 0
    _, *pairs = meta["input_token_logprobs"]
    # SGLang scores a prompt's token that is the last of the vocabulary, but calls it 0.
    assert [pair[1] for pair in pairs] == [token if token < spec.vocab_size - 1 else 0 for token in tokens[1:]]
    ids = decode_routes(meta, rows=len(tokens), layout=layout, layers=spec.layers)
    return Scored(np.array([pair[0] for pair in pairs], np.float32), ids[:-1])


def assert_whole(rollout: Rollout) -> None:
    """Each completion has its full length, and all its tokens and rows a version that was served, in order."""
    assert len(rollout.completions) == len(PROMPTS)
    for one, prompt in zip(rollout.completions, PROMPTS, strict=True):
        sample, trace = one.sample, one.sample.load_trace()
        assert sample.prompt_tokens == prompt
        assert len(sample.response_tokens) == len(sample.logprob_array) == TOKENS
        assert sample.finish_reason == "length"
        assert [version for version, _, _ in sample.versions] == [run.version for run in trace.versions] == one.versions
        assert all(stop > start for _, start, stop in sample.versions)
        assert [sample.versions[0][1], *(stop for _, _, stop in sample.versions)] == [
            0,
            *(start for _, start, _ in sample.versions[1:]),
            TOKENS,
        ]
        assert trace.rows == len(sample.tokens) - 1
        shift = len(prompt) - 1
        assert [run.stop for run in trace.versions] == [stop + shift for _, _, stop in sample.versions]


def assert_nearly_all(agreeing: list[bool]) -> None:
    """All but one: a near tie falls otherwise in a batch of another shape, at one in 100,000 decisions, and then changes later ones."""
    assert sum(agreeing) >= len(agreeing) - 1, agreeing


def report(name: str, rollout: Rollout) -> None:
    for one in rollout.completions:
        spans = [stop - start for _, start, stop in one.sample.versions]
        offs = [
            f"{one.routes_off(rows, own).mean():.3f}/{one.routes_off(rows, other).mean():.3f} "
            f"{one.logprobs_off(rows, own).max():.1e}/{one.logprobs_off(rows, other).max():.1e}"
            for rows, own, other in one.segments()
        ]
        print(f"{name}: tokens {spans}; routes and logprobs off from own/other weights: {'; '.join(offs)}")


def test_aborted_completions_are_resumed_and_each_part_is_that_of_its_version(roll_out: Callable[[str], Rollout]) -> None:
    rollout = roll_out("abort")
    report("abort", rollout)
    assert_whole(rollout)
    assert rollout.requests >= 3 * len(PROMPTS), "each was cut off twice"
    assert_nearly_all([all(one.agrees(rows, own) for rows, own, _ in one.segments()) for one in rollout.completions])
    for one in rollout.completions:
        assert one.sample.load_trace().valid is None
        for rows, _, other in one.segments():
            assert_is_of_other_weights(one, rows, other)


def test_completions_that_go_on_in_place_keep_what_older_weights_did(roll_out: Callable[[str], Rollout]) -> None:
    rollout = roll_out("in_place")
    report("in_place", rollout)
    assert_whole(rollout)
    assert rollout.requests == len(PROMPTS), "nothing was asked again"
    before = [(rows, old) for (rows, old, _), *_ in (one.segments() for one in rollout.completions)]
    assert_nearly_all([one.agrees(rows, old) for one, (rows, old) in zip(rollout.completions, before, strict=True)])
    for one in rollout.completions:
        assert one.sample.load_trace().valid is None
        (rows, _, new), *later = one.segments()
        assert_is_of_other_weights(one, rows, new)
        for rows, own, other in later:
            assert_is_of_other_weights(one, rows, other)
            assert one.logprobs_off(rows, own).max() > LEAKED, "keys and values of older weights are still read"


def test_retracted_completions_have_routes_since_the_last_update_only(roll_out: Callable[[str], Rollout]) -> None:
    rollout = roll_out("retract")
    report("retract", rollout)
    assert_whole(rollout)
    assert rollout.requests == len(PROMPTS), "nothing was asked again"
    last = [one.segments()[-1] for one in rollout.completions]
    assert_nearly_all([one.agrees(rows, own) for one, (rows, own, _) in zip(rollout.completions, last, strict=True)])
    logprobs = [max(one.logprobs_off(rows, own).max() for rows, own, _ in one.segments()) for one in rollout.completions]
    assert_nearly_all([off <= TOLERANCE for off in logprobs])
    for one, (rows, _, new) in zip(rollout.completions, last, strict=True):
        trace = one.sample.load_trace()
        assert trace.valid.tolist() == [False] * rows.start + [True] * (rows.stop - rows.start)
        assert_is_of_other_weights(one, rows, new)


def assert_is_of_other_weights(one: Interrupted, rows: slice, other: Scored) -> None:
    """That the comparisons can tell the two weights apart, from the segment's first token on."""
    assert one.routes_off(rows, other).mean() > 0.3
    assert one.logprobs_off(rows, other).max() > LEAKED
    first = max(rows.start, len(one.sample.prompt_tokens) - 1)
    assert not one.agrees(slice(first, first + 1), other)
