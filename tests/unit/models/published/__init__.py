"""Published models as data: what of `config.json` describes the architecture, and where known every tensor of the checkpoint.

A tensor is [name, shape, dtype, [first, last] layer or null, [first, last] expert or null]; both ends are inclusive, and `{L}` and `{E}`
in the name stand for them. `tensor_count` and `element_count` are what the checkpoint itself reports, scales and buffers included.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ALL = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.json")))
REFUSED = ("Mixtral-8x7B-v0.1",)
SUPPORTED = tuple(name for name in ALL if name not in REFUSED)


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def read(model: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / f"{model}.json").read_text())


def config(model: str) -> dict[str, Any]:
    return read(model)["config"]


def tensors(model: str) -> dict[str, Tensor]:
    """Every tensor of the checkpoint.

    Raises:
        AssertionError: they are not as many, or as large, as the checkpoint reports.
    """
    data = read(model)
    found = dict(_expanded(data["tensors"]))
    assert len(found) == data["tensor_count"]
    return found


def _expanded(rows: list[list[Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, shape, dtype, layers, experts in rows:
        tensor = Tensor(tuple(shape), dtype)
        for layer in _inclusive(layers):
            for expert in _inclusive(experts):
                yield name.replace("{L}", str(layer)).replace("{E}", str(expert)), tensor


def _inclusive(ends: list[int] | None) -> range:
    return range(ends[0], ends[1] + 1) if ends else range(1)
