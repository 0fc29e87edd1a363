"""The conversion benchmark: its model has the size that is asked for, and its output is as agreed."""

import json

import pytest

from moerl import cli
from moerl.bench import convert as bench
from moerl.convert.folder import read_folder

TINY = bench.Sizes(layers=1, hidden=32, experts=8, expert_width=16, vocabulary=100)


def test_the_model_has_about_the_size_that_is_asked_for(tmp_path) -> None:
    spec = bench.write_model(tmp_path / "hf", TINY)
    stored = read_folder(tmp_path / "hf")
    assert set(stored) == {name for entry in spec.entries() for name in entry.hf}
    for gib in (4.0, 10.0):
        sizes = bench.Sizes.of(gib)
        layer = 2 * (sizes.experts * 3 * sizes.hidden * sizes.expert_width)
        assert (sizes.layers * layer + 4 * sizes.vocabulary * sizes.hidden) / 2**30 == pytest.approx(gib, rel=0.2)


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked, measure = [], bench.measure
    monkeypatch.setattr(bench, "measure", lambda sizes: asked.append(sizes) or measure(TINY, rounds=1))
    assert cli.main(["bench", "convert", "--gib", "2.4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"gib", "copy_s", "to_megatron_vs_copy", "to_hf_vs_copy", "to_megatron_peak_gib", "to_hf_peak_gib"}
    assert all(value > 0 for value in found.values())
    assert 0.1 < found["to_hf_peak_gib"] < 3
    assert asked == [bench.Sizes.of(2.4)]
    assert cli.main(["bench", "convert", "--gib", "much"]) == 2
    assert "--gib needs a number, got 'much'" in capsys.readouterr().err
