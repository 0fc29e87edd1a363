"""Where routes flip: a section of the page, from `flips` of the analysis' result.

A flip is a (token, layer) in which the two sides choose different sets of experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moerl.report.overview import as_float
from moerl.report.page_format import nats, number, share
from moerl.report.page_plot import (
    BLUE,
    GREY,
    SKY,
    VERMILLION,
    Plot,
    Section,
    axis,
    bars,
    heatmap,
    layer_axis,
    line,
    percent_axis,
    reference,
)

Result = Mapping[str, Any]
Found = Sequence[Mapping[str, Any]]

TITLE = "Where do routes flip?"
_ONE_SIDED = "The recording holds the routes of one side only, so there is nothing to compare them with."
_POSITION = axis("position in the sequence", type="category")


def flips_section(result: Result) -> Section:
    flips, layers = result["flips"], result["meta"]["layers"]
    if flips is None:
        return Section("flips", TITLE, _ONE_SIDED)
    first, second = result["sides"]
    lead = (
        f"A flip is a (token, layer) in which {first} and {second} choose different sets of experts: "
        f"{share(result['flip_share'])} of the decisions. {share(result['tokens_with_flip'])} of the tokens flip in some layer."
    )
    parts = [*_by_layer(flips["by_layer"], layers), *_heat(flips["heat"], layers), *_by_position(flips["by_position"])]
    parts += [*_by_kind(flips["by_kind"]), *_by_lag(flips["by_lag"]), *_by_frequency(flips["by_frequency"])]
    parts += [*_flipped_layers(flips["flipped_layers"]), *_by_version(flips["by_version"], layers)]
    return Section("flips", TITLE, lead, parts)


def layers_height(layers: Sequence[int]) -> int:
    """Height in px of a map with a line per layer."""
    return min(640, max(220, 90 + 16 * len(layers)))


def _by_layer(found: Found, layers: Sequence[int]) -> Iterator[Plot]:
    known = [one for one in found if one["share"] is not None]
    if not known:
        return
    mean = sum(one["share"] for one in known) / len(known)
    worst = max(known, key=lambda one: one["share"])
    trace = bars([one["layer"] for one in known], [one["share"] for one in known], VERMILLION)
    trace |= {
        "customdata": [number(one["jaccard"]) for one in known],
        "hovertemplate": "layer %{x}: %{y:.3~%} flip, Jaccard index of the sets %{customdata}<extra></extra>",
    }
    layout = {"xaxis": layer_axis(layers), "yaxis": percent_axis("share of the tokens"), **reference(mean)}
    title = f"Layer {worst['layer']} flips most often: {share(worst['share'])} of the tokens"
    yield Plot("by-layer", title, [trace], layout, f"Dashed: the mean of the layers, {share(mean)}.")
    trace = bars([one["layer"] for one in found], [one["first_share"] for one in found], SKY, form=".3~%")
    layout = {"xaxis": layer_axis(layers, "first layer that flips"), "yaxis": percent_axis("share of the tokens")}
    note = "A flip changes what later layers see, so a later one may be its consequence."
    yield Plot("first-layer", "Where a token's first flip is", [trace], layout, note)


def _heat(found: Mapping[str, Any], layers: Sequence[int]) -> Iterator[Plot]:
    edges = found["edges"]
    if len(edges) < 2:
        return
    names = [_range(a, b - 1) for a, b in pairwise(edges)]
    hover = "layer %{y}, position %{x}"
    trace = heatmap(found["share"], names, list(map(str, layers)), unit="share that flips", hover=hover, form=".3~%")
    layout = {"xaxis": _POSITION, "yaxis": axis("layer", type="category")}
    yield Plot("heat", "Flips by layer and position", [trace], layout, wide=True, height=layers_height(layers))


def _by_position(found: Found) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if not known:
        return
    names, more = [_range(one["from"], one["to"]) for one in known], {"customdata": [number(one["rows"]) for one in known], "points": True}
    hover = "position %{x}: %{y:.3~%} of %{customdata} rows"
    traces = [
        line(names, [one["share"] for one in known], "decisions", VERMILLION, hover, **more),
        line(names, [one["tokens_with_flip"] for one in known], "tokens with any flip", GREY, hover, **more),
    ]
    first, last = known[0]["share"], known[-1]["share"]
    title = f"Flips by position: {share(first)} at {names[0]}, {share(last)} at {names[-1]}"
    yield Plot("by-position", title, traces, {"xaxis": _POSITION, "yaxis": percent_axis("share that flips")})


def _by_kind(found: Found) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if known:
        said = ", ".join(f"{one['kind']} {share(one['share'])}" for one in known)
        yield _two_shares("by-kind", f"Flips by kind of row: {said}", [one["kind"] for one in known], known, "kind of row")


def _by_lag(found: Found) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if len(known) < 2:
        return
    names, title = ["unknown" if one["lag"] is None else str(one["lag"]) for one in known], "versions that the engine was behind"
    yield _two_shares("by-lag", f"Flips by lag: {share(known[0]['share'])} to {share(known[-1]['share'])}", names, known, title)
    traces = [bars(names, [one["kl_natural"] for one in known], VERMILLION, "natural", form=".2~e")]
    traces.append(bars(names, [one["kl_replay"] for one in known], BLUE, "R3", form=".2~e"))
    layout = {"xaxis": axis(title, type="category"), "yaxis": axis("KL, nats per token"), "barmode": "group"}
    note = "What lag adds is staleness, which R3 does not take away."
    said = f"KL by lag, R3: {nats(known[0]['kl_replay'])} to {nats(known[-1]['kl_replay'])}"
    yield Plot("kl-by-lag", said, traces, layout, note)


def _two_shares(name: str, title: str, names: Sequence[str], found: Found, x: str) -> Plot:
    rows = [f"{number(one['rows'])} rows" for one in found]
    more = {"customdata": rows, "hovertemplate": "%{x}: %{y:.3~%} of %{customdata}<extra>%{fullData.name}</extra>"}
    traces = [
        bars(names, [one["share"] for one in found], VERMILLION, "decisions") | more,
        bars(names, [one["tokens_with_flip"] for one in found], GREY, "tokens with any flip") | more,
    ]
    layout = {"xaxis": axis(x, type="category"), "yaxis": percent_axis("share that flips"), "barmode": "group"}
    return Plot(name, title, traces, layout)


def _by_frequency(found: Found) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if len(known) < 2:
        return
    names = [_range(one["from"], one["to"]) for one in known]
    trace = bars(names, [one["share"] for one in known], VERMILLION)
    trace |= {
        "customdata": [f"{number(one['token_ids'])} token ids" for one in known],
        "hovertemplate": "%{x} times: %{y:.3~%} flip, %{customdata}<extra></extra>",
    }
    title = f"Rare tokens flip {share(known[0]['share'])} of the time, common ones {share(known[-1]['share'])}"
    x = axis("occurrences of the input token in the recording", type="category")
    yield Plot("by-frequency", title, [trace], {"xaxis": x, "yaxis": percent_axis("share of the decisions")})


def _flipped_layers(found: Found) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if not known:
        return
    none = sum(as_float(one["share"]) for one in known if one["layers"] == 0)
    trace = bars([one["layers"] for one in known], [one["share"] for one in known], VERMILLION)
    trace["hovertemplate"] = "%{x} layers flip: %{y:.3~%} of the tokens<extra></extra>"
    few = {"dtick": 1} if max(one["layers"] for one in known) <= 16 else {}
    layout = {"xaxis": axis("layers that flip for the token", **few), "yaxis": percent_axis("share of the tokens")}
    yield Plot("flipped-layers", f"{share(none)} of the tokens have no flip at all", [trace], layout)


def _by_version(found: Found, layers: Sequence[int]) -> Iterator[Plot]:
    if len(found) < 3:
        return
    names = ["unknown" if one["version"] == -1 else number(one["version"]) for one in found]
    z = np.array([[as_float(one) for one in version["by_layer"]] for version in found]).T
    hover = "layer %{y}, version %{x}"
    trace = heatmap(z, names, list(map(str, layers)), unit="share that flips", hover=hover, form=".3~%")
    layout = {"xaxis": axis("weight version of the engine", type="category", nticks=12), "yaxis": axis("layer", type="category")}
    yield Plot("by-version", "Flips by layer and weight version", [trace], layout, wide=True, height=layers_height(layers))


def _range(low: int, high: int) -> str:
    return number(low) if low == high else f"{number(low)}–{number(high)}"
