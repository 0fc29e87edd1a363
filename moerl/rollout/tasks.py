"""Prompts: from a reasoning-gym dataset or a JSONL file to tokenized, distinct questions with their answers.

    schema.Task --questions--> text --strip, template, tokenize--> Prompt, split into train and held-out

Invariants: no prompt text occurs twice, so held-out prompts are never trained on; every prompt fits `max_prompt_tokens` and
holds only tokens that the model's embedding has (one outside it would crash the engine); the same seed gives the same
prompts in the same order.
"""

import difflib
import json
import logging
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.config.schema import Task
from moerl.errors import TaskError
from moerl.models import read_spec
from moerl.rollout.sample import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_OWNED_OPTIONS = {"seed": "run.seed", "size": "task.prompts and task.heldout_prompts"}
_STALE_DRAWS = 1000


@dataclass(frozen=True)
class TaskData:
    """Attributes:
    train, heldout: prompts with disjoint texts; ids are unique over both.
    stop_token_ids: the model's end-of-sequence tokens, at which the engine stops.
    """

    train: list[Prompt]
    heldout: list[Prompt]
    stop_token_ids: tuple[int, ...]


def load_task(task: Task, model_path: str | Path, *, max_prompt_tokens: int, seed: int) -> TaskData:
    """Build the prompts of a task. Held-out prompts are taken first; a training set smaller than asked for is logged.

    Args:
        model_path: folder whose `tokenizer.json` tokenizes and whose `config.json` bounds token ids.
        max_prompt_tokens: prompts above it are an error, not skipped: skipping would change the task silently.

    Raises:
        TaskError: no prompts, too few for a training set, too long, or with characters that the tokenizer lacks.
    """
    model_path = Path(model_path)
    if "{prompt}" not in task.prompt_template:
        raise TaskError(f"task.prompt_template {task.prompt_template!r} does not contain {{prompt}}, so every prompt would be the same")
    source = _reasoning_gym(task, seed) if task.kind == "reasoning_gym" else _jsonl(task, seed)
    texts = _distinct(((_text(task, question), answer) for question, answer in source), task.heldout_prompts + task.prompts)
    if len(texts) <= task.heldout_prompts:
        raise TaskError(
            f"the task has {len(texts)} distinct prompts, of which task.heldout_prompts = {task.heldout_prompts} are set aside; "
            "none are left to train on: lower task.heldout_prompts or widen the task"
            if texts
            else f"the task has no prompts ({task.path if task.kind == 'jsonl' else task.name})"
        )
    if len(texts) < task.heldout_prompts + task.prompts:
        logger.warning(
            "the task has only %d distinct prompts: training on %d instead of task.prompts = %d",
            len(texts),
            len(texts) - task.heldout_prompts,
            task.prompts,
        )
    prompts = _tokenize(texts, model_path, task.add_bos, max_prompt_tokens)
    return TaskData(prompts[task.heldout_prompts :], prompts[: task.heldout_prompts], _stop_tokens(model_path))


def _text(task: Task, question: str) -> str:
    return task.prompt_template.replace("{prompt}", re.sub(task.strip_question, "", question) if task.strip_question else question)


def _distinct(source: Iterator[tuple[str, str]], wanted: int) -> dict[str, str]:
    """The first `wanted` distinct texts -> answer; gives up when many draws in a row bring nothing new."""
    found: dict[str, str] = {}
    stale = 0
    for text, answer in source:
        stale += 1
        if text not in found:
            found[text] = answer
            stale = 0
        if len(found) == wanted or stale > _STALE_DRAWS + 2 * len(found):
            break
    return found


def _reasoning_gym(task: Task, seed: int) -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        near = difflib.get_close_matches(task.name, DATASETS, 1)
        raise TaskError(f"reasoning_gym has no dataset {task.name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if owned := [name for name in task.options if name in _OWNED_OPTIONS]:
        raise TaskError(f"task.options.{owned[0]} cannot be set; set {_OWNED_OPTIONS[owned[0]]} instead")
    size = 10 * (task.prompts + task.heldout_prompts) + 100 * _STALE_DRAWS
    try:
        dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.options)
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(f"reasoning_gym refuses task.options {task.options} for {task.name}: {error}") from error
    return ((item["question"], str(item["answer"])) for item in dataset)


def _jsonl(task: Task, seed: int) -> Iterator[tuple[str, str]]:
    path = Path(task.path)
    if not path.is_file():
        raise TaskError(f"task.path {task.path!r} is not a file; expected JSON lines with prompt and answer")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            rows.append(_row(path, number, line))
    random.Random(seed).shuffle(rows)
    return iter(rows)


def _row(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        prompt, answer = row["prompt"], row["answer"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TaskError(f'{path}:{number}: expected {{"prompt": …, "answer": …}}, got {line[:80]!r} ({error})') from error
    if not isinstance(prompt, str) or isinstance(answer, (dict, list)) or answer is None:
        raise TaskError(f"{path}:{number}: prompt must be a string and answer a string or number, got {line[:80]!r}")
    return prompt, str(answer)


def _tokenize(texts: dict[str, str], model_path: Path, add_bos: bool, limit: int) -> list[Prompt]:
    tokenizer = load_tokenizer(model_path)
    vocabulary = read_spec(model_path).vocab_size
    prefix = [_bos(model_path)] if add_bos else []
    unknown = _unknown_id(tokenizer)
    prompts = []
    for number, ((text, answer), encoding) in enumerate(
        zip(texts.items(), tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True)
    ):
        if unknown in encoding.ids:
            start, stop = encoding.offsets[encoding.ids.index(unknown)]
            raise TaskError(
                f"the tokenizer of {model_path} has no token for {text[start:stop]!r} in prompt {text[:80]!r}; "
                "remove it with task.strip_question or choose another task"
            )
        tokens = prefix + encoding.ids
        if not tokens:
            raise TaskError("a prompt of the task is empty; does task.strip_question remove everything? An engine needs at least one token")
        if max(tokens) >= vocabulary:
            raise TaskError(
                f"prompt {text[:80]!r} has token {max(tokens)}, but the model's embedding has {vocabulary} rows; "
                f"tokenizer.json and config.json of {model_path} do not belong together"
            )
        prompts.append(Prompt(id=number, text=text, tokens=tokens, answer=answer))
    if long := [prompt for prompt in prompts if len(prompt.tokens) > limit]:
        first = long[0]
        raise TaskError(
            f"{len(long)} of {len(prompts)} prompts are longer than rollout.max_prompt_tokens = {limit}; the first has "
            f"{len(first.tokens)} tokens: {first.text[:80]!r}; raise the limit or shorten the task"
        )
    return prompts


def load_tokenizer(model_path: str | Path) -> "Tokenizer":
    """The folder's `tokenizer.json`.

    Raises:
        TaskError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise TaskError(
            f"{model_path} has no tokenizer.json; write one with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    try:
        return Tokenizer.from_file(str(path))
    # The Rust library raises plain Exception for every malformed file.
    except Exception as error:
        raise TaskError(f"{path} cannot be read: {error}") from error


def _unknown_id(tokenizer: "Tokenizer") -> int | None:
    """Id that stands for text the vocabulary lacks; None where there is no such token (byte-level vocabularies)."""
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:
        return model["unk_id"]
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)


def _config(model_path: Path, key: str) -> Any:
    """A field of `generation_config.json` or else `config.json`; None if neither has it."""
    for name in ("generation_config.json", "config.json"):
        path = model_path / name
        if path.is_file() and (value := json.loads(path.read_text()).get(key)) is not None:
            return value
    return None


def _bos(model_path: Path) -> int:
    token = _config(model_path, "bos_token_id")
    if token is None:
        raise TaskError(f"task.add_bos is set, but neither generation_config.json nor config.json of {model_path} has a bos_token_id")
    return token


def _stop_tokens(model_path: Path) -> tuple[int, ...]:
    tokens = _config(model_path, "eos_token_id")
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (tokens,)
