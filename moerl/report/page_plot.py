"""Figures as plotly describes them: plain data, drawn by the page. No plotly here.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; what a colour stands for is the same in all figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moerl.report.overview import Trend
from moerl.report.page_format import NONE, nats, number

BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#767676",
)
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY)

DIVERGING = [[0.0, "#b35806"], [0.25, "#f1a340"], [0.5, "#ffffff"], [0.75, "#7fb2d9"], [1.0, "#08306b"]]
"""Orange is less, blue is more."""

SEQUENTIAL = [[0.0, "#ffffff"], [0.15, "#d6e6f4"], [0.4, "#7fb2d9"], [0.7, "#2a78b5"], [1.0, "#08306b"]]
"""Light is little. Printed in grey it still rises evenly."""


@dataclass(frozen=True)
class Plot:
    """Attributes:
    name: unique on the page; letters, digits and dashes.
    title: what is seen.
    note: how to read it, in a sentence or two; may be empty.
    traces, layout: of plotly.
    wide: takes the whole width.
    height: px
    drill: a click on a step shows its samples.
    """

    name: str
    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    note: str = ""
    wide: bool = False
    height: int = 300
    drill: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text; `left` counts the columns that are not right-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: int = 1


@dataclass(frozen=True)
class Section:
    """Attributes:
    name: its anchor.
    lead: what it answers.
    parts: plots and tables in the order of the page.
    facts: label -> value, shown as a list before them.
    """

    name: str
    title: str
    lead: str = ""
    parts: Sequence[Plot | Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis; the title carries the unit."""
    return {"title": {"text": title}, **more}


def percent_axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis of shares of 1, which is shown in percent and never below nothing."""
    return axis(title, tickformat=".3~%", rangemode="tozero", **more)


def log_axis(title: str, **more: Any) -> dict[str, Any]:
    return axis(title, type="log", exponentformat="power", **more)


def step_axis(steps: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """An axis of training steps, all of them ticked where they are few."""
    return axis("step", **({"tickvals": [int(step) for step in steps]} if len(steps) <= 10 else {"tickformat": "d"}))


def layer_axis(layers: Sequence[int], title: str = "layer") -> dict[str, Any]:
    """An axis of model layer numbers, all of them ticked where they are few."""
    return axis(title, **({"tickvals": list(layers)} if len(layers) <= 16 else {"tickformat": "d"}))


def curve(found: Trend, name: str, colour: str, *, form: str = ".3~g", spread: bool = True, dash: str = "solid") -> list[dict[str, Any]]:
    """A metric over steps: a line, points where they are few or far apart.

    Args:
        spread: show the lowest and the highest of each bin, where steps are drawn in bins.
    """
    known = np.isfinite(found.mean)
    x, traces = found.middle, []
    if spread and found.binned:
        traces += band(found, found.low, found.high, colour)
    lonely = known & ~_neighboured(known)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers" if known.sum() <= 40 else "lines",
            "name": name,
            "x": x,
            "y": found.mean,
            "connectgaps": bool(lonely.any()),
            "line": {"color": colour, "width": 2, "dash": dash},
            "marker": {"size": 6},
            "customdata": [_stretch(a, b) for a, b in zip(found.first, found.last, strict=True)],
            "hovertemplate": f"%{{y:{form}}}<extra>{name}, %{{customdata}}</extra>",
        }
    )
    return traces


def line(x: Any, y: Any, name: str, colour: str, hover: str, *, points: bool = False, **more: Any) -> dict[str, Any]:
    """A curve over something else than steps. `hover` is plotly's template for a point, without the curve's name."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if points else "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2, **{key: more.pop(key) for key in ("dash", "shape") if key in more}},
        "hovertemplate": f"{hover}<extra>{name}</extra>",
        **more,
    }


def band(found: Trend, low: np.ndarray, high: np.ndarray, colour: str) -> list[dict[str, Any]]:
    """The space between two curves: float64[m] each, over the bins of `found`; of a single point, a vertical line."""
    known = np.isfinite(low) & np.isfinite(high)
    x, low, high = found.middle[known], low[known], high[known]
    if not len(x):
        return []
    shared = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    if len(x) == 1:
        return [{**shared, "x": [x[0], x[0]], "y": [low[0], high[0]], "line": {"width": 6, "color": fade(colour, 0.3)}}]
    filled = {"fill": "toself", "fillcolor": fade(colour, 0.18), "line": {"width": 0, "color": colour}}
    return [{**shared, **filled, "x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}]


def error_bars(figures: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """For `bars`: whiskers from `low` to `high` of figures {value, low, high}; none where no figure has any."""
    sides = {"high": [], "low": []}
    for figure in figures:
        for side, sign in (("high", 1), ("low", -1)):
            known = figure is not None and figure[side] is not None
            sides[side].append(sign * (figure[side] - figure["value"]) if known else None)
    if all(one is None for one in sides["high"]):
        return {}
    return {
        "error_y": {"type": "data", "symmetric": False, "array": sides["high"], "arrayminus": sides["low"], "thickness": 1.2, "width": 4}
    }


def between(figure: Mapping[str, Any] | None) -> str:
    """The band of a divergence in words."""
    if figure is None or figure["low"] is None:
        return NONE
    return f"{nats(figure['low'])} … {nats(figure['high'])}"


def bars(x: Any, y: Any, colour: str | Sequence[str], name: str = "", *, form: str = ".3~g", **more: Any) -> dict[str, Any]:
    hover = f"%{{x}}: %{{y:{form}}}<extra>{name}</extra>"
    return {"type": "bar", "x": x, "y": y, "name": name, "marker": {"color": colour}, "hovertemplate": hover, **more}


def heatmap(z: Any, x: Any, y: Any, *, unit: str, hover: str, form: str = ".3~g", **more: Any) -> dict[str, Any]:
    """Light to dark from 0 on. `hover` says what %{x} and %{y} are."""
    known = np.asarray(z, float)
    highest = float(np.nanmax(known)) if np.isfinite(known).any() else 1.0
    return {
        "type": "heatmap",
        "z": z,
        "x": x,
        "y": y,
        "colorscale": SEQUENTIAL,
        "zmin": 0,
        "zmax": highest or 1.0,
        "hoverongaps": False,
        "colorbar": {"title": {"text": unit, "side": "right"}, "thickness": 12, "tickformat": form, "outlinewidth": 0},
        "hovertemplate": f"{hover}: %{{z:{form}}}<extra></extra>",
        **more,
    }


def reference(y: float) -> dict[str, Any]:
    """Layout of a dashed horizontal line, whose meaning the figure's text must say."""
    line = {"color": "#1b1f24", "width": 1.2, "dash": "dash"}
    return {"shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}]}


def fill_rows(parts: Sequence[Plot | Table]) -> list[Plot | Table]:
    """Two narrow plots make a row of the page; one that would stand alone takes the whole width."""
    found: list[Plot | Table] = []
    open_row = False
    for index, part in enumerate(parts):
        following = parts[index + 1] if index + 1 < len(parts) else None
        narrow = isinstance(part, Plot) and not part.wide
        if narrow and not open_row and not (isinstance(following, Plot) and not following.wide):
            part, narrow = replace(part, wide=True), False
        open_row = narrow and not open_row
        found.append(part)
    return found


def fade(colour: str, opacity: float) -> str:
    """A translucent colour from a #rrggbb one."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{number(opacity)})"


def _neighboured(known: np.ndarray) -> np.ndarray:
    """Where the point before or after is known too, so that a line shows it."""
    padded = np.concatenate([[False], known, [False]])
    return padded[:-2] | padded[2:]


def _stretch(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"mean of steps {first}–{last}"
