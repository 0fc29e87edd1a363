"""What flips cost: a section of the page, from `cost` of the analysis' result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moerl.report.overview import as_float
from moerl.report.page_format import nats, number, pair, share
from moerl.report.page_gap import Modes, modes_of
from moerl.report.page_plot import BLUE, GREY, VERMILLION, Plot, Section, Table, axis, bars, layer_axis, percent_axis

Result = Mapping[str, Any]
Found = Sequence[Mapping[str, Any]]

MOST_TOKENS, MOST_SAMPLES = 12, 10
"""Rows of the tables."""


def cost_section(result: Result) -> Section:
    cost, modes = result["cost"], modes_of(result)
    parts = [*_by_flipped(cost["by_flipped_layers"], modes), *_by_first(cost["by_first_layer"], result["meta"]["layers"])]
    parts += [*_worst_tokens(cost["worst_tokens"], modes, pair(result)[0]), *_worst_samples(cost["worst_samples"], modes)]
    lead = "How far a token's probability is off where its routes differ, and the tokens and samples where it is off most."
    return Section("cost", "What does it cost?", lead, parts)


def _by_flipped(found: Found, modes: Modes) -> Iterator[Plot]:
    known = [one for one in found if one["tokens"]]
    if not known:
        return
    names, x = [_range(one) for one in known], axis("layers that flip for the token", type="category")
    traces = [bars(names, [one["abs_diff"] for one in known], VERMILLION, modes["natural"][0], form=".2~e")]
    if any(one["replay_abs_diff"] is not None for one in known):
        traces.append(bars(names, [one["replay_abs_diff"] for one in known], BLUE, modes["replay"][0], form=".2~e"))
    title = "How far tokens are off, by flipped layers"
    if known[0]["to"] == 0 and known[0]["abs_diff"] and len(known) > 1:
        factor = float(f"{as_float(known[-1]['abs_diff']) / known[0]['abs_diff']:.2g}")
        title = f"With {names[-1]} flipped layers, |d| is {number(factor)} times that without"
    yield Plot("by-flipped", title, traces, {"xaxis": x, "yaxis": axis("mean |d|, nats"), "barmode": "group"})
    traces = [bars(names, [one["token_share"] for one in known], GREY, "of the tokens", form=".3~%")]
    traces.append(bars(names, [one["kl_share"] for one in known], VERMILLION, "of the KL", form=".3~%"))
    flipped = sum(as_float(one["kl_share"]) for one in known if one["from"] > 0)
    layout = {"xaxis": x, "yaxis": percent_axis("share"), "barmode": "group"}
    yield Plot("kl-share", f"Tokens with flips make {share(flipped)} of the KL, {modes['natural'][0]}", traces, layout)


def _by_first(found: Found, layers: Sequence[int]) -> Iterator[Plot]:
    known = [one for one in found if one["layer"] is not None and one["tokens"]]
    if not known:
        return
    trace = bars([one["layer"] for one in known], [one["kl"] for one in known], VERMILLION)
    trace |= {
        "customdata": [number(one["tokens"]) for one in known],
        "hovertemplate": "first flip in layer %{x}: %{y:.2~e} nats, %{customdata} tokens<extra></extra>",
    }
    worst = max(known, key=lambda one: as_float(one["kl"]))["layer"]
    layout = {"xaxis": layer_axis(layers, "first layer that flips"), "yaxis": axis("KL, nats per token")}
    yield Plot("by-first", f"Flips that begin in layer {worst} cost most", [trace], layout, wide=True, height=260)


def _worst_tokens(found: Found, modes: Modes, first: str) -> Iterator[Table]:
    rows = []
    for one in found[:MOST_TOKENS]:
        gaps = [number(as_float(one[f"{mode}_logprob"]) - as_float(one["engine_logprob"])) for mode in modes]
        text = f"token {one['next_token']}" if one["text"] is None else visible(one["text"])
        place = f"{one['step']} / {one['prompt_id']}.{one['sample']} / {one['position']}"
        layers = ", ".join(map(str, one["flipped_layers"][:8])) + (" …" if len(one["flipped_layers"]) > 8 else "")
        rows.append((place, visible(one["before"] or "")[-32:], text, layers or "none", number(one["engine_logprob"]), *gaps))
    head = (
        "step / prompt.sample / position",
        "after",
        "token",
        "layers that flip",
        f"{first} logprob",
        *(f"d {name}" for name, _ in modes.values()),
    )
    if rows:
        yield Table("The tokens that are off most", head, rows, left=4)


def _worst_samples(found: Found, modes: Modes) -> Iterator[Table]:
    rows = []
    for one in found[:MOST_SAMPLES]:
        text = " ".join(map(str, one["token_ids"])) if one["text"] is None else visible(one["text"])
        figures = [number(one["reward"]), number(one["tokens"]), number(one["abs_diff"]), nats(one["kl"])]
        figures += [nats(one["replay_kl"])] if "replay" in modes else []
        shown = text if len(text) <= 160 else f"{text[:160]} …"
        rows.append((f"{one['step']} / {one['prompt_id']}.{one['sample']}", shown, *figures, share(one["flip_share"])))
    head = (
        "step / prompt.sample",
        "response",
        "reward",
        "tokens",
        "mean |d|",
        *(f"KL {modes[mode][0]}" for mode in ("natural", "replay") if mode in modes),
        "flips",
    )
    if rows:
        yield Table("The samples that are off most", head, rows, left=2)


def visible(text: str) -> str:
    """Text on one line, in which a token of white space alone can be seen."""
    shown = text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    return shown if shown.strip() else shown.replace(" ", "␣")


def _range(one: Mapping[str, Any]) -> str:
    return number(one["from"]) if one["from"] == one["to"] else f"{number(one['from'])}–{number(one['to'])}"
