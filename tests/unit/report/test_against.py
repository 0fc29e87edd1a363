"""Two recordings of the same tokens: rows are joined by what they are, and every figure reads from A to B."""

from dataclasses import replace

import numpy as np
import pytest

from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.against import report_against
from tests.unit.report.router_model import World, record

WORLD = World(prompts=6, group=3, noise=4e-3)


@pytest.fixture
def runs(tmp_path):
    meta, rows, biases = record(WORLD)
    other = replace(rows, engine_ids=rows.trainer_ids, engine_logprob=rows.natural_logprob)
    order = np.random.default_rng(0).permutation(len(rows))
    capture.write(tmp_path / "a" / capture.FOLDER, meta, rows, biases)
    capture.write(tmp_path / "b" / capture.FOLDER, meta, other.take(order), biases)
    return tmp_path / "a", tmp_path / "b"


def test_two_engines_differ_as_one_engine_and_its_trainer_did(runs) -> None:
    _, rows, _ = record(WORLD)
    report = report_against(*runs)
    flips = (np.sort(rows.engine_ids) != np.sort(rows.trainer_ids)).any(axis=2)
    d = (rows.natural_logprob - rows.engine_logprob)[rows.response].astype(np.float64)
    assert report["kind"] == "against"
    assert (report["against"]["common_rows"], report["against"]["only_a"], report["against"]["only_b"]) == (len(rows), 0, 0)
    assert report["flip_share"] == pytest.approx(flips.mean())
    assert report["kl_natural"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-5)
    assert report["kl_replay"] is None
    assert report["causes"]["margin"] is None
    assert report["sides"] == [f"{runs[0]} (engine)", f"{runs[1]} (engine)"]


def test_what_is_not_common_is_counted(runs) -> None:
    meta, rows, biases = record(WORLD)
    part = rows.take((rows.prompt_id > 0) & (rows.position < 30))
    tokens = part.token.copy()
    tokens[:7] += 1
    capture.write(runs[1] / capture.FOLDER, meta, replace(part, token=tokens), biases)
    found = report_against(*runs)["against"]
    assert (found["common_rows"], found["only_a"], found["only_b"], found["other_token"]) == (len(part) - 7, len(rows) - len(part), 0, 7)
    back = report_against(*runs[::-1])["against"]
    assert (back["common_rows"], back["only_a"], back["only_b"]) == (len(part) - 7, 0, len(rows) - len(part))


def test_two_trainers_have_margins_so_the_score_error_is_measured(runs) -> None:
    meta, rows, biases = record(WORLD)
    noise = 1e-3 * np.random.default_rng(0).standard_normal(rows.margin.shape)
    moved = (rows.margin.astype(np.float64) + 1 + noise).astype(np.float16)  # far from 0, so that float16 is coarse
    capture.write(runs[0] / capture.FOLDER, meta, replace(rows, margin=(rows.margin + 1).astype(np.float16)), biases)
    capture.write(runs[1] / capture.FOLDER, meta, replace(rows, margin=moved), biases)
    report = report_against(*runs, side="trainer")
    assert report["against"]["score_error"] == pytest.approx(1e-3, rel=0.1)
    assert report["flip_share"] == 0


def test_recordings_that_share_nothing_are_refused(runs) -> None:
    meta, rows, _ = record(WORLD)
    capture.write(runs[1] / capture.FOLDER, meta, replace(rows, prompt_id=rows.prompt_id + 1000))
    with pytest.raises(ReportError, match="no row in common"):
        report_against(*runs)
    (runs[1] / capture.FOLDER / "step-000007.safetensors").unlink(missing_ok=True)
    other, more, _ = record(replace(WORLD, layers=(1, 2), experts=32))
    capture.write(runs[1] / capture.FOLDER, other, more)
    with pytest.raises(ReportError, match=r"(?s)layers: .* experts: 64 in "):
        report_against(*runs)
    capture.write(runs[1] / capture.FOLDER, meta, capture.without(rows, "trainer_ids", "margin", "flipped_mass"))
    with pytest.raises(ReportError, match="holds no ids of a trainer"):
        report_against(*runs, side="trainer")


def test_another_step_is_joined_only_where_there_is_one_each(runs) -> None:
    meta, rows, _ = record(WORLD)
    path = capture.list_steps(runs[1] / capture.FOLDER)[7]
    path.unlink()
    capture.write(runs[1] / capture.FOLDER, replace(meta, step=3), rows)
    assert report_against(*runs)["against"]["common_rows"] == len(rows)
    capture.write(runs[1] / capture.FOLDER, replace(meta, step=4), rows)
    with pytest.raises(ReportError, match="no step in common: steps 7 and steps 3, 4"):
        report_against(*runs)
