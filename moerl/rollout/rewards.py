"""Rewards: how good a completion is, as a number.

A reward is a function `(completion text, answer, finish_reason) -> float`. The built-in ones are pure and quick; a foreign
one may raise (a `TaskError` that names it) or hang: whoever calls `score_groups` runs it under a deadline.
"""

import difflib
import importlib
import logging
import math
import re
from collections.abc import Callable, Sequence

import msgspec

from moerl.errors import TaskError
from moerl.rollout.sample import Group, Sample

Reward = Callable[[str, str, str], float]

_INTEGER = re.compile(r"-?[0-9]+")
FORMAT_REWARD = 0.1


def math_verify(completion: str, answer: str, finish_reason: str) -> float:
    """1.0 if the last answer in the completion equals the expected one mathematically, else 0.0."""
    from math_verify import parse, verify

    # Its own time-outs use signals, which work in a main thread only; the caller's deadline takes their place. It warns of
    # their absence on every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(answer, parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    return float(bool(gold) and bool(found) and verify(gold, found, timeout_seconds=None))


def exact_integer(completion: str, answer: str, finish_reason: str) -> float:
    """1.0 for exactly the expected integer, 0.1 for another well-formed one, 0.0 for anything else or without a stop."""
    if finish_reason != "stop" or not _INTEGER.fullmatch(completion):
        return 0.0
    return 1.0 if completion == answer.strip() else FORMAT_REWARD


BUILTIN: dict[str, Reward] = {"math_verify": math_verify, "exact_integer": exact_integer}


def resolve_reward(name: str) -> Reward:
    """The function behind `task.reward`: a built-in name, or `package.module:function`.

    Raises:
        TaskError: no such reward; says the nearest name or why the import failed.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILTIN, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(BUILTIN)}"
        raise TaskError(f"there is no reward {name!r}; {hint} (or give your own as package.module:function)")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TaskError(f"task.reward {name!r}: cannot import {module_name!r} ({error}); is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), 1)
        raise TaskError(
            f"task.reward {name!r}: {module_name} has no function {function_name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return function


def score_groups(groups: Sequence[Group], reward: Reward) -> list[Group]:
    """Copies of the groups with every sample's reward filled in.

    Raises:
        TaskError: the reward raised or returned something that is not a finite number; names it, the prompt and the cause.
    """
    return [
        msgspec.structs.replace(
            group,
            samples=[msgspec.structs.replace(sample, reward=_score(sample, group.answer, reward)) for sample in group.samples],
        )
        for group in groups
    ]


def _score(sample: Sample, answer: str, reward: Reward) -> float:
    name = f"{reward.__module__}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"
    where = f"reward {name}, prompt {sample.prompt_id}, sample {sample.index}"
    try:
        value = reward(sample.text, answer, sample.finish_reason)
    # A foreign function may raise anything; what it raised is what the message is for.
    except Exception as error:
        raise TaskError(f"{where}: {type(error).__name__}: {error} (completion {sample.text[:80]!r}, answer {answer[:80]!r})") from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TaskError(f"{where}: returned {value!r}, expected a finite number")
    return float(value)
