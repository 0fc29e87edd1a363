"""From an engine's raw reply to a `Sample` that can prove itself, or an error that names the cause.

    reply (JSON) --decode_routes--> ids[row, moe_layer, k] --to_sample--> Sample with a Trace record
    reply to what follows --to_trace(start)--> the rows that come after; `Trace.append` or `extend` joins them

This is the only place where the base64 routes are decoded. Invariant (tuple): response token *i* was sampled from row
`prompt - 1 + i`, so that row carries the token's weight version; the prompt's rows carry the first token's.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from moerl.errors import RolloutError
from moerl.rollout.mask import SamplingMask, check, join, of_rows, to_bytes, unrestricted
from moerl.rollout.sample import Prompt, Sample
from moerl.routing.codec import NARROW, Codec
from moerl.routing.group import codec_of
from moerl.routing.layout import cut_runs, join_runs
from moerl.routing.trace import Layout, Trace, VersionRun, hash_tokens
from moerl.routing.validate import count_problem, route_problem


def to_sample(
    reply: dict[str, Any],
    prompt: Prompt,
    index: int,
    layout: Layout,
    *,
    layers: int,
    routes: bool,
    version: int | None = None,
    engine: int = 0,
    codec: Codec = NARROW,
    vocab: int | None = None,
) -> Sample:
    """Check one reply of `/generate` and convert it.

    Args:
        reply: with `return_logprob`, and `return_routed_experts` if `routes`.
        index: number of the sample within its group.
        layers: decoder layers of the model, dense ones included.
        version: the weight version that the engine was promised to serve; None accepts any.
        codec: how the routes are stored in the sample.
        vocab: size of the vocabulary, where the engine was asked to cut its distribution by top-p or top-k: the reply must then say which
            tokens it kept, and the sample's logprobs are those within them. None where it sampled from the whole.

    Raises:
        RolloutError: tokens, logprobs, sampling mask, routes and versions do not fit together.
    """
    name = f"sample {index} of prompt {prompt.id}"
    read = _read(reply, prompt.tokens, version, name, vocab)
    return Sample(
        prompt_id=prompt.id,
        index=index,
        prompt_tokens=prompt.tokens,
        response_tokens=read.tokens,
        logprobs=read.logprobs,
        trace=_trace(read, 0, layout, layers, name).to_bytes(codec) if routes else b"",
        versions=read.versions,
        text=read.text,
        finish_reason=read.finish_reason,
        engine=engine,
        mask=_record(read.mask),
    )


def to_trace(
    reply: dict[str, Any],
    prompt_tokens: Sequence[int],
    layout: Layout,
    *,
    layers: int,
    start: int = 0,
    version: int | None = None,
    name: str = "reply",
) -> Trace:
    """Check one reply and return its routes from row `start` on: those of a whole request, or what a new turn adds to earlier ones.

    A turn's last sampled token was never an input, so the next turn's rows start with that token's: at `rows` of the trace so far,
    to which `Trace.append` joins them.

    Args:
        prompt_tokens: int[p], all tokens that were sent, earlier turns included.
        layers: decoder layers of the model, dense ones included.
        start: first row that was asked for (`routes_from` of the request).
        version: as for `to_sample`.
        name: how to call the reply in errors.

    Raises:
        RolloutError: tokens, logprobs, routes and versions do not fit together, or `start` leaves out a sampled token's row.
    """
    return _trace(_read(reply, prompt_tokens, version, name), start, layout, layers, name)


def extend(
    sample: Sample, reply: dict[str, Any], layout: Layout, *, layers: int, version: int | None = None, vocab: int | None = None
) -> Sample:
    """A sample that was interrupted, and what a later request added to it.

    The request's prompt is all of `sample.tokens`, and its `routes_from` the rows that the sample has (`len(sample.tokens) - 1`). What
    the sample holds stays as it is: each of its tokens keeps the logprob, mask, row and version of the pass that sampled it.

    Args:
        layers: decoder layers of the model, dense ones included.
        version: that the added tokens must come from; None accepts any.
        vocab: as for `to_sample`.

    Returns:
        The whole sample, its routes stored as the given one's (none, if it has none). Its text is that of both parts in turn.

    Raises:
        RolloutError: the sample had ended, its own mask is not that of its tokens, or the reply does not go on where it stopped.
        TraceError: the sample's own routes do not prove themselves.
    """
    name = f"sample {sample.index} of prompt {sample.prompt_id}"
    if sample.finish_reason == "stop":
        raise RolloutError(f"{name} ended with its stop token, so nothing can be added to it; resume samples that were cut off")
    read = _read(reply, sample.tokens.tolist(), version, name, vocab)
    trace = b""
    if sample.trace:
        before = sample.load_trace()
        trace = before.append(_trace(read, before.rows, layout, layers, name)).to_bytes(codec_of(sample.trace))
    had = tuple(VersionRun(*run) for run in sample.versions)
    return msgspec.structs.replace(
        sample,
        response_tokens=sample.response_tokens + read.tokens,
        logprobs=sample.logprobs + read.logprobs,
        trace=trace,
        versions=list(join_runs(had, len(sample.response_tokens), tuple(VersionRun(*run) for run in read.versions))),
        text=sample.text + read.text,
        finish_reason=read.finish_reason,
        mask=_record(join([sample.load_mask(), read.mask])),
    )


@dataclass(frozen=True)
class _Reply:
    """One reply whose tokens, logprobs, sampling mask and versions fit together.

    Attributes:
        prompt: int[p] tokens that were sent.
        tokens: int[r] that came back.
        logprobs: raw little-endian float32[r].
        mask: of the r tokens.
        versions: (weight version, start, stop) runs over the r tokens.
        meta: the reply's `meta_info`.
    """

    prompt: Sequence[int]
    tokens: list[int]
    logprobs: bytes
    mask: SamplingMask
    versions: list[tuple[int, int, int]]
    text: str
    finish_reason: str
    meta: dict[str, Any]


def _read(reply: dict[str, Any], prompt: Sequence[int], version: int | None, name: str, vocab: int | None = None) -> _Reply:
    try:
        meta = reply["meta_info"]
        tokens, pairs, finish = reply["output_ids"], meta["output_token_logprobs"], meta["finish_reason"]["type"]
        prompt_size, text, spans = meta["prompt_tokens"], reply["text"], meta["weight_versions"]
    except (KeyError, TypeError) as error:
        raise RolloutError(
            f"{name}: the engine's reply lacks {error}; expected text, output_ids and meta_info with prompt_tokens, "
            "output_token_logprobs, finish_reason and weight_versions (SGLang >= 0.5.23, tokenizer not skipped)"
        ) from error
    if prompt_size != len(prompt):
        raise RolloutError(f"{name}: the engine saw {prompt_size} prompt tokens, {len(prompt)} were sent")
    if not tokens:
        raise RolloutError(f"{name}: the engine returned no tokens (finish reason {finish}); was the request aborted while it waited?")
    if [pair[1] for pair in pairs] != tokens:
        raise RolloutError(f"{name}: logprobs are of other tokens than the response ({len(pairs)} logprobs, {len(tokens)} tokens)")
    values, mask = [pair[0] for pair in pairs], unrestricted(len(tokens))
    if vocab is not None:
        values, mask = _truncated(meta, tokens, vocab, name)
    return _Reply(prompt, tokens, _logprobs(values, name), mask, _versions(spans, len(tokens), name, version), text, finish, meta)


def _truncated(meta: dict[str, Any], tokens: list[int], vocab: int, name: str) -> tuple[list[float], SamplingMask]:
    """(logprobs within the tokens that the engine kept, which these are)"""
    try:
        values, rows = meta["output_token_sampling_logprobs"], meta["output_token_sampling_mask"]
    except KeyError as error:
        raise RolloutError(
            f"{name}: the engine was to cut its distribution by top-p or top-k, but its reply lacks {error}; expected meta_info with "
            "output_token_sampling_mask and output_token_sampling_logprobs (SGLang >= 0.5.23, return_sampling_mask sent)"
        ) from error
    if not len(values) == len(rows) == len(tokens):
        got = f"{len(values)} logprobs and {len(rows)} rows of a sampling mask"
        raise RolloutError(f"{name}: expected one logprob and one row of kept tokens for each of {len(tokens)} response tokens, got {got}")
    mask = check(of_rows(rows), np.asarray(tokens), vocab, name)
    if len(empty := np.flatnonzero(mask.lengths == 0)):
        raise RolloutError(f"{name}: the engine kept no token at all where it sampled response token {empty[0]} ({len(empty)} such rows)")
    return values, mask


def _record(mask: SamplingMask) -> bytes:
    """As a sample stores it: nothing, where nothing is restricted."""
    return to_bytes(mask) if len(mask.ids) else b""


def _trace(read: _Reply, start: int, layout: Layout, layers: int, name: str) -> Trace:
    """Rows from `start` on."""
    if not 0 <= start < len(read.prompt):
        raise RolloutError(
            f"{name}: rows from {start} on leave out that of the first sampled token; with {len(read.prompt)} prompt tokens ask for rows "
            f"from 0..{len(read.prompt) - 1} on"
        )
    stop = len(read.prompt) + len(read.tokens) - 1
    ids = decode_routes(read.meta, rows=stop - start, layout=layout, layers=layers, start=start, name=name)
    inputs = np.asarray([*read.prompt, *read.tokens[:-1]], dtype=np.int64)[start:]
    runs = cut_runs(row_runs(read.versions, len(read.prompt)), start, stop)
    return Trace(ids, layout, hash_tokens(inputs, start), runs, start).check()


def decode_routes(meta: dict[str, Any], *, rows: int, layout: Layout, layers: int, start: int = 0, name: str = "reply") -> np.ndarray:
    """Routes of one reply: uint8|uint16[rows, moe_layer, k], checked.

    Args:
        meta: the reply's `meta_info`; its `routed_experts` is base64 of little-endian int32[row, layer, k], all layers.
        rows: expected rows (prompt + response - 1, less `start`).
        layers: decoder layers of the model, dense ones included.
        start: place in the sequence of the first row.

    Raises:
        RolloutError: no routes, undecodable, or other rows than expected; routes of dense layers that are not empty; ids
            out of range, repeated or missing.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        if meta["finish_reason"]["type"] == "abort":
            raise RolloutError(f"{name}: aborted while it waited, so the engine has no routes for it; generate it again")
        raise RolloutError(
            f"{name}: the engine returned no routes; start it with enable_return_routed_experts (--enable-return-routed-experts) and send "
            "requests to the engine itself, not through a router that drops the field"
        )
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError) as error:
        raise RolloutError(f"{name}: routed_experts is not base64 ({error})") from error
    if len(raw) % 4:
        raise RolloutError(f"{name}: routed_experts holds {len(raw)} bytes, no whole number of int32; was the reply cut short?")
    if problem := count_problem(len(raw) // 4, rows=rows, layers=layers, layout=layout):
        raise RolloutError(f"{name}{f', rows from {start} on' if start else ''}: {problem}")
    ids = np.frombuffer(raw, dtype="<i4").reshape(rows, layers, layout.topk)
    dense = sorted(set(range(layers)) - set(layout.layers))
    if dense and ids[:, dense].any():
        layer = dense[int(np.flatnonzero(ids[:, dense].any(axis=(0, 2)))[0])]
        raise RolloutError(f"{name}: layer {layer} is dense in this model but has routes; is the engine serving another model?")
    moe = ids[:, list(layout.layers)]
    narrow = moe.astype(layout.dtype)
    # Narrowing may only happen to what is in range, or 256 becomes 0; the narrow form is then checked faster.
    wraps = bool(len(moe)) and (moe.min() < 0 or moe.max() >= layout.experts)
    if problem := route_problem(moe if wraps else narrow, layout, numbers=start + np.arange(rows)):
        raise RolloutError(f"{name}: {problem}")
    return narrow


def row_runs(versions: list[tuple[int, int, int]], prompt_size: int) -> tuple[VersionRun, ...]:
    """Version runs over response tokens as runs over the trace's rows: token *i* came from row `prompt_size - 1 + i`."""
    shift = prompt_size - 1
    return tuple(VersionRun(version, 0 if start == 0 else start + shift, stop + shift) for version, start, stop in versions)


def _versions(spans: Any, tokens: int, name: str, promised: int | None) -> list[tuple[int, int, int]]:
    """(version, start, stop) runs that cover the response tokens once, in order; equal neighbours are merged."""
    runs: list[tuple[int, int, int]] = []
    for span in spans:
        text, start, stop = str(span["version"]), span["start"], span["end"]
        if not text.isdecimal():
            raise RolloutError(
                f"{name}: the engine names its weights {text!r}, expected a whole number; it was started or updated without a version"
            )
        if start != (runs[-1][2] if runs else 0) or stop <= start:
            raise RolloutError(f"{name}: weight versions {spans} do not cover the {tokens} response tokens once, in order")
        if runs and runs[-1][0] == int(text):
            runs[-1] = (runs[-1][0], runs[-1][1], stop)
        else:
            runs.append((int(text), start, stop))
    if not runs or runs[-1][2] != tokens:
        raise RolloutError(f"{name}: weight versions {spans} do not cover the {tokens} response tokens once, in order")
    if promised is not None and (other := sorted({run[0] for run in runs} - {promised})):
        raise RolloutError(f"{name}: the engine was to serve weight version {promised}, but sampled with {other}; was an update missed?")
    return runs


def _logprobs(values: Sequence[float | None], name: str) -> bytes:
    """Little-endian float32."""
    for position, value in enumerate(values):
        if value is None or not math.isfinite(value) or value > 1e-4:
            raise RolloutError(f"{name}: logprob {value} of response token {position} is not a finite number <= 0")
    return np.asarray(values, dtype="<f4").tobytes()
