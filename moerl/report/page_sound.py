"""Whether the recorded data can be trusted, and how evenly experts are used: a section of the page, from `soundness` of the result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moerl.report.overview import as_float
from moerl.report.page_format import count, number, pair, share
from moerl.report.page_plot import (
    BLUE,
    DIVERGING,
    ORANGE,
    SKY,
    VERMILLION,
    Plot,
    Section,
    Table,
    axis,
    bars,
    heatmap,
    layer_axis,
    line,
)
from moerl.report.page_routes import layers_height

Result = Mapping[str, Any]
Sides = Mapping[str, Mapping[str, Any]]

MOST_ROWS = 40
"""Of the table of experts that nobody chose."""


def sound_section(result: Result) -> Section:
    sound, meta = result["soundness"], result["meta"]
    sides = {name: sound[key] for key, name in zip(("engine", "trainer"), pair(result), strict=True) if sound[key]}
    parts: list[Plot | Table] = [*_versions(sound["versions"]), *_lags(sound["lags"]), *_balance(sides, meta), *_entropy(sides, meta)]
    parts += [*_load(sides, meta), *_difference(sides, meta), *_dead(sides)]
    lead = "Whether rows are complete and belong together, and how evenly experts are used."
    return Section("sound", "Is the data sound?", lead, parts, _facts(result))


def _facts(result: Result) -> dict[str, str]:
    """What must be nothing comes first."""
    sound = result["soundness"]
    missing = sound["missing_layers"]
    return {
        "Rows without routes": share(sound["zero_rows"]),
        "Decisions with an expert twice": share(sound["repeated_ids"]),
        "Layers without routes": ", ".join(map(str, missing)) if missing else "none",
        "Rows missing at a sample's end": share(sound["padding_share"]),
        "Logprobs that cannot be": number(result["bad_logprobs"]),
        "Rows newer than the trainer": number(sound["newer_rows"]),
        "Samples whose version falls": number(sound["decreasing_samples"]),
        "Samples of several versions": number(sound["mixed_samples"]),
        "Rows older than the trainer": share(result["stale_share"]),
        "Rows equal to the one before": share(sound["repeated_rows"]),
    }


def _versions(found: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if len(known) < 2:
        return
    names = ["unknown" if one["version"] in (None, -1) else number(one["version"]) for one in known]
    yield _rows("rows-by-version", f"The rows are of {count(len(known), 'version')}", names, known, "weight version of the engine")


def _lags(found: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    known = [one for one in found if one["rows"]]
    if len(known) < 2:
        return
    names = ["unknown" if one["lag"] is None else number(one["lag"]) for one in known]
    current = sum(as_float(one["share"]) for one in known if one["lag"] == 0)
    yield _rows("rows-by-lag", f"{share(current)} of the rows are of the trainer's version", names, known, "versions behind the trainer")


def _rows(name: str, title: str, names: Sequence[str], found: Sequence[Mapping[str, Any]], x: str) -> Plot:
    trace = bars(names, [one["rows"] for one in found], BLUE)
    trace |= {"customdata": [share(one["share"]) for one in found], "hovertemplate": "%{x}: %{y:,} rows, %{customdata}<extra></extra>"}
    return Plot(name, title, [trace], {"xaxis": axis(x, type="category", nticks=20), "yaxis": axis("rows", rangemode="tozero")})


def _balance(sides: Sides, meta: Mapping[str, Any]) -> Iterator[Plot]:
    traces, hover = [], "layer %{x}: %{y:.3~g} times the mean"
    for (name, found), colours in zip(sides.items(), ((BLUE, SKY), (VERMILLION, ORANGE)), strict=False):
        layers = found["by_layer"]
        x = [one["layer"] for one in layers]
        traces.append(line(x, [one["imbalance"] for one in layers], f"busiest expert, {name}", colours[0], hover, points=True))
        if any(one["rank_imbalance"] not in (None, 1) for one in layers):  # a single rank has it all
            traces.append(line(x, [one["rank_imbalance"] for one in layers], f"busiest EP rank, {name}", colours[1], hover, points=True))
    known = [(one["imbalance"], one["layer"]) for found in sides.values() for one in found["by_layer"] if one["imbalance"] is not None]
    if known:
        most, layer = max(known)
        title = f"The busiest expert takes {most:.2g} times its share, in layer {layer}"
        layout = {"xaxis": layer_axis(meta["layers"]), "yaxis": axis("load over the mean", rangemode="tozero")}
        yield Plot("balance", title, traces, layout, "1 is perfect balance.")


def _entropy(sides: Sides, meta: Mapping[str, Any]) -> Iterator[Plot]:
    traces, known = [], []
    for (name, found), colour, dash in zip(sides.items(), (BLUE, VERMILLION), ("solid", "dot"), strict=False):
        x, y = [one["layer"] for one in found["by_layer"]], [one["entropy"] for one in found["by_layer"]]
        known += [one for one in y if one is not None]
        traces.append(line(x, y, name, colour, "layer %{x}: %{y:.4~g}", points=True, dash=dash))
    if known:
        layout = {"xaxis": layer_axis(meta["layers"]), "yaxis": axis("entropy over its largest value", range=[0, 1.05])}
        title = f"Entropy of the expert load is {number(min(known))} or more"
        yield Plot("entropy", title, traces, layout, "1 is an even load, 0 a single expert.")


def _load(sides: Sides, meta: Mapping[str, Any]) -> Iterator[Plot]:
    """Of the first side; the other one is hardly ever different to the eye."""
    for name, found in list(sides.items())[:1]:
        times = _times(found, meta)
        highest = max(2.0, float(np.nanquantile(times, 0.995)))  # one hot expert must not make the others pale
        yield _map("load", f"Load of the experts, {name}", times, meta, "1 is an even load; white is idle.", zmax=highest)


def _difference(sides: Sides, meta: Mapping[str, Any]) -> Iterator[Plot]:
    if len(sides) < 2:
        return
    (first, a), (second, b) = sides.items()
    change = _times(b, meta) - _times(a, meta)
    bound = float(np.nanmax(np.abs(change))) or 1.0
    note = f"Load of {second} minus that of {first}, by flips: blue where {second} chooses the expert more often, orange where less."
    title = f"Flips move the load of an expert by {bound:.2g} of an even share at most"
    yield _map("load-change", title, change, meta, note, zmin=-bound, zmax=bound, colorscale=DIVERGING)


def _times(found: Mapping[str, Any], meta: Mapping[str, Any]) -> np.ndarray:
    """Load over an even one: float64[layer, expert]."""
    return np.array([[as_float(one) for one in layer] for layer in found["load"]]) * meta["experts"]


def _map(name: str, title: str, times: np.ndarray, meta: Mapping[str, Any], note: str, **more: Any) -> Plot:
    layers, hover = list(map(str, meta["layers"])), "layer %{y}, expert %{x}"
    trace = heatmap(np.round(times, 3), list(range(times.shape[1])), layers, unit="times even", hover=hover, **more)
    layout = {"xaxis": axis("expert"), "yaxis": axis("layer", type="category")}
    return Plot(name, title, [trace], layout, note, wide=True, height=layers_height(meta["layers"]))


def _dead(sides: Sides) -> Iterator[Table]:
    rows = [
        (name, str(one["layer"]), number(len(one["dead"])), ", ".join(map(str, one["dead"][:24])) + (" …" if len(one["dead"]) > 24 else ""))
        for name, found in sides.items()
        for one in found["by_layer"]
        if one["dead"]
    ]
    if rows:
        total = sum(len(one["dead"]) for found in list(sides.values())[:1] for one in found["by_layer"])
        yield Table(f"{count(total, 'expert')} that no token chose", ("side", "layer", "experts", "which"), rows[:MOST_ROWS], left=4)
