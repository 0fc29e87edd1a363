"""The replay benchmark: pairs of real steps, every decision followed, the output as agreed."""

import json

import pytest

from moerl import cli
from moerl.bench import replay as bench


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = bench.measure
    monkeypatch.setattr(bench, "SEQUENCES", 4)
    monkeypatch.setattr(bench, "measure", lambda: measure(rounds=2))
    assert cli.main(["bench", "replay", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"overhead", "agreement"}
    assert found["agreement"] == 1.0
    assert 0.2 < found["overhead"] < 5.0
