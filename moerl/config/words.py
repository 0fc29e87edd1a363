"""Pydantic's validation errors as sentences: which setting, what was expected, what came."""

import difflib
import json
from typing import Any

_EXPECTED = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "literal_error": "one of {expected}",
    "dict_type": "a table",
    "model_type": "a table",
}


def explain(detail: Any) -> str:
    """One sentence for one entry of `ValidationError.errors()`."""
    path = ".".join(str(part) for part in detail["loc"])
    kind, came = detail["type"], detail["input"]
    if kind == "missing":
        path = "model.path" if path == "model" else path
        return f"{path} is required; give it in a file or as --{path} VALUE"
    if kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**detail.get("ctx", {}))
    else:
        expected = detail["msg"]
    sentence = f"{path}: expected {expected}, got {_shown(came)}"
    if kind == "literal_error" and isinstance(came, str):
        choices = [choice.strip("' ") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        if near := difflib.get_close_matches(came, choices, n=1):
            sentence += f"; did you mean {near[0]}?"
    return sentence


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
