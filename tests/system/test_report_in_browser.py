"""The report's page in a real browser: `moerl report` on a made-up run, opened from disk without a network, looked at and clicked through.

tools/browser.sh finds or fetches the browser; where it can't, the tests are skipped and say why.
"""

import io
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from moerl import cli
from tests.system.run_harness import ROOT
from tests.unit.report.page_cases import TOKENS, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")

STEPS = 6
MARKUP = "</script><img src=x onerror=document.title='owned'><b>bold</b>"
"""The text of every token: it must stay text wherever it is shown."""

TRACES = ".scatterlayer .trace, .barlayer .trace, .heatmaplayer .hm"


@dataclass
class Opened:
    """A page, and what it complained about or tried to load."""

    page: Any
    errors: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with recordings, as the command writes it."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "model").mkdir()
    vocabulary = {f"{MARKUP}{token}": token for token in range(TOKENS)}
    Tokenizer(WordLevel(vocabulary, unk_token=f"{MARKUP}0")).save(str(folder / "model" / "tokenizer.json"))
    run = write_run(folder / "run", STEPS, capture_steps=STEPS, model=str(folder / "model"))
    assert cli.main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[Opened]:
    found = subprocess.run(["bash", str(ROOT / "tools" / "browser.sh")], capture_output=True, text=True, check=False, timeout=600)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    with sync_api.sync_playwright() as playwright:
        try:  # the sandbox needs rights that root and containers lack, and the page is the project's own
            browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"the browser {found.stdout.strip()} does not start: {error.message.strip().splitlines()[0]}")
        page = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        opened = Opened(page)
        page.on("console", lambda message: opened.errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.on("request", lambda request: opened.loaded.append(request.url))
        page.goto(report.as_uri())
        page.evaluate("dispatchEvent(new Event('beforeprint'))")  # which draws all figures at once
        yield opened
        browser.close()


def test_page_opens_without_a_network_or_a_complaint(opened: Opened, report: Path) -> None:
    assert opened.page.locator("body[data-drawn]").count() == 1
    assert opened.loaded == [report.as_uri()]
    assert opened.errors == []
    assert opened.page.title() == str(report.parent)


def test_every_figure_has_traces(opened: Opened) -> None:
    traces = opened.page.eval_on_selector_all(".plot", f"all => all.map(one => [one.id, one.querySelectorAll('{TRACES}').length])")
    assert len(traces) > 25
    assert [name for name, count in traces if not count] == []


def test_step_leads_to_samples_and_sample_to_tokens(opened: Opened) -> None:
    page = opened.page
    assert page.input_value("#drill-step") == str(STEPS - 1)
    page.locator("#plot-trend-kl").scroll_into_view_if_needed()
    point = page.locator("#plot-trend-kl .scatterlayer .points path").first.bounding_box()
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    page.wait_for_selector("#plot-trend-kl .hoverlayer .hovertext")
    page.mouse.down()
    page.mouse.up()
    assert page.input_value("#drill-step") == "0"
    rows = page.locator("#drill-samples tbody tr")
    assert rows.count() > 1
    rows.nth(1).click()
    assert "chosen" in rows.nth(1).get_attribute("class")
    tokens = page.locator("#drill-sample .token")
    assert MARKUP in tokens.first.text_content()
    shades = page.eval_on_selector_all("#drill-sample .token", "all => all.map(one => one.style.background)")
    assert len(set(shades)) > 3
    tokens.last.click()
    detail = page.locator("#drill-token").text_content()
    assert "d natural" in detail
    assert "layers that flip" in detail


def test_text_of_tokens_stays_text(opened: Opened) -> None:
    assert MARKUP in opened.page.text_content("main")
    assert opened.page.locator("main img, main b:text('bold')").count() == 0


@pytest.mark.parametrize("width", [1200, 390])
def test_page_fits_its_window(opened: Opened, tmp_path: Path, width: int) -> None:
    if opened.page.viewport_size["width"] != width:  # all figures are drawn again
        opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.evaluate("scrollTo(0, 0)")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    picture = opened.page.screenshot(path=tmp_path / f"report-{width}.png")
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    assert pixels.shape == (900, width, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # text and colours, not an empty sheet
