"""The run itself as a section of the page: what it learned, what it waited for, what went wrong. From `overview.Overview`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moerl.config.schema import Config
from moerl.report.overview import Overview, as_float, trend
from moerl.report.page_format import count, nats, number, share, spans
from moerl.report.page_plot import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Plot,
    Section,
    Table,
    axis,
    bars,
    curve,
    log_axis,
    percent_axis,
    reference,
    step_axis,
)

Curves = Mapping[str, tuple[str, str]]
"""metric -> (what the legend calls it, colour)"""

MOST_ENGINES = 8
"""Curves of single engines."""
SMALL_PHASE = 0.01
"""Share of all time below which a phase is drawn with others."""

_STACKED = {"barmode": "stack", "bargap": 0, "legend": {"traceorder": "normal"}}

_PHASES = {
    "rollout": ("waiting for groups", SKY),
    "pack": ("packing", GREY),
    "natural": ("natural pass", VERMILLION),
    "capture": ("recording for this report", YELLOW),
    "fresh": ("measuring the gap", "#B07AA1"),
    "logprobs": ("old logprobs", PURPLE),
    "forward_backward": ("forward and backward", BLUE),
    "optimizer": ("optimizer", GREEN),
    "sync": ("weight update", ORANGE),
    "checkpoint": ("checkpoint", "#999999"),
    "evaluate": ("evaluation", "#3d3d3d"),
    "other": ("other", "#c4c4c4"),
}


def run_section(run: Overview, *, captured: bool) -> Section:
    """The last section; with `captured` the gap's own figures stand further up and are not shown again."""
    parts: list[Plot | Table] = []
    if run.faults:
        parts.append(_faults(run))
    parts += [plot for make in _PLOTS for plot in make(run)]
    if not captured:
        parts += [plot for plot in (_gap(run), _flips(run)) if plot]
    lead = "What the run learned, what its engines and its trainer waited for, and what went wrong; from metrics.jsonl."
    if not run.records:
        lead = "metrics.jsonl is missing or empty: no step has ended in this folder."
    return Section("run", "The run", lead, parts, facts(run))


def facts(run: Overview) -> dict[str, str]:
    """What run this is, for the list at the top of the section."""
    found: dict[str, str] = {}
    if config := run.config:
        task = f"{config.task.kind} {config.task.name if config.task.kind == 'reasoning_gym' else config.task.path}"
        engines = f"{count(config.engine.count, 'engine')}, tp {config.engine.tp}, {config.engine.dtype}"
        found = {
            "Task": f"{task}, reward {config.task.reward}",
            "Engines": f"SGLang, {engines}",
            "Trainer": f"Megatron, {config.train.dtype}, replay {config.replay.actor}, learning rate {number(config.train.lr)}",
            "Generation": _generation(config),
        }
    if run.records:
        tokens, samples = (run.column(name) for name in ("response_tokens", "samples"))
        found["Trained"] = f"{count(len(run.records), 'step')}, {_total(samples)} samples, {_total(tokens)} response tokens"
    if run.summary:
        found["Took"] = f"{run.summary['minutes']:.1f} min"
    if run.config_problem:
        found["Settings"] = run.config_problem
    return found


def _generation(config: Config) -> str:
    if not config.buffer.max_lag:
        return "engines and trainer take turns"
    return f"beside training, at most {count(config.buffer.max_lag, 'version')} behind"


def _learning(run: Overview) -> Iterator[Plot]:
    curves = {
        "reward": ("reward", BLUE),
        "solved_share": ("solved", GREEN),
        "heldout_accuracy": ("held-out, sampled", ORANGE),
        "heldout_greedy_accuracy": ("held-out, greedy", PURPLE),
    }
    if traces := _curves(run, curves):
        title = f"Reward went from {_ends(run, 'reward')}" if run.measured("reward") else "Reward"
        yield Plot("reward", title, traces, {"xaxis": step_axis(run.steps), "yaxis": axis("mean reward, or share of samples")}, _WINDOW)
    curves = {"response_length": ("trained", BLUE), "buffer/length_refused": ("of refused groups", VERMILLION)}
    if traces := _curves(run, curves):
        layout = {"xaxis": step_axis(run.steps), "yaxis": axis("tokens per response", rangemode="tozero")}
        yield Plot("length", f"Responses went from {_ends(run, 'response_length')} tokens", traces, layout, _WINDOW)
    curves = {"truncated_share": ("cut at the limit", VERMILLION), "uniform_groups_share": ("groups of equal rewards", ORANGE)}
    curves |= {"masked_share": ("tokens left out of the loss", GREY), "clip_share": ("tokens clipped", BLUE)}
    if traces := _curves(run, curves, form=".3~%"):
        note = "A group of equal rewards teaches nothing. Samples cut at the limit are rewarded for what they had."
        title = _highest(run, "Groups of equal rewards: at most", "uniform_groups_share")
        yield Plot("unused", title, traces, {"xaxis": step_axis(run.steps), "yaxis": percent_axis("share")}, note)
    for metric, words, unit in (("entropy", "Entropy of the policy", "nats per token"), ("grad_norm", "The gradient's norm", "norm")):
        if traces := _curves(run, {metric: (words, BLUE)}):
            layout = {"xaxis": step_axis(run.steps), "yaxis": axis(unit, rangemode="tozero")}
            yield Plot(f"run-{metric}".replace("_", "-"), f"{words} went from {_ends(run, metric)}", traces, layout, _WINDOW)


def _lag(run: Overview) -> Iterator[Plot]:
    names = run.names(r"buffer/lag_\d+")
    highest = max(_known(run.column("buffer/lag_highest")), default=0.0)
    if not names or not highest:
        return
    columns = {name.removeprefix("buffer/lag_"): np.nan_to_num(run.column(name)) for name in names}
    total = np.maximum(1.0, sum(columns.values()))
    traces: list[dict[str, Any]] = []
    for index, (lag, groups) in enumerate(columns.items()):
        found = trend(run.steps, groups / total)
        label = f"lag {lag}"
        traces.append(
            bars(found.middle, found.mean, _LAGS[min(index, len(_LAGS) - 1)], label, form=".3~%", width=_width(found.first, found.last))
        )
    layout = {"xaxis": step_axis(run.steps), "yaxis": percent_axis("share of the groups", range=[0, 1]), **_STACKED}
    note = "Lag counts the versions between the weights that began a group and those that were trained on it."
    yield Plot("lag", f"Groups are at most {count(int(highest), 'version')} behind", traces, layout, note)


def _busy(run: Overview) -> Iterator[Plot]:
    curves = {
        "buffer/engines_busy_share": ("engines generate", BLUE),
        "buffer/engines_paced_share": ("engines may not start more", SKY),
        "buffer/trainer_busy_share": ("trainer trains", VERMILLION),
        "buffer/trainer_sync_share": ("trainer sends weights", ORANGE),
    }
    if traces := _curves(run, curves, form=".3~%", spread=False):
        engines, trainer = (_mean(run, f"buffer/{who}_busy_share") for who in ("engines", "trainer"))
        title = f"Engines are busy {share(engines)} of the time, the trainer {share(trainer)}"
        note = "Shares of the engines' slots and of the trainer's time; one that is low waits for the other."
        yield Plot(
            "busy", title, traces, {"xaxis": step_axis(run.steps), "yaxis": percent_axis("share of the time", range=[0, 1.02])}, note
        )


def _time(run: Overview) -> Iterator[Plot]:
    seconds = {name.removeprefix("time/"): np.nan_to_num(run.column(name)) for name in run.names(r"time/[^/]+")}
    total = sum(column.sum() for column in seconds.values())
    if not total:
        return
    small = [phase for phase, column in seconds.items() if column.sum() < SMALL_PHASE * total]
    if small:
        seconds["other"] = sum(seconds.pop(phase) for phase in small)
    traces: list[dict[str, Any]] = []
    for index, (phase, column) in enumerate(seconds.items()):
        label, colour = _PHASES.get(phase) or (phase.replace("_", " "), CYCLE[index % len(CYCLE)])
        found = trend(run.steps, column)
        traces.append(bars(found.middle, found.mean, colour, label, width=_width(found.first, found.last)))
    largest = max(seconds, key=lambda phase: seconds[phase].sum())
    label = (_PHASES.get(largest) or (largest.replace("_", " "), ""))[0]
    title = f"The longest part of a step is {label}: {share(seconds[largest].sum() / total)}"
    note = f"Other: {', '.join(phase.replace('_', ' ') for phase in small)}." if small else ""
    yield Plot("time", title, traces, {"xaxis": step_axis(run.steps), "yaxis": axis("s per step"), **_STACKED}, note)


def _sync(run: Overview) -> Iterator[Plot]:
    seconds, sizes = run.column("time/sync"), _known(run.column("sync_bytes"))
    if not sizes or not run.measured("time/sync"):
        return
    traces = curve(trend(run.steps, seconds), "seconds", ORANGE)
    layout = {"xaxis": step_axis(run.steps), "yaxis": axis("s per update", rangemode="tozero")}
    title = f"An update sends {number(np.mean(sizes) / 2**20)} MiB in {number(np.median(_known(seconds)))} s"
    attempts = int(max(_known(run.column("sync_attempts")), default=1))
    note = f"Bytes are {_mean(run, 'sync_bytes_ratio'):.3f} of the least that would do; at most {count(attempts, 'attempt')}."
    if run.measured("sync_changed_share"):
        note += f" {share(_mean(run, 'sync_changed_share'))} of the elements changed per update."
    yield Plot("sync", title, traces, layout, note)


def _engines(run: Overview) -> Iterator[Plot]:
    names = run.names(r"engine/\d+/tokens_per_s")
    if not names:
        return
    curves = {name: (f"engine {name.split('/')[1]}", CYCLE[index % len(CYCLE)]) for index, name in enumerate(names[:MOST_ENGINES])}
    total = sum(np.nan_to_num(run.column(name)) for name in names)
    paused = sum(sum(_known(run.column(name))) for name in run.names(r"engine/\d+/paused_s"))
    note = f"Together they were paused for updates for {number(round(paused, 1))} s."
    if len(names) > MOST_ENGINES:
        note = f"The first {MOST_ENGINES} of {len(names)} engines. {note}"
    layout = {"xaxis": step_axis(run.steps), "yaxis": axis("response tokens per s", rangemode="tozero")}
    title = f"The engines return {number(round(float(np.mean(total)), 1))} response tokens per second"
    yield Plot("engines", title, _curves(run, curves, spread=len(names) == 1), layout, note)


def _stale(run: Overview) -> Iterator[Plot]:
    """What staleness adds to the gap, where generation ran ahead."""
    for metric, title, y in (
        ("kl_lag", "KL(engine ‖ trainer) of what is trained, by lag", log_axis("nats per token")),
        ("ess_lag", "Effective sample size of what is trained, by lag", axis("share of the tokens")),
    ):
        names = run.names(metric + r"\d+")
        if len(names) < 2:
            continue
        curves = {name: (f"lag {name.removeprefix(metric)}", _LAGS[min(index, len(_LAGS) - 1)]) for index, name in enumerate(names)}
        note = "Under replay; the versions between contribute to it."
        layout = {"xaxis": step_axis(run.steps), "yaxis": y}
        yield Plot(metric.replace("_", "-"), title, _curves(run, curves, spread=False), layout, note)


def _waste(run: Overview) -> Iterator[Plot]:
    reasons = [name for name in run.names(r"buffer/wasted_[a-z_]+_tokens") if run.column(name)[np.isfinite(run.column(name))].any()]
    if not reasons:
        return
    traces, total = [], 0.0
    for index, name in enumerate(reasons):
        tokens = np.nan_to_num(run.column(name))
        total += tokens.sum()
        found = trend(run.steps, tokens)
        label = name.removeprefix("buffer/wasted_").removesuffix("_tokens").replace("_", " ")
        traces.append(bars(found.middle, found.mean, CYCLE[index % len(CYCLE)], label, width=_width(found.first, found.last)))
    layout = {"xaxis": step_axis(run.steps), "yaxis": axis("tokens per step"), **_STACKED}
    yield Plot("waste", f"{number(total)} tokens were generated and not trained", traces, layout, "By the reason why.")


def _gap(run: Overview) -> Plot | None:
    """KL between engine and trainer as training itself measured it, for runs without recordings."""
    fresh = _fresh(run)
    curves = {
        f"{fresh}kl_natural": ("natural", VERMILLION),
        "kl_forced": ("replayed, before the update", SKY),
        f"{fresh}kl_replay": ("replayed", BLUE),
        "kl_trained": ("without replay, as trained", ORANGE),
    }
    traces = _curves(run, curves)
    if not traces:
        return None
    means = [(name, _mean(run, metric)) for metric, (name, _) in curves.items() if run.measured(metric)]
    title = f"KL(engine ‖ trainer): {', '.join(f'{nats(mean)} {name}' for name, mean in means)}"
    note = "k3 estimate on the sampled tokens. Natural: the trainer's router chooses by itself."
    note += " Of tokens under the very weights that sampled them, so without staleness." if fresh else ""
    return Plot("kl", title, traces, {"xaxis": step_axis(run.steps), "yaxis": log_axis("nats per token")}, note)


def _flips(run: Overview) -> Plot | None:
    metric = f"{_fresh(run)}natural_flip_share"
    traces = _curves(run, {metric: ("would be routed otherwise", VERMILLION)}, form=".3~%")
    if not traces:
        return None
    mean = _mean(run, metric)
    layout = {"xaxis": step_axis(run.steps), "yaxis": percent_axis("share of (token, layer)"), **reference(mean)}
    return Plot("flips", f"The trainer alone would route {share(mean)} of the decisions otherwise", traces, layout, "Dashed: the mean.")


def _fresh(run: Overview) -> str:
    """Where figures of the gap stand: in a run with a lag, apart from those of what is trained."""
    return "fresh/" if run.measured("fresh/kl_natural") else ""


_LAGS = ("#c6dbef", "#7fb2d9", "#2a78b5", "#08306b", "#000000")
"""Darker is older."""
_PLOTS = (_learning, _lag, _stale, _busy, _engines, _time, _sync, _waste)
_WINDOW = "Ends are means over the first and the last tenth of the steps."


def _faults(run: Overview) -> Table:
    rows = [(fault.kind.replace("_", " "), number(len(fault.steps)), spans(fault.steps), fault.text) for fault in run.faults]
    troubled = {step for fault in run.faults for step in fault.steps}
    title = f"{count(len(rows), 'kind')} of trouble, in {number(len(troubled))} of {count(len(run.records), 'step')}"
    return Table(title, ("what", "steps", "which", "what it means, in the last of them"), rows, left=4)


def _curves(run: Overview, curves: Curves, *, form: str = ".3~g", spread: bool = True) -> list[dict[str, Any]]:
    """Those of the curves that were measured, also before the first step; only the first shows the spread of its bins."""
    traces: list[dict[str, Any]] = []
    for metric, (name, colour) in curves.items():
        steps, values = run.steps, run.column(metric)
        if metric in run.before:
            steps, values = np.r_[run.before["step"], steps], np.r_[as_float(run.before[metric]), values]
        if np.isfinite(values).any():
            traces += curve(trend(steps, values), name, colour, form=form, spread=spread and not traces)
    return traces


def _width(first: np.ndarray, last: np.ndarray) -> float:
    """Of a bar, in steps: bars of bins touch each other."""
    return 0.8 if len(first) < 40 else float((last - first).max() + 1)


def _ends(run: Overview, metric: str) -> str:
    """Means of the first and of the last tenth, at least three steps each."""
    values = run.column(metric)
    window = max(1, min(len(values), max(3, round(len(values) / 10))))
    first, last = (_known(part) for part in (values[:window], values[-window:]))
    if not first or not last:
        return "unknown to unknown"
    return _even(first, last)


def _even(first: list[float], last: list[float]) -> str:
    """Both means with as many decimals."""
    means = [sum(values) / len(values) for values in (first, last)]
    decimals = 3 if max(map(abs, means)) < 1 else 2 if max(map(abs, means)) < 100 else 0
    return " to ".join(f"{mean:,.{decimals}f}" for mean in means)


def _mean(run: Overview, metric: str) -> float:
    values = _known(run.column(metric))
    return sum(values) / len(values) if values else float("nan")


def _highest(run: Overview, words: str, metric: str) -> str:
    values = _known(run.column(metric))
    return f"{words} {share(max(values))}" if values else "What a step does not learn from"


def _total(values: np.ndarray) -> str:
    return number(float(np.nansum(values)))


def _known(values: np.ndarray) -> list[float]:
    """Those that were measured."""
    return values[np.isfinite(values)].tolist()
