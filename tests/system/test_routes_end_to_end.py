"""Recorded routes reach the trainer aligned: over turns, over an interruption, over engine and trainer parallelism.

The engine of the multi-turn and interrupted requests computes in float32 with a correction bias that is perturbed by N(0, 0.02). So a
trace that was joined from several replies can be compared row by row with one pass over the same tokens, and the trainer, whose bias
is not perturbed, agrees with the engine's logprobs only if each row is forced onto its own experts.
"""

import asyncio
import base64
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moerl.config.schema import Engine
from moerl.convert.tiny import EOS, tiny_config, write_tiny
from moerl.rollout import store
from moerl.rollout.check import extend, to_sample, to_trace
from moerl.rollout.client import EngineClient
from moerl.rollout.sample import Prompt, Sample
from moerl.rollout.server import EngineServer
from moerl.routing.compare import differing
from moerl.routing.group import codec_of
from moerl.routing.layout import Layout
from moerl.routing.trace import Trace
from moerl.train.batch import Sequence
from tests.system.run_harness import ROOT, Finished, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS = 5
LAYOUT = Layout((1, 2, 3, 4), 16, 4)
CONVERSATIONS, TURNS, INTERRUPTED = 16, 3, 8
PROMPT, NEW = 12, 24
"""Tokens of a prompt or of a user's turn, and sampled tokens."""
ENOUGH, LONG = 8, 600
"""Tokens that an interrupted request must have sampled by then, and would have sampled."""
VERSION = 7
"""Of the engine's weights."""
SPLIT = ("--parallel.nproc_per_node", "4", "--parallel.pp", "2", "--parallel.ep", "2")


@dataclass(frozen=True)
class Turn:
    """What one request of a conversation brought.

    Attributes:
        start: first row that was asked for.
        cached: tokens that the engine found in its prefix cache.
        payload: bytes of routes on the wire.
        rows: of the delta.
    """

    start: int
    cached: int
    payload: int
    rows: int


@dataclass(frozen=True)
class Recorded:
    """One sequence put together from several replies.

    Attributes:
        tokens: int64[n].
        logprobs: float32[n - 1] of the labels that the engine sampled, NaN at those that it was given.
        fresh: the routes of one request that prefilled all the tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    trace: Trace
    fresh: Trace


@dataclass(frozen=True)
class Recordings:
    """Attributes:
    turns: of each conversation.
    partial, whole: the interrupted samples, before and after they were resumed.
    """

    conversations: list[Recorded]
    turns: list[list[Turn]]
    interrupted: list[Recorded]
    partial: list[Sample]
    whole: list[Sample]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trainer's folder, and the engine's with its perturbed bias."""
    root = tmp_path_factory.mktemp("turns")
    # a wider initialisation than a real model's, so that which experts run matters to the logprobs
    sizes = {"layers": LAYERS, "experts": LAYOUT.experts, "topk": LAYOUT.topk, "groups": 4, "group_topk": 2}
    for name in ("trainer", "engine"):
        write_tiny(root / name, tiny_config(initializer_range=0.1, **sizes), seed=3)
    weights = load_file(root / "engine" / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = weights[name] + rng.normal(0, 0.02, weights[name].shape).astype(np.float32)
    save_file(weights, root / "engine" / "model.safetensors", metadata={"format": "pt"})
    return root / "trainer", root / "engine"


@pytest.fixture(scope="module")
def recordings(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    settings = Engine(device="cpu", dtype="float32", max_running_requests=32, max_total_tokens=16384)
    # so that no request ends before it can be interrupted
    sampling = {"preferred_sampling_params": {"ignore_eos": True}}
    log = tmp_path_factory.mktemp("turns-log") / "engine.log"
    engine = EngineServer(folders[1], settings, sampling, log_path=log, version=VERSION, seed=1)
    engine.start()
    try:
        engine.wait_healthy()
        return asyncio.run(asyncio.wait_for(record(engine.url), 300))
    finally:
        engine.stop()


async def record(url: str) -> Recordings:
    rng = np.random.default_rng(5)

    def tokens() -> list[int]:
        return rng.integers(EOS + 1, 16, PROMPT).tolist()

    async with EngineClient(url, 60.0, 120.0) as client:
        talks = await asyncio.gather(*(converse(client, f"talk{i}", [tokens() for _ in range(TURNS)]) for i in range(CONVERSATIONS)))
        partial = await interrupt(client, [Prompt(i, "", tokens(), "") for i in range(INTERRUPTED)])
        whole = await asyncio.gather(*(resume(client, sample) for sample in partial))
        await client.flush_cache()  # or the passes to compare with would return the rows that were recorded before
        conversations = await asyncio.gather(*(compared(client, *parts) for parts, _ in talks))
        interrupted = await asyncio.gather(*(compared(client, *parts_of(sample)) for sample in whole))
    return Recordings(conversations, [turns for _, turns in talks], interrupted, partial, whole)


async def converse(client: EngineClient, name: str, users: list[list[int]]) -> tuple[tuple[np.ndarray, np.ndarray, Trace], list[Turn]]:
    """Turns in which the engine answers each user's tokens; every request asks only for rows that no earlier one had."""
    said: list[int] = []
    logprobs: list[np.ndarray] = []
    trace, turns = None, []
    for number, user in enumerate(users):
        sent, start = said + user, 0 if trace is None else trace.rows
        reply = await client.generate(sent, rid=f"{name}.{number}", max_new_tokens=NEW, temperature=1.0, routes=True, routes_from=start)
        answer = to_sample(reply, Prompt(0, "", sent, ""), number, LAYOUT, layers=LAYERS, routes=False, version=VERSION)
        delta = to_trace(reply, sent, LAYOUT, layers=LAYERS, start=start, version=VERSION)
        trace = delta if trace is None else trace.append(delta)
        payload = len(base64.b64decode(reply["meta_info"]["routed_experts"]))
        turns.append(Turn(start, reply["meta_info"]["cached_tokens"], payload, delta.rows))
        logprobs += [np.full(len(user), np.nan, np.float32), answer.logprob_array]
        said = sent + answer.response_tokens
    return (np.array(said), np.concatenate(logprobs)[1:], trace), turns


async def interrupt(client: EngineClient, prompts: list[Prompt]) -> list[Sample]:
    """Abort long generations while they run; what they had sampled by then."""
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0):
        options = {"max_new_tokens": LONG, "temperature": 1.0, "routes": True}
        names = {prompt.id: f"long{wait_s}.{prompt.id}" for prompt in prompts}
        running = [asyncio.create_task(client.generate(prompt.tokens, rid=names[prompt.id], **options)) for prompt in prompts]
        await asyncio.sleep(wait_s)
        while not all(task.done() for task in running):  # again, for requests that had not arrived by then
            await asyncio.gather(*(client.abort(name) for name in names.values()), asyncio.wait(running, timeout=0.5))
        checks = {"layers": LAYERS, "routes": True, "version": VERSION}
        replies = [task.result() for task in running]
        if all(len(one["output_ids"]) >= ENOUGH and one["meta_info"]["finish_reason"]["type"] == "abort" for one in replies):
            return [to_sample(one, prompt, 0, LAYOUT, **checks) for one, prompt in zip(replies, prompts, strict=True)]
    raise AssertionError(f"no request was aborted after it had sampled {ENOUGH} tokens, the last ones after {wait_s} s")


async def resume(client: EngineClient, sample: Sample) -> Sample:
    sent = sample.tokens.tolist()
    options = {"max_new_tokens": NEW, "temperature": 1.0, "routes": True, "routes_from": len(sent) - 1}
    reply = await client.generate(sent, rid=f"resumed.{sample.prompt_id}", **options)
    return extend(sample, reply, LAYOUT, layers=LAYERS, version=VERSION)


def parts_of(sample: Sample) -> tuple[np.ndarray, np.ndarray, Trace]:
    given = np.full(len(sample.prompt_tokens) - 1, np.nan, np.float32)
    return sample.tokens, np.concatenate([given, sample.logprob_array]), sample.load_trace()


async def compared(client: EngineClient, tokens: np.ndarray, logprobs: np.ndarray, trace: Trace) -> Recorded:
    """With the routes of one pass over all the tokens."""
    sent = tokens.tolist()
    reply = await client.generate(sent, rid=f"fresh.{trace.tokens_hash:x}", max_new_tokens=1, temperature=0.0, routes=True)
    assert reply["meta_info"]["cached_tokens"] < PROMPT
    fresh = to_trace(reply, sent, LAYOUT, layers=LAYERS, version=VERSION)
    return Recorded(tokens, logprobs, trace, fresh.slice(0, len(sent) - 1, tokens))


def test_a_new_turn_hits_the_prefix_cache_and_brings_only_its_own_rows(recordings: Recordings) -> None:
    row_bytes = 4 * LAYERS * LAYOUT.topk
    for first, *later in recordings.turns:
        assert (first.start, first.rows, first.payload) == (0, PROMPT + NEW - 1, row_bytes * first.rows)
        for number, turn in enumerate(later, 1):
            assert turn.start == number * (PROMPT + NEW) - 1
            assert turn.cached == turn.start
            assert turn.rows == PROMPT + NEW
            assert turn.payload == row_bytes * turn.rows


def test_a_resumed_request_keeps_what_was_sampled_before(recordings: Recordings) -> None:
    assert len(recordings.partial) == INTERRUPTED
    for before, whole in zip(recordings.partial, recordings.whole, strict=True):
        had = len(before.response_tokens)
        assert (before.finish_reason, whole.finish_reason) == ("abort", "length")
        assert ENOUGH <= had < LONG
        assert whole.response_tokens[:had] == before.response_tokens
        assert len(whole.response_tokens) == had + NEW
        assert whole.logprobs[: len(before.logprobs)] == before.logprobs
        assert whole.versions == [(VERSION, 0, had + NEW)]
        kept = before.load_trace()
        assert np.array_equal(whole.load_trace().ids[: kept.rows], kept.ids)


@pytest.mark.parametrize("kind", ["conversations", "interrupted"])
def test_no_row_of_a_joined_trace_is_misaligned(recordings: Recordings, kind: str) -> None:
    items: list[Recorded] = getattr(recordings, kind)
    for item in items:
        item.trace.check_tokens(item.tokens).check_complete().check_version(VERSION)
    wrong = [differing(item.trace.ids, item.fresh.ids) for item in items]
    shifted = np.concatenate([differing(np.roll(item.trace.ids, 1, axis=0), item.fresh.ids) for item in items])
    print(f"{kind}: {sum(map(np.sum, wrong))} of {sum(map(np.size, wrong))} decisions differ; one row off {shifted.mean():.3f} of them")
    assert len(shifted) >= 300
    # A near tie falls otherwise in a batch of another shape, at one in 100,000 decisions, and then changes later ones. A join that
    # is off would show in every sequence.
    off = [one.mean() for one in wrong if one.any()]
    assert len(off) <= 1
    assert max(off, default=0.0) < 0.25
    assert shifted.all(axis=1).mean() > 0.5


def test_the_split_trainer_agrees_on_joined_sequences(recordings: Recordings, folders: tuple[Path, Path], tmp_path: Path) -> None:
    items = [sequence(item) for item in (*recordings.conversations, *recordings.interrupted)]
    given, out = tmp_path / "sequences", tmp_path / "metrics.json"
    given.write_bytes(pickle.dumps(items))
    worker = str(Path(__file__).with_name("turns_worker.py"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", worker, str(folders[0]), str(given), str(out)]
    with running([*command, "pp=2,ep=2"], tmp_path, python_path=str(ROOT), output=tmp_path / "worker.out") as started:
        finished = started.finish(400)
    assert finished.status == 0, finished.output[-4000:]
    metrics = json.loads(out.read_text())
    print({name: metrics[name] for name in ("kl_natural", "kl_replay", "kl_shifted", "natural_flip_share", "replay_agreement")})
    assert metrics["response_tokens"] == sum(int(item.loss_mask.sum()) for item in items)
    assert metrics["replay_agreement"] == 1.0
    assert metrics["natural_flip_share"] > 0.05
    assert metrics["kl_natural"] > 1e-3
    assert metrics["kl_shifted"] > 1e-2
    assert metrics["kl_replay"] < 1e-9


def sequence(item: Recorded) -> Sequence:
    """The loss is on the tokens that the engine sampled."""
    sampled = ~np.isnan(item.logprobs)
    columns = {"advantages": sampled.astype(np.float32), "engine_logprobs": np.where(sampled, item.logprobs, np.float32(0))}
    return Sequence(item.tokens, sampled.astype(np.float32), item.trace.check_tokens(item.tokens).ids, columns)


@pytest.mark.parametrize(("tp", "codec"), [(1, "narrow"), (2, "set")])
def test_a_split_trainer_follows_what_a_bf16_engine_recorded(
    moerl: Callable[..., Finished], folders: tuple[Path, Path], tp: int, codec: str
) -> None:
    sizes = ("--rollout.prompts_per_step", "8", "--rollout.group_size", "8", "--rollout.max_new_tokens", "24", "--train.steps", "1")
    options = ("--model.path", str(folders[0]), "--train.dtype", "bfloat16", "--checkpoint.export_hf", "false", *sizes)
    recorded = moerl(f"engine-tp{tp}", *options, "--engine.tp", str(tp), "--rollout.trace_codec", codec, command="rollout")
    assert recorded.status == 0, recorded.output[-4000:]
    _, groups = store.load_step(recorded.folder / "rollouts", 0, store.make_header(folders[0], step=0, version=0))
    assert {codec_of(sample.trace).name for group in groups for sample in group.samples} == {codec}
    trained = moerl(f"split-tp{tp}", *options, *SPLIT, "--rollouts", str(recorded.folder))
    assert trained.status == 0, trained.output[-4000:]
    (step,) = (record for record in trained.metrics if record["step"] == 0)
    print({name: step[name] for name in ("kl_natural", "kl_replay", "natural_flip_share", "replay_agreement", "response_tokens")})
    assert step["response_tokens"] == sum(len(sample.response_tokens) for group in groups for sample in group.samples)
    assert step["replay_agreement"] == 1.0
    assert step["missing_routes_share"] == step["refused_routes_share"] == step["masked_share"] == 0.0
    assert step["natural_flip_share"] > 0.0
    assert step["kl_replay"] < step["kl_natural"] / 3
    assert trained.left == []
