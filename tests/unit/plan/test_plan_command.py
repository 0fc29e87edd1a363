"""`moerl plan`: from settings, or a config.json and sizes, to a table, one JSON object, or a row of Markdown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl import cli
from moerl.convert.tiny import tiny_config, tiny_qwen3_config
from moerl.errors import ConfigError
from moerl.plan.command import split_options
from moerl.plan.show import COLUMNS, markdown_head
from tests.unit.models import published

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    file = tmp_path / "plan.toml"
    file.write_text(f'[model]\npath = "{tmp_path}"\n[parallel]\npp = 2\nep = 2\n[engine]\ncount = 2\ntp = 2\n')
    return str(file)


def planned(capsys: Captured, *words: str) -> dict:
    assert cli.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_is_one_json_object(config: str, capsys: Captured) -> None:
    found = planned(capsys, "@", config, "--world", "8", "--ranks-per-node=4")
    sync = found["sync"]
    assert (sync["senders"], sync["receivers"], sync["ratio"], sync["same_node_share"]) == (8, 4, 1.0, 0.0)
    assert sync["bytes_total"] == sync["bytes_minimum"]
    assert sync["floor_s"] == max(sync["max_bytes_per_source"], sync["max_bytes_per_destination"]) * 8 / 400e9
    assert {"buckets", "plan_s"} < sync.keys()
    assert (found["job"], found["parameters"], found["tensors"]) == ("plan", 6844672, 839)
    assert found["memory_per_rank"]["trainer"]["bytes"]["weights"] > 0
    assert found["memory_per_rank"]["engine"]["kv_tokens"] == 32768


def test_half_the_bandwidth_doubles_the_floor(config: str, capsys: Captured) -> None:
    fast, slow = (planned(capsys, "@", config, "--world=8", f"--gbps-per-rank={rate}")["sync"]["floor_s"] for rate in (400, 200))
    assert slow == 2 * fast


def test_engines_that_serve_fp8_receive_half_as_much(tmp_path: Path, capsys: Captured) -> None:
    sizes = {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), **sizes, "vocab_size": 16}))
    words = ["--model.path", str(tmp_path), "--engine.device", "cuda", "--world", "1"]
    moved = [planned(capsys, *words, *flag)["sync"]["bytes_total"] for flag in ([], ["--fp8"])]
    assert 0.5 < moved[1] / moved[0] < 0.52


def test_all_ranks_on_one_machine_stay_on_it(config: str, capsys: Captured) -> None:
    assert planned(capsys, "@", config, "--world", "4")["sync"]["same_node_share"] == 1.0


def test_a_world_that_does_not_factor_is_a_config_error_with_what_would(config: str, capsys: Captured) -> None:
    assert cli.main(["plan", "@", config, "--world", "3"]) == 2
    message = capsys.readouterr().err
    assert "3 trainer ranks cannot be split" in message
    assert "nearest legal sizes of the trainer: 3 ranks as tp=1 pp=3" in message


def test_a_config_and_sizes_are_enough(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "anything.json"
    file.write_text(json.dumps(published.config("DeepSeek-V2-Lite")))
    words = ["--hf", str(file), "--trainer", "tp=2,pp=2,ep=4,dp=4", "--engine", "tp=2,ep=2,replicas=4"]
    found = planned(capsys, *words)
    assert found["trainer"] == {"ranks": 16, "tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 4, "etp": 1}
    assert found["engine"] == {"engines": 4, "tp": 2, "ep": 2, "fp8": False}
    assert found["job"] == "anything"
    assert found["parameters"] / 1e9 == pytest.approx(15.7, abs=0.05)
    assert found["sync"]["ratio"] == 1.0
    assert found["assumptions"]["hbm_tb_s"] == 3.35
    larger = planned(capsys, *words, "--gpu-gib=141", "--response-tokens", "4096")
    assert (larger["assumptions"]["hbm_tb_s"], larger["assumptions"]["response_tokens"]) == (4.8, 4096)


def test_fp8_is_read_from_a_config_of_any_name(tmp_path: Path, capsys: Captured) -> None:
    sizes = {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({**tiny_config(), **sizes, **quantised}))
    assert planned(capsys, "--hf", str(file))["engine"]["fp8"] is True


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"model_type": "mixtral", "num_local_experts": 8}, "model_type is 'mixtral'"), ({"scoring_func": "softmax"}, "scoring_func")],
)
def test_a_refused_model_names_the_field_and_the_file(tmp_path: Path, capsys: Captured, changes: dict, field: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({**tiny_config(), **changes}))
    assert cli.main(["plan", "--hf", str(file)]) == 1
    message = capsys.readouterr().err
    assert field in message
    assert str(file) in message


def test_gpus_are_split_between_the_pools(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_qwen3_config()))
    found = planned(capsys, "--hf", str(tmp_path / "config.json"), "--gpus=6", "--response-tokens=64", "--prompt-tokens=32")
    assert found["split"]["gpus"] <= 6
    assert found["trainer"]["ranks"] == found["split"]["trainer"]["world"]
    assert found["engine"]["engines"] == found["split"]["engine"]["count"]
    assert found["bounds"]["tokens_per_s"] <= found["split"]["tokens_per_s"]


def test_a_row_of_markdown_has_all_columns(config: str, capsys: Captured) -> None:
    assert cli.main(["plan", "@", config, "--world=4", "--markdown"]) == 0
    row = capsys.readouterr().out.strip()
    assert row.count("|") == len(COLUMNS) + 1 == markdown_head().splitlines()[1].count("|")


def test_the_table_names_its_assumptions(config: str, capsys: Captured) -> None:
    assert cli.main(["plan", "@", config, "--world=4", "--mfu", "0.4"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "MFU 0.4" in words.replace("│ ", "")
    assert "bounds" in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", "many"], "--world needs a positive whole number, got 'many'"),
        (["--mfu"], "--mfu needs a number, got ''"),
        (["--hf="], "--hf needs a value"),
    ],
)
def test_options_need_sensible_values(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_options(words)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--mfu=2", "--reserve-gib=90"], ["--mfu is a share", "--reserve-gib 90 leaves nothing of --gpu-gib 80"]),
        (["--response-tokens=1e6", "--imbalance=0.5"], ["rollout.max_new_tokens = 512", "--imbalance is busiest over mean"]),
        (["--gbps-per-rank=0"], ["--gbps-per-rank must be above 0, got 0"]),
        (["--trainer", "tp=2,xp=2", "--engine=tp=0"], ["--trainer: expected tp=N", "got 'xp=2'", "--engine: expected tp=N", "got 'tp=0'"]),
        (["--engine.model_path", "nowhere"], ["engine.model_path nowhere has no config.json", "--hf CONFIG.json"]),
        (
            ["--model.path", "neither", "--engine.model_path", "nor"],
            ["model.path neither has no config.json", "engine.model_path nor has no config.json"],
        ),
    ],
)
def test_all_wrong_options_are_named(config: str, capsys: Captured, words: list[str], messages: list[str]) -> None:
    assert cli.main(["plan", "@", config, "--world=4", *words]) == 2
    shown = capsys.readouterr().err
    for message in messages:
        assert message in shown


def test_planning_needs_no_torch() -> None:
    heavy = ("torch", "megatron", "sglang", "ray", "transformers")
    code = f"import moerl.plan.command, sys; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
