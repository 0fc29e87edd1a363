"""Whether a `config.json` asks for what a family file describes: every check yields sentences that name the field which decides it.

    config.json --complete--> Fields (every field that a family reads, spelt one way) --checks--> sentences --refuse--> ModelError

A check is silent where a field is missing; `missing` says so itself. That way all that is wrong can be said at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moerl.errors import ModelError

Fields = dict[str, Any]

SPELLINGS = {"num_mtp_layers": "num_nextn_predict_layers"}
"""Names that transformers >= 5 writes -> those of the published files."""

_FOREIGN = {
    "index_": "sparse attention through an indexer (DSA)",
    "linear_": "linear attention",
    "vision_config": "images",
    "audio_config": "sound",
    "text_config": "a language model inside another one",
}
"""Beginning of a field's name -> what it means that no family here has."""


def complete(
    hf: Mapping[str, Any], required: Sequence[str], optional: Mapping[str, Any], spellings: Mapping[str, str] = SPELLINGS
) -> Fields:
    """`config.json` with every field of a family: those that are absent or null have the value in `optional`, or None if required.

    Args:
        spellings: other names of the family's fields.
    """
    given = {name: value for name, value in hf.items() if value is not None}
    other = {spellings[name]: value for name, value in given.items() if name in spellings}
    rotary = hf.get("rope_parameters") or {}
    other |= {name: rotary[name] for name in ("partial_rotary_factor",) if name in rotary}
    return {**dict.fromkeys(required), **optional, **other, **given}


def refuse(what: str, problems: Iterable[str]) -> None:
    """Raise if there are any problems.

    Raises:
        ModelError: `what` is wrong, and all problems.
    """
    if found := list(problems):
        raise ModelError(f"{what}:\n" + "\n".join(f"  - {line}" for line in found))


def missing(fields: Fields, required: Sequence[str], model_type: str) -> Iterator[str]:
    """Fields that every model of the type has; all of them are positive numbers."""
    for name in required:
        if fields[name] is None:
            yield f"{name} is missing, which every {model_type} model has"
        elif not isinstance(fields[name], int | float) or fields[name] < 0:
            yield f"{name} is {_words(fields[name])}, expected a positive number"


def foreign(hf: Mapping[str, Any]) -> Iterator[str]:
    """Architectures that no family here describes, by the fields that announce them."""
    for start, means in _FOREIGN.items():
        if names := [name for name in hf if name.startswith(start) and hf[name]]:
            yield f"{', '.join(names)}: {means}, which is not supported"
    if other := sorted({kind for kind in hf.get("layer_types") or () if kind != "full_attention"}):
        yield f"layer_types names {', '.join(other)}: only 'full_attention' is supported"


def expected(fields: Fields, name: str, allowed: Sequence[Any], why: str = "") -> Iterator[str]:
    """A field that has to be one of few values."""
    value = fields[name]
    if value is not None and value not in allowed:
        words = " or ".join(_words(each) for each in allowed)
        yield f"{name} is {_words(value)}, expected {words}" + (f": {why}" if why else "")


def count(fields: Fields, name: str, low: int, high: int | None = None, why: str = "") -> Iterator[str]:
    """A field that has to be a whole number of at least `low` and at most `high`."""
    value = fields[name]
    if value is None or (type(value) is int and low <= value and (not isinstance(high, int) or value <= high)):
        return
    bound = f"at least {low}" if high is None else f"{low}" if low == high else f"{low} to {high}"
    yield f"{name} is {_words(value)}, expected {bound}" + (f": {why}" if why else "")


def divides(fields: Fields, part: str, whole: str) -> Iterator[str]:
    """A field that has to divide another one."""
    small, large = fields[part], fields[whole]
    if _whole(small, large) and (small < 1 or large % small):
        yield f"{whole} is {large}, expected a multiple of {part}, which is {small}"


def routing(fields: Fields, experts: str, *, best: int, least: int) -> Iterator[str]:
    """Top-k inside the best groups of experts.

    Args:
        experts: the field with their number.
        best: how many of its experts a group is judged by.
        least: experts per token at least.
    """
    yield from divides(fields, "n_group", experts)
    yield from count(fields, "num_experts_per_tok", least, fields[experts])
    yield from count(fields, "topk_group", 1, fields["n_group"], "no more groups can be chosen than n_group")
    total, groups, chosen, topk = (fields[name] for name in (experts, "n_group", "topk_group", "num_experts_per_tok"))
    if not _whole(total, groups, chosen, topk) or groups < 2 or total % groups:
        return
    each = total // groups
    if each < best:
        yield f"n_group is {groups}, which leaves {each} experts per group, expected at least {best}"
    if topk > chosen * each:
        yield f"num_experts_per_tok is {topk}, but topk_group {chosen} of n_group {groups} groups hold {chosen * each} experts"


def rope(hf: Mapping[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    """The rotary embedding's type, in either spelling, and settings that change it.

    Args:
        kinds: what the family supports, of "default" and "yarn".
    """
    field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    settings = hf.get(field) or {}
    if any(isinstance(value, dict) for value in settings.values()):
        yield f"{field} has settings per type of layer, expected one for all"
        return
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in kinds:
        yield f"{field} asks for {_words(kind)}, expected {' or '.join(map(_words, kinds))}"
    elif kind == "yarn":
        absent = [name for name in ("factor", "original_max_position_embeddings") if settings.get(name) is None]
        if absent:
            yield f"{field} asks for 'yarn' without {' and '.join(absent)}"
        if settings.get("attention_factor") is not None:
            yield f"{field}.attention_factor is {settings['attention_factor']}, expected none: it follows from mscale and mscale_all_dim"
        if settings.get("truncate") is False:
            yield f"{field}.truncate is false, expected true: the corrected range is rounded to whole dimensions"


def _whole(*values: Any) -> bool:
    return all(type(value) is int for value in values)


def _words(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
