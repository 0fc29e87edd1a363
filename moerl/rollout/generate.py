"""Generation of groups: prompts in, checked groups of completions out, spread over the engines.

One HTTP request carries one group, so that its completions share the prompt's prefill and a request is small enough to
balance engines. Groups come back in the order of the prompts, whichever finishes first. The first failure ends the call:
the other requests are cancelled here and aborted in the engines.

A weight update may interrupt what runs (`sync.interrupt`), and the tuple (token, logprob, route, version) survives it:

    abort     a completion that was cut off is resumed by a new request with all its tokens; what it has stays as it is, and only the
              rows after it are asked for. A cut-off reply without routes (the request was waiting) is dropped and asked for again.
    in_place  nothing happens here: SGLang keeps the rows, as it keeps the keys and values
    retract   SGLang recomputes the cache under the new weights, and overwrites the rows of older tokens whose logprobs stay. Those rows
              count as missing; `replay.missing` says what becomes of them.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from moerl.errors import EngineError, MoerlError, RolloutError, TraceError
from moerl.rollout.check import extend, to_sample
from moerl.rollout.client import EngineClient
from moerl.rollout.sample import Group, Prompt, Sample
from moerl.routing.codec import NARROW, Codec
from moerl.routing.group import codec_of
from moerl.routing.trace import Layout

logger = logging.getLogger(__name__)

_MAX_RESUMES = 64
"""A completion that is cut off more often than this is no longer the work of weight updates."""


@dataclass(frozen=True)
class Sampling:
    """What is asked of every completion.

    Attributes:
        temperature: 0 is greedy.
        routes: whether the rows of routes are returned.
        layers: decoder layers of the model, dense ones included.
        version: weight version that every token must come from; None accepts any.
        shares: prefixes are shared among requests that name the same version here.
        retracted: requests that span weight versions were recomputed at the update, see the module.
        codec: how the routes are stored in the samples.
        top_p, top_k: what the engine cuts its distribution to; 1 and -1 leave it whole.
        vocab: size of the model's vocabulary; needed with top_p or top_k, whose masks are checked against it.
    """

    max_new_tokens: int
    temperature: float
    routes: bool
    layout: Layout
    layers: int
    version: int | None = None
    shares: int | None = None
    retracted: bool = False
    codec: Codec = NARROW
    top_p: float = 1.0
    top_k: int = -1
    vocab: int = 0

    @property
    def truncates(self) -> bool:
        """Whether samples carry the tokens that were kept at each position, and logprobs within them."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def checks(self) -> dict[str, Any]:
        """Options of `to_sample` and `extend`."""
        return {"layers": self.layers, "version": self.version, "vocab": self.vocab if self.truncates else None}

    def request(self, used: int = 0, **options: Any) -> dict[str, Any]:
        """Options of a request for what is left after `used` tokens."""
        key = self.version if self.shares is None else self.shares
        common = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "routes": self.routes, "version": key}
        return {"max_new_tokens": self.max_new_tokens - used, **common, **options}


async def generate_groups(
    clients: Sequence[EngineClient], prompts: Sequence[Prompt], sampling: Sampling, *, group_size: int, tag: str = "group"
) -> list[Group]:
    """Sample `group_size` completions of every prompt.

    Args:
        clients: one per engine; prompts are dealt out in turn.
        tag: begins the request ids `tag.position.index`; calls that overlap need different tags.

    Raises:
        EngineError: a request failed; the first failure, with the other requests aborted.
        RolloutError, TraceError: a reply does not prove itself.
    """
    if not clients:
        raise EngineError("no engine to generate with")

    running: dict[int, list[str]] = {}

    async def one(position: int, prompt: Prompt) -> Group:
        engine = position % len(clients)
        rids = running[position] = [f"{tag}.{position}.{index}" for index in range(group_size)]
        samples, failed, _ = await _finished(clients[engine], prompt, range(group_size), rids, sampling, engine, asyncio.Event())
        if failed:
            raise next(error for error, _ in failed.values())
        del running[position]
        return Group(prompt.id, prompt.answer, samples)

    tasks = [asyncio.create_task(one(position, prompt)) for position, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await _abandon([(clients[position % len(clients)], rid) for position, rids in running.items() for rid in rids], tasks)
        raise


class Outcome(msgspec.Struct):
    """What became of some completions of one prompt.

    Attributes:
        samples: those that ended, in the order in which they did.
        failed: number of a completion -> (why it proves nothing, tokens spent on it).
        cut: number of a completion that was not needed any more -> tokens spent on it.
    """

    samples: list[Sample]
    failed: dict[int, tuple[str, int]]
    cut: dict[int, int]

    @property
    def tokens(self) -> int:
        """Response tokens that were sampled for all of this."""
        lengths = [len(sample.response_tokens) for sample in self.samples]
        return sum(lengths) + sum(tokens for _, tokens in self.failed.values()) + sum(self.cut.values())


async def generate_some(
    client: EngineClient,
    prompt: Prompt,
    sampling: Sampling,
    *,
    indices: Sequence[int],
    keep: int,
    rid: str,
    engine: int = 0,
    enough: asyncio.Event | None = None,
) -> Outcome:
    """Begin the completions of a prompt that have these numbers, and return when `keep` of them have ended; the others are aborted.

    Args:
        rid: begins the request ids, `rid.number`; requests that run at the same time need different ones.
        enough: setting it aborts at any time what is still running; what that had sampled is in the outcome as cut.

    Raises:
        EngineError: a request failed, with the others aborted. What a single reply fails to prove is in the outcome instead.
    """
    rids, enough = [f"{rid}.{index}" for index in indices], enough or asyncio.Event()
    outcome = Outcome([], {}, {})
    # One request carries all of them, unless some will be aborted while others go on.
    parts = [slice(None)] if keep >= len(indices) else [slice(at, at + 1) for at in range(len(indices))]
    named = [rids[part] for part in parts]
    tasks = [
        asyncio.create_task(_finished(client, prompt, indices[part], names, sampling, engine, enough))
        for part, names in zip(parts, named, strict=True)
    ]
    pending, told, aborted = set(tasks), asyncio.create_task(enough.wait()), False
    try:
        while pending:
            await asyncio.wait(pending if aborted else {*pending, told}, return_when=asyncio.FIRST_COMPLETED)
            done = {task for task in pending if task.done()}
            pending -= done
            for samples, failed, cut in [task.result() for task in tasks if task in done]:
                outcome.samples += samples
                outcome.failed |= {index: (str(error), tokens) for index, (error, tokens) in failed.items()}
                outcome.cut |= cut
            if len(outcome.samples) >= keep:
                enough.set()
            if enough.is_set() and not aborted:
                aborted = True
                await asyncio.gather(
                    *(client.abort(name) for names, task in zip(named, tasks, strict=True) if task in pending for name in names)
                )
    except BaseException:
        await _abandon([(client, name) for names in named for name in names], tasks)
        raise
    finally:
        told.cancel()
    return outcome


async def _finished(
    client: EngineClient,
    prompt: Prompt,
    indices: Sequence[int],
    rids: list[str],
    sampling: Sampling,
    engine: int,
    enough: asyncio.Event,
) -> tuple[list[Sample], dict[int, tuple[MoerlError, int]], dict[int, int]]:
    """One request for several completions, of which those that are cut off are resumed one by one.

    Args:
        rids: ids of the requests that run, kept up to date.
        enough: once set, nothing is resumed any more.

    Returns:
        (those that ended, number -> (why it proves nothing, its tokens), number -> tokens of one that was not resumed).
    """
    replies = await client.generate_many([prompt.tokens] * len(indices), rids=rids, **sampling.request())
    complete = [
        _complete(client, reply, prompt, index, rids, at, sampling, engine, enough)
        for at, (index, reply) in enumerate(zip(indices, replies, strict=True))
    ]
    samples, failed, cut = [], {}, {}
    for index, reply, found in zip(indices, replies, await asyncio.gather(*complete, return_exceptions=True), strict=True):
        match found:
            case RolloutError() | TraceError():
                failed[index] = found, len(reply["output_ids"])
            case BaseException():
                raise found
            case int():
                cut[index] = found
            case _:
                samples.append(found)
    return samples, failed, cut


async def _complete(
    client: EngineClient,
    reply: dict[str, Any],
    prompt: Prompt,
    index: int,
    rids: list[str],
    at: int,
    sampling: Sampling,
    engine: int,
    enough: asyncio.Event,
) -> Sample | int:
    """The sample that a reply begins, resumed until it has ended by itself; the number of tokens spent on it, if that was not to be.

    Args:
        rids, at: `rids[at]` is the id of the sample's request; every new request changes it.
    """
    sample, rid, spent = None, rids[at], 0
    for attempt in range(_MAX_RESUMES):
        spent += len(reply["output_ids"])
        if not _is_lost(reply, sampling):
            if sample is None:
                options = {"routes": sampling.routes, "codec": sampling.codec, **sampling.checks}
                sample = to_sample(reply, prompt, index, sampling.layout, engine=engine, **options)
            else:
                sample = extend(sample, reply, sampling.layout, **sampling.checks)
        used = 0 if sample is None else len(sample.response_tokens)
        if sample is not None and sample.finish_reason == "abort" and used == sampling.max_new_tokens:
            sample = msgspec.structs.replace(sample, finish_reason="length")
        if sample is not None and sample.finish_reason != "abort":
            return _without_overwritten(sample) if sampling.retracted else sample
        if enough.is_set():
            return spent
        tokens = prompt.tokens if sample is None else sample.tokens.tolist()
        rids[at] = f"{rid}.{attempt + 1}"
        options = sampling.request(used, routes_from=0 if sample is None else len(tokens) - 1)
        reply = await client.generate(tokens, rid=rids[at], **options)
    raise EngineError(f"{client.url}: request {rid} was cut off {_MAX_RESUMES} times; who aborts requests at that engine?")


def _is_lost(reply: dict[str, Any], sampling: Sampling) -> bool:
    """Whether a cut-off reply holds nothing to keep: no token, or tokens whose routes or mask the engine dropped while it waited."""
    meta = reply["meta_info"]
    wanted = {"routed_experts": sampling.routes, "output_token_sampling_mask": sampling.truncates}
    dropped = any(asked and not meta.get(name) for name, asked in wanted.items())
    return meta["finish_reason"]["type"] == "abort" and (not reply["output_ids"] or dropped)


def _without_overwritten(sample: Sample) -> Sample:
    """The sample without the rows of tokens that are older than the last time its cache was recomputed."""
    if len(sample.versions) == 1 or not sample.trace:
        return sample
    trace = sample.load_trace()
    overwritten = np.zeros(trace.rows, bool)
    overwritten[: trace.versions[-1].start] = True
    return msgspec.structs.replace(sample, trace=trace.without(overwritten).to_bytes(codec_of(sample.trace)))


async def _abandon(requests: Sequence[tuple[EngineClient, str]], tasks: Sequence[asyncio.Task[Group]]) -> None:
    """Abort what runs, one by one: an engine ignores ids that it doesn't know, prefixes of known ones too."""
    for task in tasks:
        task.cancel()  # first: what is aborted must not be resumed
    for result in await asyncio.gather(*(client.abort(rid) for client, rid in requests), return_exceptions=True):
        if isinstance(result, EngineError):
            # The failure that led here is the one to report; an engine that is gone has nothing left to abort.
            logger.info("abort after a failed generation: %s", result)
    await asyncio.gather(*tasks, return_exceptions=True)
