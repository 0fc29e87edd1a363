"""What is wrong with routes, in a sentence: what was expected, what came, and the likely reason.

Each function returns None where nothing is wrong; the caller raises its own error with the sentence.
"""

import numpy as np

from moerl.routing import codec
from moerl.routing.layout import Layout, VersionRun, describe, ranges


def route_problem(ids: np.ndarray, layout: Layout, *, numbers: np.ndarray | None = None) -> str | None:
    """What is wrong with the experts of integer routes `ids[row, moe_layer, k]`.

    Args:
        ids: any integer type; with the type of the layout it is much faster.
        numbers: int[row] how to call the rows in the sentence; None counts from 0.
    """
    if ids.size == 0 or (ids.dtype == layout.dtype and codec.all_distinct(ids, layout.experts)):
        return None
    numbers = np.arange(len(ids)) if numbers is None else numbers
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= layout.experts:
        row, layer, _ = np.argwhere((ids < 0) | (ids >= layout.experts))[0]
        wrapped = "; more than 256 experts do not fit one byte each" if ids.dtype.itemsize == 1 and layout.experts > 256 else ""
        return (
            f"expert ids must lie in 0..{layout.experts - 1}, got {low}..{high} (first at row {numbers[row]}, layer "
            f"{layout.layers[layer]}){wrapped}; is the engine serving another model?"
        )
    if layout.topk > 1:
        ordered = np.sort(ids, axis=-1)
        duplicate = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        zero = (ids == 0).all(axis=-1)
        if zero.any():
            return _zero_problem(zero, layout, numbers)
        if duplicate.any():
            row, layer = np.argwhere(duplicate)[0]
            return (
                f"experts within a row must be distinct, got {ids[row, layer].tolist()} at row {numbers[row]}, layer "
                f"{layout.layers[layer]}; were rows of two requests mixed, or ids cut to fewer bits?"
            )
    return None


def _zero_problem(zero: np.ndarray, layout: Layout, numbers: np.ndarray) -> str:
    """Of bool[row, layer]: which rows or layers hold zeros only."""
    empty = [layout.layers[i] for i in np.flatnonzero(zero.all(axis=0))]
    if len(empty) == len(layout.layers):
        return (
            f"all {len(zero)} rows of all layers are zero: the engine recorded nothing; is enable_return_routed_experts on, and does its "
            "top-k run unfused?"
        )
    if empty:
        return (
            f"all rows of layers {ranges(empty)} are zero: the engine recorded nothing there; pipeline-parallel SGLang does not "
            "return routes of later stages, and fused top-k kernels return before they are captured"
        )
    rows = np.flatnonzero(zero.any(axis=1))
    where = ", the last ones" if np.array_equal(rows, np.arange(len(zero) - len(rows), len(zero))) else ""
    return (
        f"{len(rows)} rows are all zero (first: row {numbers[rows[0]]}{where}): routes of these tokens were lost, as after an abort while "
        "queued or in a buffer that was padded"
    )


def count_problem(count: int, *, rows: int, layers: int, layout: Layout) -> str | None:
    """What is wrong with the number of ids that an engine returned.

    Args:
        count: ids that came, of all rows and layers together.
        rows: expected rows (prompt + response - 1).
        layers: decoder layers of the model, dense ones included.
    """
    topk, moe = layout.topk, len(layout.layers)
    if count == rows * layers * topk:
        return None
    wanted = f"expected {rows} rows of routes (prompt + response - 1) of {layers} layers x top-{topk}"
    guesses = []
    if count % (layers * topk) == 0:
        got = count // (layers * topk)
        guesses.append(f"got {got} rows: {_row_guess(got, rows)}")
    if moe != layers and count == rows * moe * topk:
        guesses.append(
            f"got {rows} rows of {moe} layers: the dense layers were left out; give the number of layers that the engine records"
        )
    elif rows and count and count % (rows * topk) == 0:
        guesses.append(f"got {rows} rows of {count // (rows * topk)} layers x top-{topk}: the engine serves a model of other depth")
    elif rows and count and count % (rows * layers) == 0:
        guesses.append(f"got {rows} rows of {layers} layers x top-{count // (rows * layers)}: the engine serves a model of other top-k")
    if not guesses:
        guesses.append(f"got {count} ids, no whole number of rows: is the engine serving another model, or was the reply cut short?")
    return f"{wanted}, {', or '.join(guesses)}; this model has {describe(layout)}"


def _row_guess(got: int, rows: int) -> str:
    if got == 0:
        return "nothing was recorded; was the request aborted while it waited?"
    if got == rows + 1:
        return "1 too many; the last sampled token was never an input and has no row, is a dummy row kept for it?"
    if got > rows:
        return f"{got - rows} too many; is routed_experts_start_len ignored, or did a resumed request return its rows twice?"
    return f"{rows - got} missing; were rows of a cached prefix or of an earlier turn left out (routed_experts_start_len)?"


def shape_problem(ids: np.ndarray, layout: Layout) -> str | None:
    """What is wrong with shape and type of routes that should be `ids[row, moe_layer, k]` of `layout`."""
    layers = len(layout.layers)
    if ids.ndim != 3 or ids.shape[1:] != (layers, layout.topk):
        why = ""
        if ids.ndim == 3 and ids.shape[2] == layout.topk:
            why = f"; {ids.shape[1]} layers came: are dense layers included, or layers of another pipeline stage missing?"
        elif ids.ndim == 3 and ids.shape[1] == layers:
            why = f"; top-{ids.shape[2]} came: is the model's number of experts per token another?"
        return f"trace ids have shape {ids.shape}, expected [row, moe_layer, k] = {(*ids.shape[:1], layers, layout.topk)}{why}"
    if ids.dtype != layout.dtype:
        return f"trace ids are {ids.dtype}, expected {layout.dtype} for {layout.experts} experts"
    return None


def version_problem(versions: tuple[VersionRun, ...], rows: int) -> str | None:
    """What is wrong with runs that should cover `rows` rows once, in order."""
    ends = [0, *(run.stop for run in versions)]
    if [run.start for run in versions] != ends[:-1] or ends[-1] != rows or any(run.stop <= run.start for run in versions):
        return f"version runs {[tuple(run) for run in versions]} do not cover rows 0..{rows} once, in order"
    return None
