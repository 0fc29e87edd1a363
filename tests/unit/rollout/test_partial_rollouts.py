"""Completions that are cut off anywhere, any number of times: what comes out is what was sampled, once, each token with its own company."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from moerl.rollout.generate import Outcome, Sampling, generate_some
from moerl.rollout.sample import Prompt, Sample
from tests.unit.rollout.fakes import LAYERS, LAYOUT, encode, make_routes, run

PROMPT = Prompt(id=7, text="", tokens=[3, 9, 15, 4], answer="")
MAX_NEW = 12
MOE = list(LAYOUT.layers)


@dataclass(frozen=True)
class Fate:
    """What becomes of one request.

    Attributes:
        tokens: that it samples, as far as it may.
        cut: it is aborted then; else it ends by itself.
        routes: whether an aborted one is answered with its rows: one that waits has none.
        updates: sampled tokens right before which the weights change.
        turns: of the event loop until it is answered.
    """

    tokens: int
    cut: bool
    routes: bool = True
    updates: frozenset[int] = frozenset()
    turns: int = 0


@dataclass(frozen=True)
class Piece:
    """What one request sampled.

    Attributes:
        rows: int32[row, layer, k] that were asked for.
        versions: int[token].
        lost: it can't be kept: no token, or tokens without their rows.
    """

    tokens: list[int]
    logprobs: list[float]
    rows: np.ndarray
    versions: list[int]
    lost: bool
    cut: bool


@dataclass
class CuttingEngine:
    """An `EngineClient` whose requests meet their `fates`; the last one of a completion in `hanging` is answered only once it is aborted.

    Every request computes other logprobs, rows and tokens than all others, also of what they share, so nothing can be mistaken.
    """

    fates: list[list[Fate]]
    hanging: frozenset[int]
    url: str = "http://cutting"
    version: int = 1
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    stopped: bool = False

    async def generate_many(self, prompts: list[list[int]], *, rids: list[str], **options: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self.generate(tokens, rid=rid, **options) for tokens, rid in zip(prompts, rids, strict=True)))

    async def generate(
        self, sent: list[int], *, rid: str, max_new_tokens: int, routes: bool, routes_from: int = 0, **_: Any
    ) -> dict[str, Any]:
        index = int(rid.split(".")[1])
        had = self.pieces.setdefault(index, [])
        said = [token for piece in had if not piece.lost for token in piece.tokens]
        assert not self.stopped, "nothing begins after enough have ended"
        assert rid not in self.aborted, "ids are used once"
        assert sent == PROMPT.tokens + said
        assert routes_from == (len(sent) - 1 if said else 0)
        assert max_new_tokens == MAX_NEW - len(said) > 0
        self.aborted[rid] = asyncio.Event()
        fate = self.fates[index][len(had)]
        for _turn in range(fate.turns):
            await asyncio.sleep(0)
        if index in self.hanging and not fate.cut:
            await self.aborted[rid].wait()
        cut = fate.cut or self.aborted[rid].is_set()
        tokens = min(fate.tokens if cut else max(fate.tokens, 1), max_new_tokens)
        piece = self._sample(sent, tokens, cut=cut, recorded=routes and (fate.routes or not cut), start=routes_from, updates=fate.updates)
        had.append(Piece(*piece, lost=cut and (not tokens or (routes and not fate.routes)), cut=cut))
        return self._reply(rid, sent, had[-1], routes=routes and (fate.routes or not cut), full=tokens == max_new_tokens)

    async def abort(self, rid: str) -> None:
        self.stopped = True
        self.aborted[rid].set()

    def _sample(
        self, sent: list[int], tokens: int, *, cut: bool, recorded: bool, start: int, updates: frozenset[int]
    ) -> tuple[list[int], list[float], np.ndarray, list[int]]:
        number = sum(map(len, self.pieces.values()))
        versions = []
        for place in range(tokens):
            self.version += place in updates
            versions.append(self.version)
        rows = make_routes(len(sent) + tokens - 1, seed=number)[start:] if recorded and tokens else np.zeros((0, LAYERS, LAYOUT.topk))
        return [100 * (number + 1) + i for i in range(tokens)], [-number - i / 64 for i in range(tokens)], rows, versions

    def _reply(self, rid: str, sent: list[int], piece: Piece, *, routes: bool, full: bool) -> dict[str, Any]:
        return {
            "text": f"<{len(piece.tokens)}>",
            "output_ids": piece.tokens,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "abort" if piece.cut else "length" if full else "stop"},
                "prompt_tokens": len(sent),
                "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(piece.logprobs, piece.tokens, strict=True)],
                "weight_versions": [{"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(piece.versions)],
                "routed_experts": encode(piece.rows) if routes else None,
            },
        }


def cuts() -> st.SearchStrategy[Fate]:
    updates = st.frozensets(st.integers(0, MAX_NEW - 1), max_size=3)
    few = st.sampled_from([0, 0, 0, 1, 1, 2, 5, MAX_NEW])
    return st.builds(Fate, tokens=few, cut=st.just(True), routes=st.booleans(), updates=updates, turns=st.integers(0, 3))


def fates() -> st.SearchStrategy[list[Fate]]:
    last = st.builds(
        Fate,
        tokens=st.integers(0, MAX_NEW),
        cut=st.just(False),
        routes=st.booleans(),
        updates=st.frozensets(st.integers(0, MAX_NEW - 1)),
        turns=st.integers(0, 3),
    )
    return st.tuples(st.lists(cuts(), max_size=20), last).map(lambda parts: [*parts[0], parts[1]])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(fates(), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_whatever_is_cut_off_nothing_is_lost_doubled_or_mixed(
    data: st.DataObject, plans: list[list[Fate]], routes: bool, retracted: bool
) -> None:
    count = len(plans)
    keep = data.draw(st.integers(1, count), "keep")
    hanging = data.draw(st.frozensets(st.integers(0, count - 1), max_size=count - keep), "hanging")
    engine = CuttingEngine(plans, hanging)
    sampling = Sampling(MAX_NEW, 1.0, routes, LAYOUT, LAYERS, shares=1, retracted=retracted)
    outcome = run(generate_some(engine, PROMPT, sampling, indices=range(count), keep=keep, rid="g"))
    assert_everyone_has_one_fate(outcome, engine, keep)
    for sample in outcome.samples:
        pieces = engine.pieces[sample.index]
        assert [piece.cut for piece in pieces[:-1]] == [True] * (len(pieces) - 1), "one that ended by itself is not asked again"
        assert_is_what_was_sampled(sample, [piece for piece in pieces if not piece.lost])
        if routes:
            assert_rows_are_those_of_the_tokens(sample, [piece for piece in pieces if not piece.lost], retracted)
        else:
            assert sample.trace == b""
        event(f"{len(pieces) - 1} cuts")


def assert_everyone_has_one_fate(outcome: Outcome, engine: CuttingEngine, keep: int) -> None:
    assert outcome.failed == {}
    assert len(outcome.samples) >= keep
    assert sorted([sample.index for sample in outcome.samples] + list(outcome.cut)) == list(range(len(engine.fates)))
    for index, spent in outcome.cut.items():
        assert engine.stopped
        assert spent == sum(len(piece.tokens) for piece in engine.pieces[index])


def assert_is_what_was_sampled(sample: Sample, kept: list[Piece]) -> None:
    tokens = [token for piece in kept for token in piece.tokens]
    assert sample.prompt_tokens == PROMPT.tokens
    assert sample.response_tokens == tokens
    assert 0 < len(tokens) <= MAX_NEW
    assert sample.finish_reason == ("length" if len(tokens) == MAX_NEW else "stop")
    assert sample.logprob_array.tolist() == [logprob for piece in kept for logprob in piece.logprobs]
    assert spread(sample.versions) == [version for piece in kept for version in piece.versions]
    assert sample.text == "".join(f"<{len(piece.tokens)}>" for piece in kept)


def assert_rows_are_those_of_the_tokens(sample: Sample, kept: list[Piece], retracted: bool) -> None:
    trace = sample.load_trace()  # which compares the hash of the tokens
    rows = np.concatenate([piece.rows for piece in kept])[:, MOE]
    assert trace.rows == len(rows) == len(sample.tokens) - 1
    by_row = spread(trace.versions)
    first = len(PROMPT.tokens) - 1
    assert by_row[first:] == spread(sample.versions)
    assert set(by_row[:first]) == {by_row[first]}, "the prompt's rows count as the first token's"
    overwritten = np.zeros(len(rows), bool)
    if retracted and len(set(by_row)) > 1:
        overwritten[: by_row.index(by_row[-1])] = True
        assert trace.valid.tolist() == (~overwritten).tolist()
    else:
        assert trace.valid is None
    assert np.array_equal(trace.ids[~overwritten], rows[~overwritten])


def spread(runs: Any) -> list[int]:
    """The version of each token or row, of runs that cover all of them in order."""
    versions: list[int] = []
    for version, start, stop in runs:
        assert start == len(versions) < stop
        versions += [version] * (stop - start)
    return versions
