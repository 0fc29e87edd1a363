"""From the command line to a checked `Config`.

    @ base.toml @ more.toml --train.steps 3   -->  sources, left to right  -->  one tree  -->  Config

A value on the command line is written as in TOML; a bare word is text, and `none` unsets an optional setting. Nothing is
reported one at a time: unknown keys, wrong values, cross-field rules and native options end up in one `ConfigError`.
"""

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from moerl.config.native import megatron_problems, sglang_problems, sink_problems
from moerl.config.rules import rule_problems
from moerl.config.schema import Config, Section
from moerl.config.words import explain
from moerl.errors import ConfigError

Tree = dict[str, Any]

FREE_TABLES = ("task.options", "megatron", "sglang")
"""Tables whose keys are not settings of moerl."""


@dataclass(frozen=True)
class Source:
    """One file, or one setting of the command line, as a nested tree.

    Attributes:
        name: how messages call it.
    """

    name: str
    tree: Tree


def load_config(argv: list[str], *, world: int | None = None, started: int | None = None) -> Config:
    """Read `@ file.toml` and `--section.key value` arguments into a checked config.

    Args:
        argv: `@ file`, `@file`, `--section.key value` and `--section.key=value`, in any order; later ones win, and the
            command line's settings win over files.
        world: number of trainer ranks; `parallel.nodes` x `parallel.nproc_per_node` where None.
        started: number of trainer ranks that a launcher has started, which must be as many as the settings say.

    Raises:
        ConfigError: with every violation found.
    """
    sources, violations = read_sources(argv)
    known = [_split_unknown(source) for source in sources]
    violations += [violation for _, unknown in known for violation in unknown]
    tree: Tree = {}
    for part, _ in known:
        merge(tree, part)
    try:
        config, wrong = Config.model_validate(tree), set()
    except ValidationError as error:
        details = error.errors(include_url=False)
        violations += [explain(detail) for detail in details]
        wrong = {".".join(str(part) for part in detail["loc"]) for detail in details}
        config = _without(tree, details)
    if config is not None:
        given = {path: index for index, (part, _) in enumerate(known) for path, _ in leaves(part)}
        violations += rule_problems(config, given, wrong, world, started)
        violations += megatron_problems(config.megatron) + sglang_problems(config.sglang) + sink_problems(config.observe)
    if violations:
        raise ConfigError(violations)
    return config


def read_sources(argv: list[str]) -> tuple[list[Source], list[str]]:
    """Files first, then the command line's settings; and what is wrong with the arguments themselves."""
    files: list[Source] = []
    settings: list[Source] = []
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("@"):
            path = word[1:] or (words.pop(0) if words else "")
            try:
                files.append(Source(path, read_toml(path)))
            except ConfigError as error:
                problems += error.violations
        elif word.startswith("--"):
            key, has_value, text = word[2:].partition("=")
            if not has_value and (not words or words[0].startswith(("--", "@"))):
                problems.append(f"--{key} needs a value, as in --{key} VALUE or --{key}=VALUE")
            else:
                settings.append(_setting(key, text if has_value else words.pop(0)))
        else:
            problems.append(f"cannot read the argument {word!r}: expected `@ file.toml` or `--section.key value`")
    return files + settings, problems


def read_toml(path: str) -> Tree:
    """Parse one file.

    Raises:
        ConfigError: no name, no such file, or not TOML (with line and column).
    """
    if not path:
        raise ConfigError("`@` needs a file name after it, as in `@ configs/tiny_cpu.toml`")
    file = Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [entry.name for entry in file.parent.glob("*.toml")], n=1)
        raise ConfigError(f"config file {path} does not exist" + (f"; did you mean {file.parent / near[0]}?" if near else ""))
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def merge(into: Tree, other: Tree) -> None:
    """Lay `other` over `into`, table by table; anything that is not a table is replaced whole."""
    for key, value in other.items():
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        else:
            into[key] = value


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a tree that is not a table."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, path + ".")
        else:
            yield path, value


def setting_paths() -> list[str]:
    """Dotted paths of all settings, in the schema's order; free tables without their contents."""
    return list(_fields())


def _fields() -> dict[str, FieldInfo]:
    found = {}
    for section, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= {f"{section}.{name}": inner for name, inner in kind.model_fields.items()}
        else:
            found[section] = field
    return found


def _setting(key: str, text: str) -> Source:
    tree: Tree = {}
    table = tree
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[last] = _value(key, text)
    return Source("command line", tree)


def _value(key: str, text: str) -> Any:
    """A command line value by TOML's rules, and by the setting's type where TOML alone would misread it."""
    field = _fields().get(key)
    kind = field.annotation if field else None
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if NoneType in kinds and text == "none":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    takes_text = str in kinds or get_origin(kind) is Literal
    return text if takes_text and not isinstance(value, str) else value


def _split_unknown(source: Source) -> tuple[Tree, list[str]]:
    """The tree without the keys that the schema lacks, and a sentence for each of those."""
    known: Tree = {}
    problems = []
    sections = Config.model_fields
    for section, value in source.tree.items():
        if section not in sections:
            inner = [f"{section}.{key}" for key in value] if isinstance(value, dict) and value else [section]
            problems += [_unknown(source.name, path) for path in inner]
        elif section in FREE_TABLES or not isinstance(value, dict):
            known[section] = value
        else:
            settings = sections[section].annotation.model_fields
            known[section] = {key: inner for key, inner in value.items() if key in settings}
            problems += [_unknown(source.name, f"{section}.{key}") for key in value if key not in settings]
    return known, problems


def _unknown(source: str, path: str) -> str:
    section, _, key = path.partition(".")
    every = setting_paths()
    if same := [other for other in every if other.rpartition(".")[2] == (key or section)]:
        hint = f"did you mean {' or '.join(same)}?"
    elif near := difflib.get_close_matches(path, every, n=1, cutoff=0.75):
        hint = f"did you mean {near[0]}?"
    elif section in Config.model_fields:
        hint = f"[{section}] has {', '.join(other.partition('.')[2] for other in every if other.startswith(section + '.'))}"
    elif near := difflib.get_close_matches(section, Config.model_fields, n=1):
        hint = f"there is no section [{section}]; did you mean [{near[0]}]?"
    else:
        hint = f"the sections are {', '.join(Config.model_fields)}"
    return f"{source}: {path} is not a setting; {hint}"


def _without(tree: Tree, details: list[Any]) -> Config | None:
    """The config with defaults in place of wrong values, so that the rules can judge the rest; None where that fails."""
    tree = {section: dict(value) if isinstance(value, dict) else value for section, value in tree.items()}
    for detail in details:
        section, *rest = detail["loc"]
        if rest and isinstance(tree.get(section), dict):
            tree[section].pop(rest[0], None)
        else:
            tree.pop(section, None)
    if not isinstance(tree.get("model"), dict) or "path" not in tree["model"]:
        tree["model"] = {"path": "unknown"}
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None
