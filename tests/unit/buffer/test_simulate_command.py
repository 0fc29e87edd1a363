"""`moerl plan --simulate`: settings and options in, a table and JSON out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.buffer.command import main, recorded_lengths
from moerl.buffer.ledger import Admitted, Delivered, Delivery, Ledger
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ConfigError, RolloutError
from moerl.rollout import store
from moerl.rollout.sample import Group, Sample

SMALL = ["--simulate", "--rollout.prompts_per_step", "4", "--engine.max_running_requests=16", "--steps", "5", "--length-p95=2000"]


def test_a_table_and_json_compare_with_the_synchronous_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--buffer.max_lag", "2", "--train-s-per-token", "1e-3", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("share of the bound" in line for line in lines)
    found = json.loads(last)
    assert found["cluster"]["slots"] == 16
    assert found["cluster"]["buffer"]["max_lag"] == 2
    outcomes = found["outcomes"]
    assert outcomes["asynchronous"]["share_of_bound"] > outcomes["synchronous"]["share_of_bound"] > 0
    assert outcomes["synchronous"]["figures"]["buffer/lag_highest"] == 0


def test_without_lag_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]) == ["synchronous"]


def test_wrong_options_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        main([*SMALL, "--sync-paus-s", "1", "--prompts", "many"])
    assert caught.value.violations == [
        "the simulation has no option --sync-paus-s; did you mean --sync-pause-s?",
        "--prompts: expected a whole number, got 'many'",
    ]


def test_settings_are_checked_as_for_a_run() -> None:
    with pytest.raises(ConfigError, match="buffer.capacity_groups 2 cannot hold the 4 groups of one step"):
        main([*SMALL, "--buffer.capacity_groups", "2"])


def test_lengths_come_from_a_runs_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for event in (Admitted(0, 5, 0, 0.0), Delivered(0, (Delivery(0, (11, 11), 0),), 0.0)):
        ledger.append(event)
    ledger.close()
    assert recorded_lengths(tmp_path) == ((11, 11),)
    assert main([*SMALL, "--lengths-from", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]["synchronous"]["tokens"] == 5 * 4 * 8 * 11
    with pytest.raises(RolloutError, match="has neither ledger/groups.jsonl nor rollouts"):
        recorded_lengths(tmp_path / "elsewhere")


def test_lengths_come_from_recorded_rollouts_where_there_is_no_ledger(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny(model, tiny_config(hidden=32, layers=2, experts=8, topk=2, groups=1, group_topk=1, expert_width=16))
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))
    samples = [Sample(0, i, [1], [2] * n, bytes(4 * n), b"", [(0, 0, n)], "", "stop") for i, n in enumerate((3, 8))]
    for step in range(2):
        store.save_step(tmp_path / "rollouts", step, [Group(0, "", samples)], store.make_header(model, step=step, version=step))
    assert recorded_lengths(tmp_path) == ((3, 8), (3, 8))


def test_the_room_needs_neither_torch_nor_ray() -> None:
    heavy = ("torch", "ray", "megatron", "sglang")
    code = f"import moerl.buffer.command, moerl.buffer.lag, sys; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
