"""Boxes of Hugging Face tensors: the coordinates in which a trainer's layout and an engine's meet.

    ModelSpec --kinds--> Kind --trainer_layout--> Shares (which box lies where on which trainer rank)
                              --engine_boxes----> Shares (which box must lie where on which engine rank)
                                                  intersect(Shares, Shares) --> what must move

A *kind* is one HF tensor of every layer, and of every expert where there are experts: all have the same shape and are cut alike,
so one box (experts × rows × columns) stands for a whole block of tensors. Vectors are columns of one element.

Boxes are int64[n, 3, 2]: (first, one past the last) along experts, rows, columns. Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from moerl.models.spec import ModelSpec, Param
from moerl.reshard.orders import DRAFT

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""(first, one past the last) along experts, rows and columns."""


@dataclass(frozen=True)
class Kind:
    """HF tensor `param.hf[part]` of all layers and experts.

    Attributes:
        layers: 0-based, ascending. A tensor outside the layers has one: -1 where it comes before them (the embedding), the number of
            layers where it comes after them (final norm, output layer); the names of such tensors contain no layer.
        experts: 1 where the tensor exists once per layer.
    """

    param: Param
    part: int
    layers: tuple[int, ...]
    experts: int

    @property
    def hf(self) -> str:
        return self.param.hf[self.part]

    @property
    def rows(self) -> int:
        return self.param.part_shape(self.part)[0]

    @property
    def cols(self) -> int:
        return prod(self.param.part_shape(self.part)[1:])

    @property
    def is_vocabulary(self) -> bool:
        return self.param.is_vocabulary


def kinds(spec: ModelSpec, *, mtp: bool = False) -> tuple[Kind, ...]:
    """All kinds of HF tensors, in canonical order; with `mtp` also those of multi-token prediction, but for what repeats others."""
    layers: dict[Param, list[int]] = {}
    outside = -1
    for entry in spec.entries():
        if entry.layer is not None:
            outside = spec.layers
        found = layers.setdefault(entry.param, [])
        layer = outside if entry.layer is None else entry.layer
        if not found or found[-1] != layer:
            found.append(layer)
    if mtp:
        layers |= {replace(param, engine=DRAFT + param.engine): [spec.layers] for param in spec.mtp_params}
    return tuple(
        Kind(param, part, tuple(where), spec.experts if param.expert else 1)
        for param, where in layers.items()
        for part in range(len(param.hf))
    )


@dataclass(frozen=True)
class Shares:
    """Where the elements of one kind lie, in one pipeline stage or in one engine. Boxes are disjoint and cover the tensor.

    Attributes:
        boxes: int64[n, 3, 2].
        offsets: int64[n] position of each box's first element in the parameter that holds it, in elements.
        strides: elements between neighbours along experts and rows; columns are contiguous. The first is 0 where every expert is a
            parameter of its own.
        ranks: for each box, all that hold it, ascending: within the stage, or within the engine.
    """

    boxes: np.ndarray
    offsets: np.ndarray
    strides: tuple[int, int]
    ranks: tuple[tuple[int, ...], ...]

    def locate(self, index: np.ndarray, boxes: np.ndarray) -> np.ndarray:
        """int64[k] positions of the first elements of `boxes` [k, 3, 2], each inside box number `index[k]`."""
        inside = boxes[:, :, 0] - self.boxes[index, :, 0]
        return self.offsets[index] + inside @ np.array((*self.strides, 1), dtype=np.int64)


def shares(parts: Sequence[tuple[Box, int, Sequence[int]]], strides: tuple[int, int]) -> Shares:
    """`Shares` of (box, offset, ranks) triples; empty boxes are left out."""
    held = [part for part in parts if all(first < last for first, last in part[0])]
    boxes = np.array([box for box, _, _ in held], dtype=np.int64).reshape(-1, 3, 2)
    offsets = np.array([offset for _, offset, _ in held], dtype=np.int64)
    return Shares(boxes, offsets, strides, tuple(tuple(ranks) for _, _, ranks in held))


def intersect(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All overlaps of two families of boxes.

    Returns:
        (index into `a` [k], index into `b` [k], boxes int64[k, 3, 2]), none of them empty.
    """
    first = np.maximum(a[:, None, :, 0], b[None, :, :, 0])
    last = np.minimum(a[:, None, :, 1], b[None, :, :, 1])
    i, j = np.nonzero((first < last).all(axis=2))
    return i, j, np.stack((first[i, j], last[i, j]), axis=2)


def elements(boxes: np.ndarray) -> np.ndarray:
    """int64[n] number of elements of each box."""
    return (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1)


def cut(box: np.ndarray, position: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Cut a box [3, 2] in two after about `position` of its elements, counted along experts, rows, columns.

    The cut is moved to the nearest row. Each side is a list of boxes in that order, at most two, empty if nothing is left of it.
    """
    experts, rows, cols = (int(n) for n in box[:, 1] - box[:, 0])
    at = min(max((2 * position + cols) // (2 * cols), 0), experts * rows)
    expert, row = divmod(at, rows)
    before = [_window(box, 0, 0, expert), _window(_window(box, 0, expert, expert + 1), 1, 0, row)]
    after = [_window(_window(box, 0, expert, expert + 1), 1, row, rows), _window(box, 0, expert + 1, experts)]
    if row == 0:
        after = [_window(box, 0, expert, experts)]
    return [part for part in before if _filled(part)], [part for part in after if _filled(part)]


def pieces(box: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Cut a box [3, 2] into boxes of at most `limit` elements, or of one row where a row is longer: whole experts if they fit."""
    experts, rows, cols = (int(n) for n in box[:, 1] - box[:, 0])
    whole = max(limit // (rows * cols), 1)
    lines = rows if rows * cols <= limit else max(limit // cols, 1)
    for expert in range(0, experts, whole):
        for row in range(0, rows, lines):
            yield _window(_window(box, 0, expert, min(expert + whole, experts)), 1, row, min(row + lines, rows))


def _window(box: np.ndarray, axis: int, first: int, last: int) -> np.ndarray:
    """The part of a box between `first` and `last`, counted from the box's own start along `axis`."""
    part = box.copy()
    part[axis] = box[axis, 0] + first, box[axis, 0] + last
    return part


def _filled(box: np.ndarray) -> bool:
    return bool((box[:, 0] < box[:, 1]).all())
