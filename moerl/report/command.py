"""`moerl report RUN`: one page on what the gap between engine and trainer is made of; as JSON, as a gate, or of two recordings.

    moerl report RUN [-o FILE] [--json] [--fail-if 'kl_replay>1e-3']    RUN/mismatch -> RUN/report.html
    moerl report A --against B [--side engine|trainer]                  two recordings of the same tokens
    moerl report RUN --recompute CHECKPOINT [--steps 0,3] [SETTINGS]    record afterwards, then report
    moerl report --import sglang|vllm|megatron FILE... --model CONFIG -o RUN [--step N]     records of other systems

The exit status is 0, or 3 if a gate is hit; 1 and 2 are errors.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from moerl.errors import ConfigError
from moerl.report import gates
from moerl.report.against import report_against
from moerl.report.imports import KINDS, import_records
from moerl.report.recompute import recompute
from moerl.report.summary import find_recordings, report_run

_WITH_VALUE = ("output", "against", "side", "fail-if", "recompute", "steps", "version", "import", "model", "step")
_SHORT = {"-o": "output"}


@dataclass
class Options:
    """What the words say. `settings` are handed on to the recomputation."""

    paths: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    fail_if: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    as_json: bool = False


def main(argv: Sequence[str]) -> int:
    """Report; returns the exit status.

    Raises:
        ConfigError: wrong options. ReportError: recordings that are missing, damaged, or do not fit.
    """
    options = parse(argv)
    wanted = gates.parse(options.fail_if)
    if "import" in options.values:
        return _import(options)
    run = Path(options.paths[0])
    against = options.values.get("against")
    if "recompute" in options.values:
        named = [word for name in ("steps", "version") if name in options.values for word in (f"--{name}", options.values[name])]
        recompute(run, options.values["recompute"], [*named, *options.settings])
    console = Console()
    page_only = (run / "metrics.jsonl").is_file() and not (against or options.as_json or wanted)
    if page_only and not find_recordings(run):  # the page then shows the run alone, and says how to record
        _write_page(console, _output(options, run), None, run)
        return 0
    side = "trainer" if options.values.get("side") == "trainer" else "engine"
    report = report_run(run) if against is None else report_against(run, against, side)
    hit = gates.check(wanted, report)
    if options.as_json:
        console.file.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(console, report)
    if not options.as_json or "output" in options.values:
        _write_page(Console(stderr=options.as_json), _output(options, run), report, None if against else run)
    for sentence in hit:
        Console(stderr=True).print(f"[red]gate[/red] {sentence}", highlight=False, soft_wrap=True)
    return gates.FAILED if hit else 0


def parse(argv: Sequence[str]) -> Options:
    """Words to options.

    Raises:
        ConfigError: unknown options, options without a value, or a combination that means nothing; all of them.
    """
    found, problems, words = Options(), [], iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word in _SHORT:
            name = _SHORT[word]
        if word == "--json":
            found.as_json = True
        elif word.startswith("--") and "." in name:
            found.settings += [word] if equals else [word, next(words, "")]
        elif word in _SHORT or (word.startswith("--") and name in _WITH_VALUE):
            value = value if equals else next(words, "")
            if not value:
                problems.append(f"{word} needs a value")
            elif name == "fail-if":
                found.fail_if.append(value)
            else:
                found.values[name] = value
        elif word.startswith("-"):
            near = difflib.get_close_matches(name, [*_WITH_VALUE, "json"], n=1)
            every = ", ".join(f"--{one}" for one in ("json", *_WITH_VALUE))
            problems.append(f"moerl report has no option {word}; " + (f"did you mean --{near[0]}?" if near else f"there are {every}"))
        else:
            found.paths.append(word)
    problems += _combinations(found)
    if problems:
        raise ConfigError(problems)
    return found


def _combinations(options: Options) -> list[str]:
    values, problems = options.values, []
    if "import" in values:
        if values["import"] not in KINDS:
            problems.append(f"--import: expected {', '.join(KINDS)}, got {values['import']!r}")
        problems += [f"--import needs {name}" for key, name in (("model", "--model CONFIG"), ("output", "-o RUN")) if key not in values]
        problems += [] if options.paths else ["--import needs at least one FILE of records"]
        problems += [] if values.get("step", "0").isdigit() else [f"--step: expected a whole number, got {values['step']!r}"]
    elif len(options.paths) != 1:
        problems.append(f"moerl report takes the folder of one run, got {' '.join(options.paths) or 'none'}; compare two with --against")
    if "side" in values and (values["side"] not in ("engine", "trainer") or "against" not in values):
        problems.append("--side goes with --against and is engine or trainer")
    for name in ("steps", "version"):
        if name in values and "recompute" not in values:
            problems.append(f"--{name} goes with --recompute")
    if options.settings and "recompute" not in values:
        problems.append(f"settings go with --recompute: {' '.join(options.settings)}")
    if "recompute" in values and "against" in values:
        problems.append("--recompute and --against are two commands: recompute first")
    return problems


def _output(options: Options, run: Path) -> Path:
    named = options.values.get("output")
    if named:
        return Path(named)
    return run / ("against.html" if "against" in options.values else "report.html")


def _write_page(console: Console, path: Path, report: dict[str, Any] | None, run: Path | None) -> None:
    """The page, aside and then renamed."""
    text = import_module("moerl.report.page").render(report, run)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    console.print(f"page  {path}", highlight=False, soft_wrap=True)


def _print(console: Console, report: dict[str, Any]) -> None:
    """The headline figures and the findings."""
    console.print(report["name"], style="bold", highlight=False, markup=False)
    lines = [("recorded", f"{report['steps']} step(s), {report['rows']:,} rows, {report['tokens']:,} generated tokens with logprobs")]
    modes = report["gap"]["modes"]
    for mode, label in (
        ("natural", "KL, k3, natural"),
        ("r2", "KL, own routes replayed (R2)"),
        ("replay", "KL, engine's routes replayed (R3)"),
    ):
        if modes[mode]:
            lines.append((label, _figure(modes[mode]["kl"])))
    if report["flip_share"] is not None:
        lines.append(("decisions that differ", f"{report['flip_share']:.2%}; {report['tokens_with_flip']:.1%} of tokens in some layer"))
    for label, value in lines:
        console.print(f"  {label:<36}{value}", highlight=False, soft_wrap=True)
    colours = {"error": "red", "warning": "yellow", "note": "cyan", "good": "green"}
    for finding in report["findings"]:
        console.print(
            f"[{colours[finding['severity']]}]{finding['severity']:>7}[/]  [bold]{finding['title']}[/bold]", highlight=False, soft_wrap=True
        )
        for text in (finding["evidence"], finding["advice"]):
            console.print(f"         {text}", highlight=False, markup=False, soft_wrap=True)


def _figure(figure: dict[str, Any]) -> str:
    band = f"  ({figure['low']:.1e} … {figure['high']:.1e})" if figure["low"] is not None else ""
    return f"{figure['value']:.2e}{band}"


def _import(options: Options) -> int:
    run, step = Path(options.values["output"]), int(options.values.get("step", "0"))
    path = import_records(options.values["import"], [Path(one) for one in options.paths], Path(options.values["model"]), run, step)
    Console().print(f"{path}\nnext: moerl report {run}", highlight=False, soft_wrap=True)
    return 0
