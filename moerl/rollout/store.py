"""Recorded rollouts on disk: one file per step, so that a run can be trained again without an engine.

A file is: magic, msgpack of (header, groups, one routing record per group), xxh3 of all that. A group's samples give up their
traces to its record, which holds the prompt's rows once; loading gives them back. The file appears under its name complete or not
at all. The header says which model and tokenizer the tokens and routes belong to; loading compares it field by field.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from moerl.errors import RolloutError
from moerl.models import read_spec
from moerl.rollout.sample import Group
from moerl.routing.group import codec_of, pack_group, unpack_group
from moerl.routing.trace import Layout, Trace

MAGIC = b"moerl-rollout-1\n"
_NAME = re.compile(r"step-(\d{6,})\.rollout")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rollout file belongs to.

    Attributes:
        model: the model's shape (sizes and routing, not its weights), by field name.
        tokenizer: SHA-256 of `tokenizer.json`.
        layers, experts, topk: the layout of all traces.
        step: training step that the rollouts were generated for.
        version: weight version that generated them.
    """

    model: dict[str, Any]
    tokenizer: str
    layers: tuple[int, ...]
    experts: int
    topk: int
    step: int
    version: int

    @property
    def layout(self) -> Layout:
        return Layout(self.layers, self.experts, self.topk)


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    header: Header
    groups: list[Group]
    routes: list[bytes]


def make_header(model_path: str | Path, *, step: int, version: int) -> Header:
    """The header of rollouts made with the model and tokenizer of an HF folder.

    Raises:
        ModelError: the folder holds no supported model.
        RolloutError: it holds no tokenizer.json.
    """
    spec = read_spec(model_path)
    tokenizer = Path(model_path) / "tokenizer.json"
    if not tokenizer.is_file():
        raise RolloutError(f"{model_path} has no tokenizer.json, so rollouts cannot be tied to their tokenizer")
    shape = {"family": spec.family, "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, **spec.megatron}
    return Header(
        model=msgspec.to_builtins(shape),
        tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        layers=spec.moe_layers,
        experts=spec.experts,
        topk=spec.topk,
        step=step,
        version=version,
    )


def save_step(folder: str | Path, step: int, groups: Sequence[Group], header: Header) -> Path:
    """Write the rollouts of a step; an existing file of the step is replaced."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    without, routes = zip(*map(_take_routes, groups), strict=True) if groups else ((), ())
    body = MAGIC + msgspec.msgpack.encode(_Record(header, list(without), list(routes)))
    path = _path(folder, step)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(body + xxhash.xxh3_64_digest(body))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def load_step(folder: str | Path, step: int, expected: Header) -> tuple[Header, list[Group]]:
    """Read the rollouts of a step and check that they fit this run's model and tokenizer.

    Args:
        expected: header of the model that will be trained; its step and version are not compared.

    Raises:
        RolloutError: missing, damaged, or from another model or tokenizer (names the first fields that differ).
    """
    path = _path(Path(folder), step)
    if not path.is_file():
        steps = list_steps(folder)
        has = f"it has steps {steps[0]}..{steps[-1]} ({len(steps)})" if steps else "it has none"
        raise RolloutError(f"{folder} has no rollouts of step {step}; {has}")
    raw = path.read_bytes()
    body, digest = raw[:-8], raw[-8:]
    if not body.startswith(MAGIC):
        raise RolloutError(f"{path} is not a rollout file of this version: expected it to begin with {MAGIC!r}, got {raw[: len(MAGIC)]!r}")
    if xxhash.xxh3_64_digest(body) != digest:
        raise RolloutError(f"{path} is damaged: its checksum does not match ({len(raw)} bytes); generate this step again")
    try:
        record = msgspec.msgpack.decode(memoryview(body)[len(MAGIC) :], type=_Record)
    except msgspec.MsgspecError as error:
        raise RolloutError(f"{path} cannot be read: {error}") from error
    _compare(path, record.header, expected)
    if len(record.routes) != len(record.groups):
        raise RolloutError(
            f"{path} holds {len(record.groups)} groups and {len(record.routes)} records of routes; it was not written by moerl"
        )
    for group, routes in zip(record.groups, record.routes, strict=True):
        _give_routes(path, group, routes)
    return record.header, record.groups


def _take_routes(group: Group) -> tuple[Group, bytes]:
    """(the group without its samples' traces, their group record; empty if any sample has none, which then all keep theirs)"""
    records = [sample.trace for sample in group.samples]
    if not records or not all(records):
        return group, b""
    codec = codec_of(records[0])
    prompt = min(len(sample.prompt_tokens) for sample in group.samples)
    samples = [msgspec.structs.replace(sample, trace=b"") for sample in group.samples]
    return msgspec.structs.replace(group, samples=samples), pack_group([Trace.from_bytes(one) for one in records], prompt, codec)


def _give_routes(path: Path, group: Group, routes: bytes) -> None:
    if not routes:
        return
    traces, codec = unpack_group(routes), codec_of(routes)
    if len(traces) != len(group.samples):
        raise RolloutError(f"{path}: prompt {group.prompt_id} has {len(group.samples)} samples and routes of {len(traces)}")
    for sample, trace in zip(group.samples, traces, strict=True):
        sample.trace = trace.to_bytes(codec)


def list_steps(folder: str | Path) -> list[int]:
    """Steps with a rollout file in `folder`, ascending; empty if the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.rollout"


def _compare(path: Path, found: Header, expected: Header) -> None:
    # `None` and absent mean the same: the family's description does not set the field.
    differ = [
        f"{name}: {found.model.get(name)!r} in the file, {expected.model.get(name)!r} in this model"
        for name in sorted(found.model.keys() | expected.model.keys())
        if found.model.get(name) != expected.model.get(name)
    ]
    if found.layout != expected.layout:
        differ.append(f"layout: {found.layout} in the file, {expected.layout} in this model")
    if differ:
        raise RolloutError(f"{path} was recorded from another model; different are " + "; ".join(differ))
    if found.tokenizer != expected.tokenizer:
        raise RolloutError(
            f"{path} was recorded with another tokenizer: the SHA-256 of tokenizer.json is {found.tokenizer[:16]}… in the file, "
            f"{expected.tokenizer[:16]}… in this model"
        )
