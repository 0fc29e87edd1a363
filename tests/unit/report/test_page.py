"""The page: what it says for much, little and one-sided data; that figures are valid, small enough, and that no text becomes markup."""

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import ReportError
from moerl.report import capture, page, page_samples
from moerl.report.against import report_against
from moerl.report.overview import MOST_POINTS, read_run
from moerl.report.page_format import embed, nats, number, share, spans
from moerl.report.page_plot import Plot, Table, fill_rows
from moerl.report.summary import report_run
from tests.unit.report.page_cases import MARKUP, one_sided, result, write_run

MOST_BYTES = 6_000_000


def plots(described: page.Page) -> list[Plot]:
    return [part for section in described.sections for part in section.parts if isinstance(part, Plot)]


def sections(described: page.Page) -> list[str]:
    return [section.name for section in described.sections]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), 12, capture_steps=3)


def recorded(folder: Path, *, trainer: bool) -> dict[str, Any]:
    """What the analysis really says of a recording, of both sides or of the engine alone."""
    folder = write_run(folder, 4, capture_steps=3)
    if not trainer:
        for path in capture.list_steps(folder / capture.FOLDER).values():
            meta, rows = capture.read_meta(path), capture.concatenate(capture.read(path))
            nothing = np.full(len(rows), np.nan, np.float32)
            alone = dict.fromkeys(("natural_logprob", "r2_logprob", "replay_logprob"), nothing)
            capture.write(folder / capture.FOLDER, meta, replace(rows, trainer_ids=None, **alone))
    return report_run(folder)


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    return page.render(result(12), run)


@pytest.mark.parametrize(
    ("steps", "analysis"),
    [pytest.param(1, result(1), id="one step"), pytest.param(12, result(12), id="many"), (3, one_sided(3)), (12, None)],
)
def test_every_figure_is_one_that_plotly_knows(tmp_path: Path, steps: int, analysis: dict[str, Any] | None) -> None:
    check(page.describe(analysis, read_run(write_run(tmp_path, steps))))


def test_figures_of_what_the_analysis_says(tmp_path: Path) -> None:
    both, alone = recorded(tmp_path / "a", trainer=True), recorded(tmp_path / "b", trainer=False)
    against = report_against(tmp_path / "a", tmp_path / "b", "engine")
    for analysis in (both, alone, against):
        check(page.describe(analysis, None))
    assert "R3" not in json.dumps(
        [[*map(asdict, section.parts), section.lead] for section in page.describe(against, None).sections], default=str
    )
    text = page.render(alone, tmp_path / "b")
    assert "routes of one side only" in text


def check(described: page.Page) -> None:
    """All figures are valid, named and titled."""
    found = plots(described)
    assert len({plot.name for plot in found}) == len(found) > 3
    for plot in found:
        assert plot.title.strip()
        assert "nan" not in plot.title
        assert all(axis["title"]["text"] or plot.name == "parts" for name, axis in plot.layout.items() if re.match("[xy]axis", name))
        figure = go.Figure(list(plot.traces), dict(plot.layout))  # raises for a property that there is not
        for trace in figure.data:
            assert len(trace.x), plot.name
            assert trace.type == "heatmap" or len(trace.x) == len(trace.y), plot.name


def test_what_was_not_recorded_is_left_out(run: Path) -> None:
    overview = read_run(run)
    assert sections(page.describe(result(3), overview)) == ["gap", "flips", "causes", "cost", "sound", "run"]
    assert sections(page.describe(result(3), None)) == ["gap", "flips", "causes", "cost", "sound"]
    assert sections(page.describe(one_sided(3), None)) == ["gap", "flips", "sound"]
    alone = page.describe(None, overview)
    assert sections(alone) == ["run"]
    assert "--diagnostics.capture_every_steps" in alone.notice
    assert {"kl", "flips"} <= {plot.name for plot in plots(alone)}


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"neither a recording in mismatch/ nor a finished step"):
        page.render(None, tmp_path)
    with pytest.raises(ReportError, match="does not exist"):
        page.render(None, tmp_path / "nowhere")


def test_long_run_stays_small(tmp_path: Path) -> None:
    steps = 1000
    run = write_run(tmp_path, steps, capture_steps=30, layers=58)
    recorded = result(steps, layers=58, experts=256)
    assert len(page.render(recorded, run).encode()) < MOST_BYTES
    curves = [trace for plot in plots(page.describe(recorded, read_run(run))) for trace in plot.traces if "customdata" in trace]
    assert max(len(trace["x"]) for trace in curves if "step" in str(trace["customdata"][0])) <= MOST_POINTS + 1


def test_one_step_is_drawn_as_points(tmp_path: Path) -> None:
    (trend,) = [plot for plot in plots(page.describe(result(1), None)) if plot.name == "trend-kl"]
    curves = [trace for trace in trend.traces if "name" in trace]
    assert [trace["mode"] for trace in curves] == ["lines+markers"] * 3
    assert trend.layout["xaxis"]["tickvals"] == [0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "13\u00a0% of the (token, layer) decisions. Replaying the engine's takes KL(engine ‖ trainer) from 1.0e-3 to 2.0e-5"),
        ({}, "98\u00a0% of the gap is routing."),
        ({"replay_removes": -0.1}, "routing is not what makes the gap."),
        ({"kl_replay": None}, "KL(engine ‖ trainer) is 1.0e-3 nats per token, the trainer choosing by itself."),
        ({"kl_natural": None}, "KL(engine ‖ trainer) is 2.0e-5 nats per token under replay."),
        ({"findings": [{"severity": "error"}] * 2}, "2 findings must be looked at first."),
        ({"flip_share": None, "kl_natural": None, "kl_replay": None}, "The recording holds the routes of one side only."),
    ],
)
def test_verdict(changes: dict[str, Any], said: str) -> None:
    assert said in page.verdict(result(1) | changes)


def test_no_text_becomes_markup(text: str) -> None:
    assert MARKUP not in text
    assert html.escape(MARKUP, quote=False) in text
    assert html.unescape(page.code(f"a `b{MARKUP}` c")) == f"a <code>b{MARKUP}</code> c"
    assert page.code("a ` b") == "a ` b"


def test_only_the_pages_own_scripts_may_run(text: str) -> None:
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts} == allowed
    assert len(allowed) == 2
    assert not re.search(r'(src|href)="(?!#)', text.replace(scripts[0], ""))  # plotly itself holds such text


def test_figures_and_samples_are_in_the_page(text: str) -> None:
    data = {name: json.loads(found) for name, found in re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', text)}
    assert set(data["figures"]) == set(re.findall(r'data-plot="([^"]+)"', text))
    assert [step["step"] for step in data["samples"]["steps"]] == [0, 6, 11]


def test_samples_are_few_and_worst_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = page_samples.choose(run)
    for step in found["steps"]:
        assert 1 < len(step["samples"]) <= page_samples.MOST_SAMPLES
        *worst, middle = [sample["natural"] for sample in step["samples"]]
        assert worst == sorted(worst, reverse=True)
        assert middle <= worst[0]
        for sample in step["samples"]:
            assert {len(sample[name]) for name in ("tokens", "response", "positions", "engine", "gap", "flips", "layers", "margins")} == {
                61
            }
            assert sample["flips"][0] is None  # no row predicts the first token
            assert sample["flips"][1:] == [len(layers) for layers in sample["layers"][1:]]
            assert all(gap is None for gap, response in zip(sample["gap"], sample["response"], strict=True) if not response)
    monkeypatch.setattr(page_samples, "MOST_TOKENS_OF_ONE", 20)
    for sample in (sample for step in page_samples.choose(run)["steps"] for sample in step["samples"]):
        assert sample["before"] + len(sample["tokens"]) + sample["after"] == sample["length"] == 61
        assert max(abs(gap or 0) for gap in sample["gap"]) == pytest.approx(sample["largest"], rel=0.01)  # the worst is in the window
        assert sample["positions"][0] == sample["before"]
    monkeypatch.setattr(page_samples, "MOST_TOKENS", 60)
    assert [len(step["samples"]) for step in page_samples.choose(run)["steps"]] == [1, 1, 1]


def test_rows_of_the_page_are_full() -> None:
    narrow, wide, table = Plot("a", "a", [], {}), Plot("b", "b", [], {}, wide=True), Table("t", (), ())
    found = fill_rows([narrow, narrow, narrow, wide, narrow, table, narrow])
    assert [getattr(part, "wide", None) for part in found] == [False, False, True, True, True, None, True]
    assert fill_rows([]) == []


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(None), "–"),
        (number(float("nan")), "–"),
        (number(0.0), "0"),
        (number(12300), "12,300"),
        (number(1.5), "1.5"),
        (number(0.01234), "0.0123"),
        (number(1.2e-4), "1.2e-4"),
        (number(-3e-12), "-3.0e-12"),
        (nats(0.0012), "1.2e-3"),
        (nats(0.012), "0.012"),
        (nats(None), "–"),
        (share(0.128), "12.8\u00a0%"),
        (share(1.0), "100\u00a0%"),
        (share(0.9998), "99.98\u00a0%"),
        (share(0.0), "0\u00a0%"),
        (share(0.00049), "0.049\u00a0%"),
        (share(1e-6), "1.0e-4\u00a0%"),
        (share(None), "–"),
        (spans([3, 4, 5, 9]), "3–5, 9"),
        (spans([1, 3, 5, 7, 9, 11]), "1, 3, 5, 7 and 2 more stretches"),
    ],
)
def test_numbers_as_shown(shown: str, text: str) -> None:
    assert shown == text


def test_embedded_steps_are_exact() -> None:
    assert json.loads(embed([123456, 123456.5, 12345.0, 0.123456])) == [123456, 123456.5, 12345, 0.1235]


@given(st.dictionaries(st.text(), st.lists(st.text() | st.floats() | st.integers(-(2**40), 2**40) | st.none())))
def test_embedded_data_cannot_end_its_script(data: dict[str, Any]) -> None:
    found = embed(data)
    assert not set("<>&\u2028\u2029") & set(found)
    for name, values in json.loads(found).items():
        for got, given_ in zip(values, data[name], strict=True):
            if isinstance(given_, float):
                assert got is None if not np.isfinite(given_) else got == pytest.approx(given_, rel=1e-3)
            else:
                assert got == given_
