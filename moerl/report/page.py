"""The report as one HTML file that loads nothing: `render(result, run)`.

    result of the analysis   -->  gap, flips, causes, cost, soundness  \\
    RUN/metrics.jsonl ...    -->  the run                               >  templates/page.html.j2 with plotly.js, styles and data inside
    RUN/mismatch             -->  samples to look into                 /

Invariants: nothing is fetched, which a content security policy enforces. Only the scripts whose hashes that policy names run, and all text
from data is escaped, so that a token may be any markup. Figures are data; the page's script draws them.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from moerl import __version__
from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.overview import Overview, read_run
from moerl.report.page_causes import causes_section
from moerl.report.page_cost import cost_section
from moerl.report.page_format import capital, count, embed, nats, number, pair, share
from moerl.report.page_gap import gap_section
from moerl.report.page_overview import run_section
from moerl.report.page_plot import Plot, Section, fill_rows
from moerl.report.page_routes import flips_section
from moerl.report.page_samples import choose
from moerl.report.page_sound import sound_section

HOW_TO_RECORD = """\
This run has no recording of routes and logprobs, so the page shows only what its metrics say.
While training: tools/moerl train @ … --diagnostics.capture_every_steps 10, then tools/moerl report {run}
Afterwards, from recorded rollouts: tools/moerl report {run} --recompute {run}/checkpoints/…"""


@dataclass(frozen=True)
class Finding:
    """Attributes:
    severity: error, warning, note or good.
    """

    severity: str
    what: str
    evidence: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Page:
    """What the template shows. `drill` are samples to look into, or None."""

    title: str
    kicker: str
    facts: Mapping[str, str]
    sections: Sequence[Section]
    source: str
    verdict: str = ""
    severity: str = ""
    findings: Sequence[Finding] = ()
    notice: str = ""
    drill: Mapping[str, Any] | None = None
    version: str = field(default=__version__)


def render(result: Mapping[str, Any] | None, run: str | Path | None = None) -> str:
    """The whole page.

    Args:
        result: of the analysis; None where there is no recording.
        run: run folder, for its metrics and samples; None leaves both out.

    Returns:
        HTML.

    Raises:
        ReportError: neither is there, or the run's records cannot be read.
    """
    overview = None if run is None else read_run(run)
    if result is None and (overview is None or not overview.records):
        raise ReportError(
            f"{run or 'the run'} has neither a recording in {capture.FOLDER}/ nor a finished step in metrics.jsonl; give a run's folder"
        )
    drill = choose(Path(run)) if result is not None and run is not None else None
    return to_html(describe(result, overview, drill))


def describe(result: Mapping[str, Any] | None, overview: Overview | None, drill: Mapping[str, Any] | None = None) -> Page:
    """What the page says, before it is HTML."""
    sections: list[Section] = []
    if result is not None:
        sections += [gap_section(result), flips_section(result)]
        sections += [section for section in (causes_section(result), cost_section(result)) if section.parts or drill]
        sections.append(sound_section(result))
    if overview is not None and (overview.records or result is None):
        sections.append(run_section(overview, captured=result is not None))
    if result is None:
        notice = HOW_TO_RECORD.format(run=overview.name)
        return Page(overview.name, "Training run", _run_facts(overview), sections, overview.name, notice=notice)
    findings = [Finding(one["severity"], one["title"], one["evidence"], one["advice"]) for one in result["findings"]]
    kicker = "Routing mismatch of a training run"
    if result["kind"] == "against":
        kicker = "Routing mismatch of two recordings"
    elif all(source.startswith("import:") for source in result["meta"]["sources"]):
        kicker = "Routing in the records of another system"
    worst = findings[0].severity if findings else "note"
    name = result["name"]
    return Page(name, kicker, _facts(result), sections, name, verdict(result), worst, findings, drill=drill)


def verdict(result: Mapping[str, Any]) -> str:
    """The report in a sentence or two."""
    flips, natural, replay, removes = (result[name] for name in ("flip_share", "kl_natural", "kl_replay", "replay_removes"))
    said = []
    if flips is not None:
        first, second = result["sides"]
        said.append(f"{capital(first)} and {second} choose different experts in {share(flips)} of the (token, layer) decisions.")
    first, second = pair(result)
    if result["kind"] == "against":
        said += [] if natural is None else [f"KL({first} ‖ {second}) is {nats(natural)} nats per token."]
    elif natural is not None and replay is not None:
        cause = f"{share(removes)} of the gap is routing" if removes and removes > 0 else "routing is not what makes the gap"
        said.append(f"Replaying the engine's takes KL(engine ‖ trainer) from {nats(natural)} to {nats(replay)} nats per token: {cause}.")
    elif natural is not None:
        said.append(f"KL(engine ‖ trainer) is {nats(natural)} nats per token, the trainer choosing by itself.")
    elif replay is not None:
        said.append(f"KL(engine ‖ trainer) is {nats(replay)} nats per token under replay.")
    if wrong := sum(one["severity"] == "error" for one in result["findings"]):
        said.append(f"{count(wrong, 'finding')} must be looked at first.")
    return " ".join(said) or "The recording holds the routes of one side only."


def to_html(page: Page) -> str:
    """Fill in the template."""
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("moerl.report"), autoescape=True, undefined=StrictUndefined, **blocks)
    environment.filters["code"] = code
    page = replace(page, sections=[replace(section, parts=fill_rows(section.parts)) for section in page.sections])
    plots = [part for section in page.sections for part in section.parts if isinstance(part, Plot)]
    figures = {plot.name: {"data": plot.traces, "layout": plot.layout, "drill": plot.drill} for plot in plots}
    if len(figures) != len(plots):
        raise ReportError(f"figures must have names of their own, got {sorted(plot.name for plot in plots)}")
    scripts = {name: _script(text) for name, text in (("plotly", get_plotlyjs()), ("script", _source(environment, "page.js")))}
    return environment.get_template("page.html.j2").render(
        page=page,
        style=Markup(_source(environment, "page.css")),
        script_hashes=Markup(" ".join(f"'sha256-{_digest(text)}'" for text in scripts.values())),
        figures=Markup(embed(figures)),
        samples=Markup(embed(page.drill)),
        **scripts,
    )


def code(text: str) -> Markup:
    """Text in which what stands between backticks is code; everything is escaped."""
    parts = text.split("`")
    closed = len(parts) % 2 == 1  # a lone backtick is one
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in enumerate(parts if closed else [text])
    )


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    meta = result["meta"]
    groups = f", from {meta['group_topk']} of {meta['groups']} groups" if meta["groups"] > 1 else ""
    steps = meta["steps"]
    kinds = [f"{side} {meta[f'{side}_dtype']}" for side in ("engine", "trainer", "router") if meta[f"{side}_dtype"]]
    ranks = f"trainer EP {meta['ep']}, engine EP {meta['engine_ep']}"
    found = {
        "Model": meta["model"] or "unknown",
        "Routing": f"{count(len(meta['layers']), 'MoE layer')}, {number(meta['experts'])} experts, top-{meta['topk']}{groups}",
        "Recorded": f"{count(len(steps), 'step')}" + (f", {steps[0]} to {steps[-1]}" if len(steps) > 1 else ""),
        "Samples": f"{number(result['samples'])}, {number(result['rows'])} rows, {number(result['tokens'])} generated tokens with logprobs",
        "Precision": ", ".join(kinds) or "unknown",
        "Parallel": ranks,
        "Source": ", ".join(meta["sources"]),
    }
    if against := result["against"]:
        found["Compared"] = f"{against['side']} of a ({against['a']}) and b ({against['b']})"
        found["Rows"] = (
            f"{number(against['common_rows'])} in both, {number(against['only_a'])} only in a, {number(against['only_b'])} only in b"
        )
    return found


def _run_facts(overview: Overview) -> dict[str, str]:
    config = overview.config
    return {"Model": config.model.path if config else "unknown", "Steps": count(len(overview.records), "step")}


def _source(environment: Environment, name: str) -> str:
    return environment.loader.get_source(environment, name)[0]


def _script(text: str) -> Markup:
    """A script to stand between its tags, which it must not end."""
    if "</script" in text.lower():
        raise ReportError("a script of the page contains </script; it cannot be embedded")
    return Markup(text)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
