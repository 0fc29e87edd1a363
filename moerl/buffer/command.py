"""`moerl plan --simulate [@ FILE] [SETTINGS] [--engines N ...] [--lengths-from RUN] [--json]`: how busy a cluster would be.

Sizes come from the settings ([engine], [rollout], [task], [buffer], [sync]); costs and lengths from options of the simulation, which
are the fields of `simulate.Cluster` with dashes. The outcome stands beside that of the synchronous loop, `buffer.max_lag` 0, on the
same work.
"""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from moerl.buffer.ledger import NAME, Delivered, events
from moerl.buffer.simulate import Cluster, Outcome, simulate
from moerl.config.load import load_config
from moerl.config.schema import Config
from moerl.errors import ConfigError, RolloutError
from moerl.rollout import store

_FROM_SETTINGS = ("buffer", "recorded")
OPTIONS = {field.name.replace("_", "-"): field for field in fields(Cluster) if field.name not in _FROM_SETTINGS}


def main(argv: list[str]) -> int:
    """Simulate and print; the exit status.

    Raises:
        ConfigError: wrong settings or options, all of them listed. RolloutError: recorded rollouts that cannot be read.
    """
    words = [word for word in argv if word not in ("--simulate", "--json")]
    given, lengths_from, settings = split_options(words)
    has_model = any(word.startswith(("@", "--model.path")) for word in settings)
    config = load_config(settings if has_model else ["--model.path=unknown", *settings])
    cluster = replace(cluster_of(config), **given)
    if lengths_from:
        cluster = replace(cluster, recorded=recorded_lengths(Path(lengths_from)))
    outcomes = {"asynchronous": simulate(cluster)} if cluster.buffer.max_lag else {}
    outcomes["synchronous"] = simulate(replace(cluster, buffer=cluster.buffer.model_copy(update={"max_lag": 0})))
    console = Console()
    console.print(table(cluster, outcomes))
    if "--json" in argv:
        console.file.write(as_json(cluster, outcomes) + "\n")
    return 0


def split_options(words: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """(fields of the cluster, run folder whose lengths count, settings); a dotted name is a setting.

    Raises:
        ConfigError: an option that there is not, or a value of the wrong kind; all of them.
    """
    given: dict[str, Any] = {}
    settings: list[str] = []
    problems: list[str] = []
    lengths_from, rest = "", iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            settings.append(word)
        elif "." in name:
            settings += [word] if equals else [word, *([following] if (following := next(rest, None)) is not None else [])]
        elif name == "lengths-from":
            lengths_from = value if equals else next(rest, "")
        elif name in OPTIONS:
            field, text = OPTIONS[name], value if equals else next(rest, "")
            kind = type(field.default)
            try:
                given[field.name] = kind(text)
            except ValueError:
                problems.append(f"--{name}: expected {'a whole number' if kind is int else 'a number'}, got {text!r}")
        else:
            near = difflib.get_close_matches(name, [*OPTIONS, "lengths-from"], n=1)
            every = ", ".join(f"--{key}" for key in ("lengths-from", "json", *OPTIONS))
            hint = f"did you mean --{near[0]}?" if near else f"the options are {every}"
            problems.append(f"the simulation has no option --{name}; {hint}")
    if problems:
        raise ConfigError(problems)
    return given, lengths_from, settings


def cluster_of(config: Config) -> Cluster:
    """The sizes that the settings state, with the simulation's own defaults for costs and lengths."""
    return Cluster(
        engines=config.engine.count,
        slots=config.engine.max_running_requests,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        max_new_tokens=config.rollout.max_new_tokens,
        prompts=config.task.prompts,
        buffer=config.buffer,
        interrupt="in_place" if config.sync.interrupt == "in_place" else "resume",
        seed=config.run.seed,
    )


def recorded_lengths(run: Path) -> tuple[tuple[int, ...], ...]:
    """Completion lengths of the groups that a run trained on, one sequence per group: from its ledger, or else from its rollouts.

    Raises:
        RolloutError: no rollouts there, or they cannot be read.
    """
    found = [group.lengths for event in events(run / "ledger" / NAME) if isinstance(event, Delivered) for group in event.groups]
    steps = store.list_steps(run / "rollouts")
    if not found and steps:
        model = msgspec.json.decode((run / "config.json").read_bytes())["model"]["path"]
        expected = store.make_header(model, step=0, version=0)
        for step in steps:
            groups = store.load_step(run / "rollouts", step, expected)[1]
            found += [tuple(len(sample.response_tokens) for sample in group.samples) for group in groups]
    if not found:
        raise RolloutError(f"{run} has neither ledger/{NAME} nor rollouts to take lengths from; give the folder of a run that has trained")
    return tuple(found)


def as_json(cluster: Cluster, outcomes: dict[str, Outcome]) -> str:
    """The input without recorded lengths, and each outcome with what follows from it."""
    given = asdict(replace(cluster, recorded=())) | {"buffer": cluster.buffer.model_dump(), "recorded": len(cluster.recorded)}
    found = {
        name: asdict(outcome) | {"share_of_bound": outcome.share, "tokens_per_s": outcome.tokens_per_s, "bound_s": outcome.bound_s}
        for name, outcome in outcomes.items()
    }
    return msgspec.json.encode({"cluster": given, "outcomes": found}).decode()


def table(cluster: Cluster, outcomes: dict[str, Outcome]) -> Table:
    """A column per outcome."""
    size = f"{cluster.engines} engines x {cluster.slots} slots, {cluster.prompts_per_step} x {cluster.group_size} completions a step"
    found = Table(title=f"{size}, {cluster.steps} steps", title_justify="left", show_edge=False)
    found.add_column("")
    for name in outcomes:
        lag = cluster.buffer.max_lag if name == "asynchronous" else 0
        found.add_column(f"{name}, max lag {lag}", justify="right")
    rows = [_rows(outcome) for outcome in outcomes.values()]
    for label in rows[0]:
        found.add_row(label, *(row[label] for row in rows))
    return found


def _rows(outcome: Outcome) -> dict[str, str]:
    figures = {name.removeprefix("buffer/"): value for name, value in outcome.figures.items()}
    side = "training" if outcome.training_s > outcome.generation_s else "generation"
    lags = {name.removeprefix("lag_"): value for name, value in figures.items() if name.removeprefix("lag_").isdigit()}
    total = sum(lags.values())
    return {
        "tokens per second": f"{outcome.tokens_per_s:,.0f}",
        "seconds per step": f"{outcome.elapsed_s / outcome.steps:.1f}",
        "share of the bound": f"{outcome.share:.3f}",
        "the bound is": side,
        "engines idle (slots)": f"{1 - figures['engines_busy_share']:.1%}",
        "trainer idle": f"{1 - figures['trainer_busy_share'] - figures['trainer_sync_share']:.1%}",
        "trainer in sync": f"{figures['trainer_sync_share']:.1%}",
        "waits for due groups": f"{figures['trainer_waits_for_due_s'] / outcome.elapsed_s:.1%}",
        "groups by lag": ", ".join(f"{lag}: {count / total:.0%}" for lag, count in lags.items()),
        "groups dropped": f"{figures['refused_groups']:.0f}",
        "tokens wasted": f"{figures['wasted_share']:.1%}",
    }
