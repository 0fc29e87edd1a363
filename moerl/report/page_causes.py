"""Why routes flip: a section of the page, from `causes` of the analysis' result.

A margin is the distance, in selection scores, between the last expert that was chosen and the first that was not.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moerl.report.overview import as_float
from moerl.report.page_format import capital, number, pair, share
from moerl.report.page_plot import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    Plot,
    Section,
    Table,
    axis,
    bars,
    heatmap,
    layer_axis,
    line,
    log_axis,
    percent_axis,
)

Result = Mapping[str, Any]
Found = Sequence[Mapping[str, Any]]
Sides = tuple[str, str]

TITLE = "Why do they flip?"
MOST_ROWS = 12
"""Of a table."""
MOST_BINS = 40
"""Of margins; finer ones are joined."""
ENOUGH = 30
"""Decisions from which on a bin's share of flips is drawn."""

_LEAD = (
    "A margin is the distance between the last expert chosen and the first one left out, in selection scores. Flips that come from "
    "rounding sit at small margins and go both ways alike; others point at a difference in weights, biases or rows."
)
_NOTHING = "Nothing that could explain a flip was recorded: no margins, and the routes of one side only."


def causes_section(result: Result) -> Section:
    causes, layers, names = result["causes"], result["meta"]["layers"], pair(result)
    if causes is None:
        return Section("causes", TITLE, _NOTHING)
    parts = [*_margins(causes["margin"], result), *_flipped_mass(causes["flipped_mass"], names), *_by_layer(causes["by_layer"], layers)]
    parts += [*_positions(causes["position_match"], names), *_layer_match(causes["layer_match"], layers, names), *_layer_table(causes)]
    parts += [*_experts(causes["experts"], names), *_bias(causes["bias"])]
    return Section("causes", TITLE, " ".join([_LEAD, *_same_bias(causes["bias"], names)]), parts)


def _margins(found: Mapping[str, Any] | None, result: Result) -> Iterator[Plot]:
    if found is None:
        return
    edges, same, flipped, expected = _joined(found)
    middle, names = np.sqrt(edges[:-1] * edges[1:]), [f"{number(a)} … {number(b)}" for a, b in pairwise(edges.tolist())]
    x, more = log_axis("margin, in selection scores"), {"customdata": names}
    hover, shape = "margin %{customdata}: %{y:.3~%} of all decisions", {"fill": "tozeroy", "shape": "hvh"}
    traces = [
        line(middle, same, "same experts", GREY, hover, **more, **shape),
        line(middle, flipped, "flipped", VERMILLION, hover, **more, **shape),
    ]
    title = "Flips sit at small margins" if _smaller(middle, flipped, same) else "Flips do not sit at small margins"
    yield Plot("margins", title, traces, {"xaxis": x, "yaxis": percent_axis("share of all decisions")})
    decisions = same + flipped
    enough = decisions * result["rows"] * len(result["meta"]["layers"]) >= ENOUGH
    hover, some = "margin %{customdata}: %{y:.3~%} flip", np.maximum(decisions, 1e-12)
    traces = [
        line(middle, np.where(enough, flipped / some, np.nan), "measured", VERMILLION, hover, **more, points=True),
        line(middle, np.where(enough, expected, np.nan), "Gaussian error", GREY, hover, **more, dash="dash"),
    ]
    note = "Dashed: what independent errors of that size in the scores would do. Flips to the right of it have another cause."
    title = f"Near ties, flips are those of a score error of {number(result['score_error'])}"
    yield Plot("flip-by-margin", title, traces, {"xaxis": x, "yaxis": percent_axis("share that flips")}, note)


def _joined(found: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges, shares of all decisions that stay and that flip, and the expected share of flips; in wider bins if there are many."""
    edges = np.array(found["edges"], float)
    size = -(-(len(edges) - 1) // MOST_BINS)
    starts = np.arange(0, len(edges) - 1, size)
    same, flipped, expected = (np.array([as_float(one) for one in found[key]]) for key in ("same", "flipped", "expected"))
    weight = np.where(np.isfinite(expected), same + flipped, 0.0)
    sums = [np.add.reduceat(column, starts) for column in (same, flipped, np.nan_to_num(expected) * weight, weight)]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums[2] / sums[3]
    joined = np.r_[edges[starts], edges[-1]]
    joined[0] = max(joined[0], joined[1] / 10)  # a logarithmic axis has no 0
    return joined, sums[0], sums[1], mean


def _smaller(middle: np.ndarray, flipped: np.ndarray, same: np.ndarray) -> bool:
    """Whether flips' typical margin is half of that of other decisions or less."""
    if not flipped.sum() or not same.sum():
        return False
    typical = [np.average(np.log(middle), weights=weights) for weights in (flipped, same)]
    return bool(typical[0] + np.log(2) <= typical[1])


def _flipped_mass(found: Mapping[str, Any] | None, sides: Sides) -> Iterator[Plot]:
    if found is None:
        return
    pairs = list(pairwise(found["edges"]))
    trace = bars([(a + b) / 2 for a, b in pairs], found["share"], VERMILLION, width=[b - a for a, b in pairs])
    trace |= {
        "customdata": [f"{share(a)} … {share(b)}" for a, b in pairs],
        "hovertemplate": "%{customdata} of the weight: %{y:.3~%} of the flips<extra></extra>",
    }
    x = percent_axis(f"gate weight on experts that {sides[0]} did not choose")
    layout = {"xaxis": x, "yaxis": percent_axis("share of the flips"), "bargap": 0}
    yield Plot("flipped-mass", f"A flip moves {share(found['mean'])} of the gate weight on average", [trace], layout)


def _by_layer(found: Found, layers: Sequence[int]) -> Iterator[Plot]:
    x = [one["layer"] for one in found]
    curves = (("score_error", "score error", VERMILLION), ("median_margin", "median margin", GREY))
    curves += (("median_margin_flipped", "median margin of flips", BLUE),)
    if traces := _known(x, found, curves, "layer %{x}: %{y:.2~e}"):
        layout = {"xaxis": layer_axis(layers), "yaxis": log_axis("selection score")}
        yield Plot("errors", "Size of the error against the margins, by layer", traces, layout)
    curves = (("direction", "one-way", PURPLE), ("group_share", "groups differ", GREEN), ("far_flip_share", "far from a tie", ORANGE))
    if traces := _known(x, found, curves, "layer %{x}: %{y:.3~%} of the flips"):
        note = (
            "One-way: 0 where experts win as many tokens as they lose, 100 % where flips only ever go one way. Far from a tie: flips above "
            "the layer's median margin."
        )
        layout = {"xaxis": layer_axis(layers), "yaxis": percent_axis("share of the flips", range=[0, 1.02])}
        yield Plot("kinds", "What kind of flips, by layer", traces, layout, note)


def _known(x: Sequence[int], found: Found, curves: Sequence[tuple[str, str, str]], hover: str) -> list[dict[str, Any]]:
    return [
        line(x, [one[key] for one in found], name, colour, hover, points=True)
        for key, name, colour in curves
        if any(one[key] is not None for one in found)
    ]


def _positions(found: Mapping[str, Any] | None, sides: Sides) -> Iterator[Plot]:
    known = {int(offset): one for offset, one in (found or {}).items() if one is not None}
    if not known:
        return
    best = max(known, key=lambda offset: known[offset])
    names = [f"{offset:+d}".replace("-", "−") if offset else "0" for offset in known]
    trace = bars(names, list(known.values()), [BLUE if offset == best else GREY for offset in known], form=".3~%")
    title = f"Routes are shifted by {best} rows" if best else "Rows stand at their tokens"
    note = f"Experts in common between row i of {sides[0]} and row i + offset of {sides[1]}: the best match must be at 0."
    layout = {"xaxis": axis("offset, rows", type="category"), "yaxis": percent_axis("experts in common", range=[0, 1.02])}
    yield Plot("positions", title, [trace], layout, note)


def _layer_match(found: Sequence[Sequence[float | None]] | None, layers: Sequence[int], sides: Sides) -> Iterator[Plot]:
    if not found or len(layers) < 2:
        return
    matrix = np.array([[as_float(one) for one in row] for row in found])
    filled = np.where(np.isfinite(matrix), matrix, -1)
    wrong = [layers[i] for i in np.flatnonzero(filled.argmax(axis=1) != np.arange(len(matrix)))]
    names = list(map(str, layers))
    trace = heatmap(matrix, names, names, unit="experts in common", hover=f"{sides[0]} layer %{{y}}, {sides[1]} layer %{{x}}", form=".3~%")
    layout = {"xaxis": axis(f"layer of {sides[1]}", type="category"), "yaxis": axis(f"layer of {sides[0]}", type="category")}
    title = (
        f"Layers {', '.join(map(str, wrong))} match another layer better than themselves" if wrong else "Every layer matches itself best"
    )
    yield Plot("layer-match", title, [trace], layout, "Mean share of experts in common; the diagonal must be darkest.")


def _layer_table(causes: Mapping[str, Any]) -> Iterator[Table]:
    found = sorted(causes["by_layer"], key=lambda one: -(one["score_error"] or 0.0))
    rows = [
        (
            str(one["layer"]),
            *(number(one[key]) for key in ("score_error", "median_margin", "median_margin_flipped")),
            *(share(one[key]) for key in ("ties", "far_flip_share", "group_share", "flipped_mass", "direction")),
            number(one["bias_diff"]),
        )
        for one in found[:MOST_ROWS]
    ]
    head = ("layer", "score error", "median margin", "… of flips", "exact ties", "far from a tie", "groups differ", "weight moved")
    head += ("one-way", "bias differs by")
    title = "Layers, largest score error first" if len(found) <= MOST_ROWS else f"The {MOST_ROWS} layers of the largest score error"
    group = causes["group_share"]
    note = "" if group is None else f"In {share(group)} of the flips the two sides must have chosen different groups of experts."
    if rows:
        yield Table(title, head, rows, note)


def _experts(found: Found, sides: Sides) -> Iterator[Table]:
    keys = ("layer", "expert", "engine", "trainer", "gained", "lost")
    rows = [tuple(number(one[key]) for key in keys) for one in found[:MOST_ROWS]]
    head = ("layer", "expert", f"tokens, {sides[0]}", f"tokens, {sides[1]}", "won", "lost")
    note = f"Tokens that came to the expert and went away from it where {sides[1]} chose otherwise than {sides[0]}."
    if rows:
        yield Table("Experts that win or lose most by flips", head, rows, note)


def _same_bias(found: Found, sides: Sides) -> Iterator[str]:
    """Worth a sentence only."""
    if found and not any(one["max_diff"] for one in found):
        yield f"{capital(sides[0])} and {sides[1]} hold the same correction biases."


def _bias(found: Found) -> Iterator[Table]:
    differ = sorted((one for one in found if one["max_diff"]), key=lambda one: -one["max_diff"])
    keys = ("step", "engine_version", "layer", "expert", "max_diff")
    rows = [tuple(number(one[key]) for key in keys) for one in differ[:MOST_ROWS]]
    if rows:
        title = f"The correction bias differs by up to {rows[0][-1]}"
        yield Table(title, ("step", "engine version", "layer", "expert", "difference"), rows, "Largest differences first.")
