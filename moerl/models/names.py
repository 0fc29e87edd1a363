"""What a tensor of a checkpoint is, by its name alone.

    names of a folder's tensors --classify--> {name: Known}: one weight of the specification, something that goes with one, what may be
                                              skipped, or unknown

A weight is known only in the layers that have it and up to the last expert, so that a checkpoint of another size is noticed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moerl.models.spec import Entry, ModelSpec, Param

Role = Literal["parameter", "mtp", "copy", "scale", "ignorable", "unknown"]

_PLACE = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(?:mlp\.experts\.(0|[1-9]\d*)\.)?(.+)")
_SCALE = re.compile(r"(?<=\.weight)_scale(_inv)?$")
_ROTARY = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Known:
    """What one tensor is.

    Attributes:
        role: "parameter", of `ModelSpec.entries()`; "mtp", of `ModelSpec.mtp_entries()`; "copy" of another tensor's values (those of
            multi-token prediction, a tied output layer); "scale" of a quantised weight (`weight_scale_inv` by blocks, `weight_scale`
            by rows); "ignorable", a buffer that follows from the configuration; "unknown".
        entry, part: which weight, and which of its `hf` tensors; None and 0 for all other roles.
        of: the tensor that a copy repeats or a scale belongs to; empty for all other roles.
    """

    role: Role
    entry: Entry | None = None
    part: int = 0
    of: str = ""


def classify(spec: ModelSpec, names: Iterable[str]) -> dict[str, Known]:
    """What each of a checkpoint's tensors is, in the order of `names`; only names are looked at."""
    lookup = _lookup(spec)
    return {name: lookup(name) for name in names}


def _lookup(spec: ModelSpec) -> Callable[[str], Known]:
    copies = spec.mtp_copies() | ({"lm_head.weight": "model.embed_tokens.weight"} if spec.tied_embeddings else {})
    decoder, moe = set(range(spec.layers)), set(spec.moe_layers)
    layers = {"once": {None}, "all": decoder, "moe": moe, "dense": decoder - moe, "mtp": {spec.layers}}
    kinds = _kinds((*spec.params, *spec.mtp_params))

    @cache
    def lookup(name: str) -> Known:
        if name in copies:
            return Known("copy", of=copies[name])
        if name.endswith(_ROTARY):
            return Known("ignorable")
        weight = _SCALE.sub("", name)
        if weight != name:
            owner = lookup(weight)
            matrix = owner.role == "copy" or (owner.entry is not None and len(owner.entry.param.shape) == 2)
            return Known("scale", of=weight) if matrix else Known("unknown")
        layer, expert, rest = _place(name)
        for param, part in kinds.get((layer is None, expert is None, rest), ()):
            if layer in layers[param.layers] and (expert is None or expert < spec.experts):
                return Known("mtp" if param.layers == "mtp" else "parameter", Entry(param, layer, expert), part)
        return Known("unknown")

    return lookup


def _place(name: str) -> tuple[int | None, int | None, str]:
    """(layer, expert, what is left) of a HF name."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None, None, name
    return int(match[1]), None if match[2] is None else int(match[2]), match[3]


def _kinds(params: Iterable[Param]) -> Mapping[tuple[bool, bool, str], list[tuple[Param, int]]]:
    """(outside of all layers, outside of experts, rest of the name) -> kinds of weights and which of their parts."""
    found: dict[tuple[bool, bool, str], list[tuple[Param, int]]] = {}
    for param in params:
        for part, name in enumerate(param.hf):
            layer, expert, rest = _place(name.format(layer=0, expert=0))
            found.setdefault((layer is None, expert is None, rest), []).append((param, part))
    return found
