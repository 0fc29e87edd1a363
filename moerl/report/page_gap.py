"""How large the gap between engine and trainer is, and what it is made of: a section of the page.

From `gap` of the analysis' result, a dictionary of plain values in which anything may be None. A figure in it is {value, low, high}.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moerl.report.overview import as_float, trend
from moerl.report.page_format import nats, number, pair, share
from moerl.report.page_plot import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    Plot,
    Section,
    Table,
    axis,
    band,
    bars,
    between,
    curve,
    error_bars,
    line,
    log_axis,
    percent_axis,
    step_axis,
)

Result = Mapping[str, Any]
Figures = Sequence[Mapping[str, Any] | None]

Modes = Mapping[str, tuple[str, str]]
"""mode -> (what figures call it, colour)"""

MODES: Modes = {"natural": ("natural", VERMILLION), "r2": ("R2", ORANGE), "replay": ("R3", BLUE)}
AGAINST: Modes = {"natural": ("b against a", VERMILLION)}
"""Two recordings have the gap between them only."""

_DASHES = {"natural": "solid", "r2": "dot", "replay": "solid"}  # R2 may equal natural, which must stay visible under it
_TAUS = ("1.2", "2", "5", "10")
_LEAD = (
    "Engine and trainer give each sampled token a probability; d is the trainer's logprob minus the engine's. Natural: the trainer's "
    "router chooses by itself. R2: the trainer repeats its own earlier choice. R3: it is forced onto the engine's experts."
)
_LEAD_AGAINST = "Both recordings give each sampled token a probability; d is b's logprob minus a's."
_WITHOUT = "No token carries a logprob of both sides, so only routes are compared."


def gap_section(result: Result) -> Section:
    gap, modes, names = result["gap"], modes_of(result), pair(result)
    present = {mode: found for mode in modes if (found := gap["modes"][mode]) and found["tokens"]}
    parts: list[Plot | Table] = []
    if present:
        parts += [_parts(result, present, modes), _extremes(present, modes), _table(present, modes, names)]
    parts += _trends(gap["steps"], modes, clickable=result["kind"] == "run")
    if present:
        parts += _histogram(gap["histogram"], modes, names)
    lead = _LEAD_AGAINST if result["kind"] == "against" else _LEAD
    return Section("gap", "How large is the gap?", lead if present else _WITHOUT, parts)


def modes_of(result: Result) -> Modes:
    """The modes that a result can have."""
    return AGAINST if result["kind"] == "against" else MODES


def value(figure: Mapping[str, Any] | None) -> float:
    """The value of a figure with a band; NaN for none."""
    return as_float(None if figure is None else figure["value"])


def _parts(result: Result, present: Mapping[str, Any], modes: Modes) -> Plot:
    """KL of each mode, and the two parts of the natural one: what routes make, and what stays without them."""
    parts, (first, second) = result["gap"]["parts"], pair(result)
    figures = {modes[mode][0]: found["kl"] for mode, found in present.items()}
    colours = [modes[mode][1] for mode in present]
    mode, kl = next(iter(figures.items()))
    title = f"KL({first} ‖ {second}) is {nats(value(kl))} nats per token" + (f", {mode}" if len(modes) > 1 else "")
    note = "k3 estimate on the sampled tokens; whiskers are 95 % bands over samples."
    if parts and (whole := value(parts["routing"]) + value(parts["remainder"])) > 0:
        figures |= {"routes": parts["routing"], "remainder": parts["remainder"]}
        colours += ["#8c8c8c", "#c4c4c4"]
        title = f"Routes make {share(value(parts['routing']) / whole)} of the gap"
        note += " Natural is made of routes (what R3 takes away) and a remainder (other arithmetic: what R3 leaves)."
    trace = bars(list(figures), [value(one) for one in figures.values()], colours, form=".2~e", **error_bars(list(figures.values())))
    return Plot("parts", title, [trace], {"xaxis": axis(""), "yaxis": axis("KL, nats per token")}, note)


def _extremes(present: Mapping[str, Any], modes: Modes) -> Plot:
    traces, names = [], [f"1/{tau} … {tau}" for tau in _TAUS]
    for mode, found in present.items():
        name, colour = modes[mode]
        figures = [found["extreme"][tau] for tau in _TAUS]
        traces.append(bars(names, [value(one) for one in figures], colour, name, form=".3~%", **error_bars(figures)))
    mode, found = next(iter(present.items()))
    title = f"{share(value(found['extreme']['2']))} of the tokens are off by more than a factor of 2"
    title += f", {modes[mode][0]}" if len(modes) > 1 else ""
    layout = {"xaxis": axis("importance ratio exp(d) outside of"), "yaxis": percent_axis("share of the tokens"), "barmode": "group"}
    return Plot("extremes", title, traces, layout)


def _table(present: Mapping[str, Any], modes: Modes, names: tuple[str, str]) -> Table:
    rows = []
    for mode, found in present.items():
        kl, k1 = found["kl"], found["k1"]
        shares = [share(value(found["extreme"][tau])) for tau in _TAUS]
        size = f"{value(found['ess']):.4f}" if found["ess"] is not None else number(None)
        divergences = nats(value(kl)), between(kl), nats(value(k1))
        rows.append((modes[mode][0], number(found["tokens"]), *divergences, number(value(found["abs_diff"])), *shares, size))
    head = ("", "tokens", "KL, k3", "95 % band", "KL, k1", "mean |d|", *(f"F({tau})" for tau in _TAUS), "effective sample size")
    note = (
        f"KL({names[0]} ‖ {names[1]}) in nats per token. F(τ): share of the tokens with exp(d) outside 1/τ … τ. Effective sample size: of "
        "the weights exp(d), as a share of the tokens."
    )
    return Table("The same in numbers", head, rows, note)


def _trends(steps: Sequence[Mapping[str, Any]], modes: Modes, *, clickable: bool) -> Iterator[Plot]:
    at = np.array([one["step"] for one in steps], np.int64)
    note = "Bands are 95 % over samples."
    if clickable:
        note += " A click shows samples of the step, or of the nearest that has some, further down."
    present = [mode for mode in modes if any(one["modes"][mode] for one in steps)]
    measures: tuple[tuple[str, str, dict[str, Any], str, Callable[[float], str]], ...] = (
        ("kl", "KL by step", log_axis("nats per token"), ".2~e", nats),
        ("ess", "Effective sample size by step", axis("share of the tokens"), ".5~g", "{:.4f}".format),
        ("abs_diff", "Mean |d| by step", log_axis("nats"), ".2~e", number),
    )
    for measure, title, y, form, show in measures if present else ():
        figures = {mode: [(one["modes"][mode] or {measure: None})[measure] for one in steps] for mode in present}
        said = ", ".join(f"{modes[mode][0]} {_ends(found, show)}" for mode, found in figures.items() if mode != "r2")
        traces = [trace for mode, found in figures.items() for trace in _trend(at, found, *modes[mode], form, _DASHES[mode])]
        layout = {"xaxis": step_axis(at), "yaxis": y, "hovermode": "x"}
        name = f"trend-{measure.replace('_', '-')}"
        yield Plot(name, f"{title}: {said}", traces, layout, note, wide=measure == "kl", drill=clickable)
    flips = [one["flip_share"] for one in steps]
    if any(figure is not None for figure in flips):
        traces = _trend(at, flips, "decisions", VERMILLION, ".3~%")
        traces += _trend(at, [one["tokens_with_flip"] for one in steps], "tokens with any flip", GREY, ".3~%")
        layout = {"xaxis": step_axis(at), "yaxis": percent_axis("share that flips"), "hovermode": "x"}
        title = f"Flips by step: {_ends(flips, share)} of the (token, layer) decisions"
        yield Plot("trend-flips", title, traces, layout, note, wide=True, drill=clickable)


def _trend(at: np.ndarray, figures: Figures, name: str, colour: str, form: str, dash: str = "solid") -> list[dict[str, Any]]:
    """A curve with its confidence band; of bins, the means of both."""
    columns = {key: np.array([as_float(None if one is None else one[key]) for one in figures]) for key in ("value", "low", "high")}
    middle, low, high = (trend(at, column) for column in columns.values())
    positive = np.maximum(low.mean, middle.mean / 50)  # a logarithmic axis has no 0
    return [*band(middle, positive, high.mean, colour), *curve(middle, name, colour, form=form, spread=False, dash=dash)]


def _ends(figures: Figures, show: Callable[[float], str]) -> str:
    """The first and the last of the figures that are known."""
    known = [value(figure) for figure in figures if figure is not None]
    if not known:
        return "not measured"
    return show(known[0]) if len(known) == 1 else f"{show(known[0])} → {show(known[-1])}"


def _histogram(histogram: Mapping[str, Any], modes: Modes, sides: tuple[str, str]) -> Iterator[Plot]:
    """Edges are spaced logarithmically on both sides of 0, so bins are drawn one beside the other and named by their edges."""
    edges = np.array(histogram["edges"], float)
    present = [mode for mode in modes if histogram[mode] is not None]
    if not present:
        return
    middle = np.arange(len(edges) - 1) + 0.5
    more = {"customdata": [f"{number(a)} … {number(b)}" for a, b in pairwise(edges.tolist())], "shape": "hvh"}
    hover = "d %{customdata}: %{y:.3~%}"
    traces = [line(middle, histogram[mode], *modes[mode], hover, dash=_DASHES[mode], **more) for mode in present]
    centre = (len(edges) - 1) / 2
    ticks = [int(i) for i in np.flatnonzero(_powers_of_ten(edges)) if abs(i - centre) > 2]  # the innermost would cover each other
    names = [f"{edges[i]:g}".replace("-", "−") for i in ticks]
    x = axis(f"d = {sides[1]} − {sides[0]} logprob, nats", tickvals=[*ticks, centre], ticktext=[*names, "0"])
    layout = {"xaxis": x, "yaxis": percent_axis("share of the tokens")}
    yield Plot("differences", "How the tokens spread around d = 0", traces, layout, "Outwards, bins grow by a constant factor.", wide=True)


def _powers_of_ten(edges: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        exponent = np.log10(np.abs(edges))
    return (edges == 0) | (np.abs(exponent - np.round(exponent)) < 1e-3)
