"""Tensors of a folder that repeat others: an untied name for a tied output layer, the embedding and head of multi-token prediction.

A checkpoint holds such values once, so they must be what they repeat: equal, or, where only the copy is quantised, its rounding.
"""

from collections.abc import Iterator

import torch

from moerl.convert.folder import some
from moerl.convert.quantised import Weight, fill
from moerl.convert.survey import Survey
from moerl.errors import ModelError

_RELATIVE, _LEAST = 1 / 16 + 1 / 128, 2**-9
"""Rounding of float8_e4m3fn: half of the spacing of its normal numbers, with that of bfloat16, and of its smallest ones at scale 1."""


def check_copies(found: Survey, elements: int) -> None:
    """Compare all copies with what they repeat, some `elements` at a time.

    Raises:
        ModelError: with every tensor that is no copy.
    """
    if wrong := [f"{copy} differs from {of}" for copy, of in found.copies.items() if not _same(found, copy, of, elements)]:
        hint = "; convert with --mtp drop" if all(name.startswith("model.layers.") for name in found.copies) else ""
        raise ModelError(
            f"{found.folder}: tensors that Megatron shares with others have values of their own, which would be lost{hint}: {some(wrong)}"
        )


def _same(found: Survey, copy: str, of: str, elements: int) -> bool:
    one, other = found.weights[copy], found.weights[of]
    if one.stored.shape != other.stored.shape:
        return False
    rows, columns = one.stored.shape
    return all(_rows_same(one, other, first, last) for first, last in _ranges(rows, max(elements // columns, 1)))


def _rows_same(one: Weight, other: Weight, first: int, last: int) -> bool:
    left, right = (_rows(weight, first, last) for weight in (one, other))
    if one.scales is None or other.scales is not None:
        return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    room = left.float().abs().max() / 448 * _LEAST * 2
    return bool(((left.float() - right.float()).abs() <= right.float().abs() * _RELATIVE + room).all())


def _rows(weight: Weight, first: int, last: int) -> torch.Tensor:
    out = torch.empty((last - first, weight.stored.shape[1]), dtype=weight.dtype)
    fill(weight, first, last, out)
    return out


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, count)) for first in range(0, count, step))
