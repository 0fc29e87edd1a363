"""Records of other systems, brought into the capture format: `moerl report --import KIND FILE... --model CONFIG -o RUN`.

    sglang    JSON or JSONL of /generate replies: `meta_info.routed_experts`, base64 of int32[rows, decoder layers, k]
    vllm      JSON or JSONL of replies whose `choices` hold `routed_experts`, base64 of a .npy or nested lists, with `prompt_routed_experts`
              beside `choices` where prompts are apart; or .npy files, one per request: integer[rows, layers, k]
    megatron  router_trace_rank*.jsonl of Megatron-core's router tracer (`--moe-routing-trace-path`)

All are one-sided: ids are stored as `engine_ids`, nothing of a trainer is. A record may carry `prompt_id`, `sample`, `reward` and
`input_ids` (of the prompt) beside what its system wrote; without them requests are numbered in order, and tokens that a reply does
not name are -1.
Every record of every file is read before anything is written; all that is wrong with them is one error.
"""

import base64
import binascii
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moerl.errors import ReportError
from moerl.models import ModelSpec, read_spec
from moerl.report import capture
from moerl.report.capture import Meta, Rows

_SHOWN = 20


class _Known(msgspec.Struct, kw_only=True):
    """What a record may say beside what its system wrote."""

    prompt_id: int | None = None
    sample: int | None = None
    reward: float | None = None


_Scored = list[tuple[float | None, int, Any]]


class _SglangMeta(msgspec.Struct):
    routed_experts: str
    prompt_tokens: int | None = None
    output_token_logprobs: _Scored | None = None
    input_token_logprobs: _Scored | None = None
    weight_version: str | int | None = None


class _Sglang(_Known):
    meta_info: _SglangMeta
    output_ids: list[int] | None = None
    input_ids: list[int] | None = None


class _ChatToken(msgspec.Struct):
    logprob: float


class _VllmLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None
    content: list[_ChatToken] | None = None


class _Choice(msgspec.Struct):
    routed_experts: str | list[list[list[int]]]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _VllmLogprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Vllm(_Known):
    choices: list[_Choice]
    prompt_routed_experts: str | list[list[list[int]]] | None = None
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Traced(msgspec.Struct):
    step: int
    layer: int
    top_indices: list[list[int]]
    block: str = "decoder"
    rank: int = 0


@dataclass(frozen=True)
class Request:
    """One sequence of another system.

    Attributes:
        ids: integer[rows, moe layer, k]; start: position of the first row.
        tokens: int[n] of prompt and response, -1 where unknown, n >= start + rows; prompt: how many of them are the prompt.
        logprobs: float[n - prompt] of the response, NaN where unknown.
        version: of the weights, -1 if unknown.
    """

    ids: np.ndarray
    start: int
    tokens: np.ndarray
    prompt: int
    logprobs: np.ndarray
    prompt_id: int = 0
    sample: int = 0
    reward: float = float("nan")
    version: int = -1


def import_records(kind: str, files: Sequence[Path], model: Path, run: Path, step: int) -> Path:
    """Read files of one kind and write recordings into `run`; the folder of the recordings.

    Args:
        kind: one of `KINDS`. model: the model's folder or its config.json.
        step: number of the recording; a Megatron trace brings its own steps, and this is added to them.

    Raises:
        ReportError: files or records that are wrong, all of them. ModelError: the model cannot be read.
    """
    folder = model.parent if model.name == "config.json" else model
    spec = read_spec(folder)
    problems = [f"{path} does not exist" for path in files if not path.exists()]
    by_step = READERS[kind]([path for path in files if path.exists()], spec, problems)
    if not problems and not any(by_step.values()):
        problems.append("no record of routes in " + ", ".join(map(str, files)))
    if problems:
        shown = problems[:_SHOWN] + ([f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        raise ReportError(f"records of {kind} cannot be imported" + "".join(f"\n  - {one}" for one in shown))
    for number, requests in by_step.items():
        capture.write(run / capture.FOLDER, _meta(spec, kind, step + number, folder), map(_rows, requests))
    return run / capture.FOLDER


def _meta(spec: ModelSpec, kind: str, step: int, folder: Path) -> Meta:
    groups, chosen = (spec.megatron.get(name) or 1 for name in ("moe_router_num_groups", "moe_router_group_topk"))
    return Meta(
        step=step,
        layers=spec.moe_layers,
        experts=spec.experts,
        topk=spec.topk,
        groups=groups,
        group_topk=chosen,
        source=f"import:{kind}",
        model=str(folder),
    )


def _rows(request: Request) -> Rows:
    count = len(request.ids)
    position = request.start + np.arange(count)
    tokens = np.append(request.tokens, -1)
    response = (position + 1 >= request.prompt) & (position + 1 < len(request.tokens)) & (request.prompt > 0)
    nothing = np.full(count, np.nan, np.float32)
    logprobs = nothing.copy()
    logprobs[response] = request.logprobs[position[response] + 1 - request.prompt]
    return Rows(
        prompt_id=np.full(count, request.prompt_id),
        sample=np.full(count, request.sample),
        position=position,
        token=tokens[position],
        next_token=tokens[position + 1],
        response=response,
        version=np.full(count, request.version),
        reward=np.full(count, request.reward, np.float32),
        engine_logprob=logprobs,
        natural_logprob=nothing,
        r2_logprob=nothing,
        replay_logprob=nothing,
        engine_ids=request.ids,
    )


def _read_sglang(files: Sequence[Path], spec: ModelSpec, problems: list[str]) -> dict[int, list[Request]]:
    found = []
    hint = "start the server with --enable-return-routed-experts, and ask with return_routed_experts: true"
    for where, reply, number, sample in _replies(files, _Sglang, hint, problems):
        meta = reply.meta_info
        raw = _base64(meta.routed_experts, where, problems)
        if raw is None:
            continue
        if len(raw) % (spec.layers * spec.topk * 4):
            shape = f"int32[rows, {spec.layers} layers, top-{spec.topk}]"
            problems.append(f"{where}: {len(raw)} bytes of {shape} are no whole number of rows; is it this model?")
            continue
        ids = _moe(np.frombuffer(raw, "<i4").reshape(-1, spec.layers, spec.topk), spec, where, problems)
        scored = meta.output_token_logprobs or []
        outputs = reply.output_ids or [entry[1] for entry in scored]
        prompt = reply.input_ids or [entry[1] for entry in meta.input_token_logprobs or []]
        length = len(prompt) if meta.prompt_tokens is None else meta.prompt_tokens
        if reply.input_ids and len(prompt) != length:
            problems.append(f"{where}: {len(prompt)} input_ids, but meta_info.prompt_tokens is {length}")
            continue
        prompt = prompt if len(prompt) == length else [-1] * length  # logprobs of a part of the prompt don't name all of it
        version = str(meta.weight_version)
        request = _request(ids, prompt, outputs, [entry[0] for entry in scored], where, problems)
        if request:
            found.append(_named(request, reply, number, sample, int(version) if version.isdigit() else -1))
    return {0: found}


def _read_vllm(files: Sequence[Path], spec: ModelSpec, problems: list[str]) -> dict[int, list[Request]]:
    found = []
    arrays = [path for path in files if path.suffix == ".npy"]
    for number, path in enumerate(arrays):
        ids = _array(path.read_bytes(), str(path), problems)
        request = _request(_moe(ids, spec, str(path), problems), [], [], [], str(path), problems) if ids is not None else None
        found += [_named(request, _Known(), number, 0)] if request else []
    hint = "start the server with --enable-return-routed-experts"
    for where, reply, number, _ in _replies([path for path in files if path.suffix != ".npy"], _Vllm, hint, problems):
        for sample, choice in enumerate(reply.choices):
            parts = [part for part in (reply.prompt_routed_experts, choice.routed_experts) if part is not None]
            decoded = [ids for part in parts if (ids := _vllm_ids(part, where, problems)) is not None]
            layers = [ids for part in decoded if (ids := _moe(part, spec, where, problems)) is not None]
            if len(layers) < len(parts):
                continue
            prompt = choice.prompt_token_ids or reply.prompt_token_ids or [-1] * (reply.usage.prompt_tokens if reply.usage else 0)
            given = choice.logprobs or _VllmLogprobs()
            logprobs = given.token_logprobs or [token.logprob for token in given.content or []]
            request = _request(np.concatenate(layers), prompt, choice.token_ids or [], logprobs, where, problems)
            found += [_named(request, reply, len(arrays) + number, sample)] if request else []
    return {0: found}


def _read_megatron(files: Sequence[Path], spec: ModelSpec, problems: list[str]) -> dict[int, list[Request]]:
    paths = [one for path in files for one in (sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path])]
    passes: dict[tuple[int, int], dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for where, record, _, _ in _replies(paths, _Traced, "expected records of Megatron-core's router tracer", problems):
        ids = _numbers(record.top_indices, where, problems)
        if record.block == "decoder" and ids is not None:  # layers of MTP heads are no decoder layers
            passes[record.step, record.rank][record.layer].append(ids)
    steps: dict[int, list[Request]] = defaultdict(list)
    for (step, rank), by_layer in passes.items():
        where = f"step {step} of rank {rank}"
        if sorted(by_layer) != list(spec.moe_layers):
            problems.append(f"{where}: layers {sorted(by_layer)}, but the model's MoE layers are {list(spec.moe_layers)}; one stage only?")
            continue
        microbatches = list(zip(*(by_layer[layer] for layer in spec.moe_layers), strict=False))
        for number, layers in enumerate(microbatches):
            if len({ids.shape for ids in layers}) > 1:
                problems.append(f"{where}, microbatch {number}: layers have {sorted({ids.shape for ids in layers})} tokens and experts")
                continue
            request = _request(_moe(np.stack(layers, axis=1), spec, where, problems), [], [], [], where, problems)
            steps[step] += [_named(request, _Known(), rank, number)] if request else []
    return steps


READERS = {"sglang": _read_sglang, "vllm": _read_vllm, "megatron": _read_megatron}
KINDS = tuple(READERS)


def _replies(files: Sequence[Path], kind: type, hint: str, problems: list[str]) -> Iterator[tuple[str, Any, int, int]]:
    """(where, record of `kind`, number of the request, number of the sample within it); a list inside a line is one prompt's samples."""
    number = 0
    for path in files:
        for where, record in _records(path, problems):
            for sample, reply in enumerate(record if isinstance(record, list) else [record]):
                try:
                    yield where, msgspec.convert(reply, kind), number, sample
                except msgspec.ValidationError as error:
                    problems.append(f"{where}: {error}; {hint}")
            number += 1


def _records(path: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Records of a JSON file (a list's entries, or the one object) or of a JSONL file, with their place."""
    raw = path.read_bytes()
    try:
        whole = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path}:{number}", msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    problems.append(f"{path}:{number} is not JSON: {error}")
        return
    entries = whole if isinstance(whole, list) else [whole]
    yield from ((f"{path}[{number}]", entry) for number, entry in enumerate(entries))


def _base64(text: str, where: str, problems: list[str]) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        problems.append(f"{where}: routed_experts is not base64: {error}")
        return None


def _vllm_ids(value: Any, where: str, problems: list[str]) -> np.ndarray | None:
    if isinstance(value, str):
        raw = _base64(value, where, problems)
        return _array(raw, where, problems) if raw is not None else None
    return _numbers(value, where, problems)


def _array(raw: bytes, where: str, problems: list[str]) -> np.ndarray | None:
    try:
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        problems.append(f"{where}: not a .npy array: {error}")
        return None


def _numbers(value: Any, where: str, problems: list[str]) -> np.ndarray | None:
    try:
        return np.array(value, np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        problems.append(f"{where}: ids are no array of whole numbers: {error}")
        return None


def _moe(ids: np.ndarray, spec: ModelSpec, where: str, problems: list[str]) -> np.ndarray | None:
    """The MoE layers of integer[rows, all or MoE layers, k]; a decision of -1 alone (not recorded) becomes 0 alone."""
    counts = {spec.layers, len(spec.moe_layers)}
    if ids.ndim != 3 or ids.shape[1] not in counts or ids.shape[2] != spec.topk or ids.dtype.kind not in "iu":
        expected = " or ".join(map(str, sorted(counts)))
        problems.append(f"{where}: expected integers [rows, {expected} layers, top-{spec.topk}], got {ids.dtype}{list(ids.shape)}")
        return None
    ids = ids[:, list(spec.moe_layers)] if ids.shape[1] == spec.layers else ids
    ids = np.where((ids == -1).all(axis=2, keepdims=True), 0, ids)
    if ids.size and (ids.min() < 0 or ids.max() >= spec.experts):
        problems.append(f"{where}: expected expert ids 0..{spec.experts - 1}, got {ids.min()}..{ids.max()}")
        return None
    return ids.astype(np.uint16)


def _request(
    ids: np.ndarray | None, prompt: list[int], outputs: list[int], logprobs: Sequence[float | None], where: str, problems: list[str]
) -> Request | None:
    """A checked sequence, unnamed; None if something is wrong with it, which is then said."""
    if ids is None:
        return None
    if not prompt and len(ids) >= len(outputs):  # the prompt is not named: it is what the rows have beyond the response
        prompt = [-1] * (len(ids) + 1 - len(outputs))
    tokens = np.array([*prompt, *outputs], np.int64)
    if len(ids) == len(tokens) and len(ids):
        ids = ids[:-1]  # the last token was never an input: a row for it is a leftover
    if len(ids) > len(tokens):
        problems.append(f"{where}: {len(ids)} rows of routes, but {len(prompt)} prompt and {len(outputs)} generated tokens")
        return None
    known = np.full(len(outputs), np.nan)
    known[: len(logprobs)] = [np.nan if value is None else value for value in logprobs[: len(known)]]
    # Fewer rows than inputs: the first ones were not asked for.
    return Request(ids=ids, start=len(tokens) - 1 - len(ids), tokens=tokens, prompt=len(prompt), logprobs=known)


def _named(request: Request, record: _Known, number: int, sample: int, version: int = -1) -> Request:
    """With the record's own names, or else its number in the files."""
    return replace(
        request,
        prompt_id=number if record.prompt_id is None else record.prompt_id,
        sample=sample if record.sample is None else record.sample,
        reward=float("nan") if record.reward is None else record.reward,
        version=version,
    )
