"""A config as a TOML file that explains itself: each setting under its own documentation.

Reading the result back gives an equal config. Settings without a value stand as comments, since TOML has no null.
"""

import json
import re
import textwrap
from typing import Any

from moerl.config.schema import Config, Section

_WIDTH = 120


def to_toml(config: Config, *, comments: bool = True) -> str:
    """The effective tree. With `comments`, every setting carries its docstring."""
    blocks = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        about = (type(value).__doc__ if isinstance(value, Section) else field.description) or ""
        lines = (_comment(about) if comments else []) + [f"[{name}]"]
        if isinstance(value, Section):
            for key, inner in type(value).model_fields.items():
                lines += _comment(inner.description or "") if comments else []
                lines.append(_line(key, getattr(value, key)))
        else:
            lines += [_line(key, inner) for key, inner in value.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def literal(value: Any) -> str:
    """A Python value in TOML's notation; tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items()) + "}"
    return str(value)  # numbers, dates


def _line(key: str, value: Any) -> str:
    return f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {literal(value)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else literal(key)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH)]
