"""A run's own records: what counts as a step, how curves are put into bins, and what is reported as trouble."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moerl.errors import ReportError
from moerl.report.overview import read_run, trend
from tests.unit.report.page_cases import write_run


def append(run: Path, *lines: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(lines))


def test_steps_count_once_and_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path, 4)
    append(run, json.dumps({"step": 3, "reward": 9.0}) + "\n", '{"step": 4, "rew')
    found = read_run(run)
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.column("reward")[3] == 9.0
    assert np.isnan(found.column("buffer/lag_0")[3])
    assert found.before["heldout_accuracy"] == 0.4
    assert found.names(r"buffer/lag_\d+") == ["buffer/lag_0", "buffer/lag_1", "buffer/lag_2"]


@pytest.mark.parametrize("line", ["[1]", '{"reward": 1}', "nonsense"])
def test_broken_line_is_named(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path, 1)
    append(run, line + "\n")
    with pytest.raises(ReportError, match=r'metrics\.jsonl, line 3: expected a JSON object with a whole number "step"'):
        read_run(run)


def test_missing_folder() -> None:
    with pytest.raises(ReportError, match="does not exist"):
        read_run("nowhere/at/all")


@pytest.mark.parametrize(("text", "problem"), [(None, "missing"), ('{"unknown": 1}', "another version of moerl")])
def test_settings_that_cannot_be_read_are_left_out(tmp_path: Path, text: str | None, problem: str) -> None:
    run = write_run(tmp_path, 2)
    (run / "config.json").unlink()
    if text is not None:
        (run / "config.json").write_text(text)
    found = read_run(run)
    assert found.config is None
    assert problem in found.config_problem


def test_trouble_is_found_and_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path, 60)
    append(run, json.dumps({"step": 60, "reward": 0.5, "versions_consistent": False, "engine_versions": [3], "version": 61}) + "\n")
    found = {fault.kind: fault for fault in read_run(run).faults}
    assert next(iter(found)) == "versions"
    assert found["versions"].steps == (60,)
    assert "served versions [3] after the update to 61" in found["versions"].text
    assert found["refused_late"].steps == (7, 57)
    assert "buffer.max_lag" in found["refused_late"].text
    assert found["sync_attempts"].steps == (5,)


floats = st.floats(-1e6, 1e6) | st.just(float("nan"))


@given(hnp.arrays(np.float64, st.integers(0, 70), elements=floats), st.integers(1, 20))
def test_bins_keep_mean_and_extremes(values: np.ndarray, most: int) -> None:
    steps = np.arange(10, 10 + len(values))
    found = trend(steps, values, most)
    assert len(found.mean) <= most
    assert found.binned == (len(values) > most)
    sizes = found.last - found.first + 1
    assert sizes.sum() == len(values)
    for i, (first, last) in enumerate(zip(found.first, found.last, strict=True)):
        part = values[first - 10 : last - 9]
        known = part[np.isfinite(part)]
        if len(known):
            assert found.mean[i] == pytest.approx(known.mean())
            assert (found.low[i], found.high[i]) == (known.min(), known.max())
        else:
            assert np.isnan([found.mean[i], found.low[i], found.high[i]]).all()
