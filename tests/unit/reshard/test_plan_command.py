"""`moerl plan`: from a config and a model's config.json to the cost of a weight update."""

import json
from pathlib import Path

import pytest

from moerl import cli
from moerl.convert.tiny import tiny_config
from moerl.errors import ConfigError
from moerl.reshard.command import split_options


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    file = tmp_path / "plan.toml"
    file.write_text(f'[model]\npath = "{tmp_path}"\n[parallel]\npp = 2\nep = 2\n[engine]\ncount = 2\ntp = 2\n')
    return str(file)


def test_the_last_line_is_one_json_object(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "@", config, "--world", "8", "--ranks-per-node=4", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (found["senders"], found["receivers"], found["bytes_ratio"]) == (8, 4, 1.0)
    assert found["same_node_share"] == 0.0
    assert "8 trainer → 4 engine" in lines[1]


def test_engines_that_serve_fp8_receive_half_as_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), **sizes, "vocab_size": 16}))
    words = ["plan", "--model.path", str(tmp_path), "--engine.device", "cuda", "--world", "1", "--json"]
    moved = []
    for flag in ([], ["--fp8"]):
        assert cli.main([*words, *flag]) == 0
        moved.append(json.loads(capsys.readouterr().out.splitlines()[-1])["nbytes"])
    assert 0.5 < moved[1] / moved[0] < 0.52


def test_all_ranks_on_one_machine_stay_on_it(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "@", config, "--world", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["same_node_share"] == 1.0


def test_a_world_that_does_not_factor_is_a_config_error(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "@", config, "--world", "3"]) == 2
    assert "3 trainer ranks cannot be split" in capsys.readouterr().err


def test_a_count_must_be_a_positive_whole_number() -> None:
    with pytest.raises(ConfigError, match="--world needs a positive whole number, got 'many'"):
        split_options(["--world", "many"])
