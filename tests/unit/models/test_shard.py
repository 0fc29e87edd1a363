"""Windows of shards against slices put together with numpy, for every kind of weight of all families."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import ModelError
from moerl.models.shard import cut_units, shard_shape, windows
from moerl.models.spec import Param
from moerl.models.stages import pipeline_stages


@st.composite
def weights(draw) -> tuple[Param, int]:
    """(kind of weight, parts that divide it)"""
    parts, cols, each = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["vector", "row", "column", "gated", "vocabulary", "grouped", "grouped bias"]))
    if kind == "vector":
        return Param("m", ("a",), (each * parts,), 0), parts
    if kind == "row":
        return Param("m", ("a",), (cols, each * parts), 1), parts
    if kind == "vocabulary":
        return Param("m", ("a",), (draw(st.integers(1, 20)), cols), 0, "once"), parts
    if kind.startswith("grouped"):
        head, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        shapes = tuple((each * parts * n * head, cols)[: 1 if kind.endswith("bias") else 2] for n in (ratio, 1, 1))
        return Param("m", ("q", "k", "v"), shapes[0], 0, part_shapes=shapes, head_rows=head), parts
    names = ("gate", "up") if kind == "gated" else ("a",)
    return Param("m", names, (each * parts, cols), 0), parts


def naive(param: Param, tensors: list[np.ndarray], index: int, parts: int) -> np.ndarray:
    """Slice `index`, as Megatron lays it out."""
    if param.head_rows:
        groups = tensors[1].shape[0] // param.head_rows
        fused = np.concatenate([tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors], axis=1)
        return np.split(fused, parts)[index].reshape(-1, *tensors[0].shape[1:])
    if param.is_vocabulary:
        each = -(-tensors[0].shape[0] // parts)
        return tensors[0][index * each : (index + 1) * each]
    return np.concatenate([np.split(tensor, parts, axis=param.tp_axis)[index] for tensor in tensors])


@given(weights())
def test_windows_are_where_the_slices_are(case: tuple[Param, int]) -> None:
    param, parts = case
    shapes = [param.part_shape(part) for part in range(len(param.hf))]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    tensors = [np.arange(end - np.prod(shape), end).reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
    seen = []
    for index in range(parts):
        expected = naive(param, tensors, index, parts)
        assert shard_shape(param, index, parts) == expected.shape
        built = np.full(expected.shape, -1)
        for window in windows(param, index, parts):
            assert (built[window.in_shard] == -1).all()
            built[window.in_shard] = tensors[window.part][window.in_hf]
        assert np.array_equal(built, expected)
        seen.append(built.ravel())
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(ends[-1])), "all slices together are the whole"


def test_a_replicated_weight_is_one_window() -> None:
    (window,) = windows(Param("m", ("a",), (3, 4)), 0, 1)
    assert (window.in_hf, window.in_shard) == ((slice(0, 3), slice(0, 4)), slice(0, 3))


@pytest.mark.parametrize(
    ("param", "parts", "message"),
    [
        (Param("m", ("a",), (6, 2), 0), 4, "m: 6 elements cannot be cut into 4 parts"),
        (Param("m", ("a",), (6, 3), 1), 2, "m: 3 elements cannot be cut into 2 parts"),
        (
            Param("m", ("q", "k", "v"), (8, 2), 0, part_shapes=((8, 2), (4, 2), (4, 2)), head_rows=2),
            4,
            "m: 2 key-value heads cannot be cut",
        ),
    ],
)
def test_parts_that_do_not_divide_are_refused(param: Param, parts: int, message: str) -> None:
    assert cut_units(param) % parts
    with pytest.raises(ModelError, match=message):
        shard_shape(param, 0, parts)


@given(st.integers(1, 100), st.integers(1, 16))
def test_pipeline_stages_differ_by_one_layer_at_most_and_the_last_has_the_fewest(layers: int, stages: int) -> None:
    counts = pipeline_stages(layers, stages)
    assert (len(counts), sum(counts)) == (stages, layers)
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
