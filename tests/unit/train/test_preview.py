"""`moerl train --dry-run`: Megatron accepts the settings of every file in configs/, and every process's command line is shown."""

from pathlib import Path

import pytest

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.errors import ConfigError
from moerl.models import read_spec
from moerl.plan.assumptions import assumptions_of
from moerl.plan.estimate import job_of
from moerl.train import launch
from moerl.train.preview import megatron_lines, preview, trainer_command

ROOT = Path(__file__).resolve().parents[3]
CONFIGS, MODELS = ROOT / "configs", ROOT / "configs" / "models"
MODEL = {
    "moonlight_16b_8gpu": "Moonlight-16B-A3B-Instruct",
    "qwen3_30b_8gpu": "Qwen3-30B-A3B",
    "qwen3_30b_32gpu": "Qwen3-30B-A3B",
    "qwen3_235b_128gpu": "Qwen3-235B-A22B",
    "glm_45_128gpu": "GLM-4.5",
    "deepseek_v3_384gpu": "DeepSeek-V3",
    "kimi_k2_512gpu": "Kimi-K2-Instruct",
}


def words(name: str, *more: str) -> list[str]:
    return ["@", str(CONFIGS / f"{name}.toml"), "--model.path", str(MODELS / MODEL[name]), *more]


@pytest.mark.parametrize("name", MODEL)
def test_megatron_accepts_the_settings_and_groups_fill_the_world(name: str) -> None:
    config = load_config(words(name))
    spec = read_spec(config.model.path)
    assert not model_problems(config, spec)
    job = job_of(config, spec, config.parallel.nproc_per_node, assumptions_of({}, config))
    groups, megatron = megatron_lines(config, spec, job)
    p, sizes = config.parallel, dict.fromkeys(("dp", "edp"), 0)
    sizes |= {word[: len(key)]: int(word[len(key) :]) for word in groups.split() for key in sizes if word.startswith(key)}
    assert p.tp * p.pp * p.cp * sizes["dp"] == p.etp * p.ep * p.pp * sizes["edp"] == p.nproc_per_node
    assert f"{spec.layers} layers" in megatron
    assert "dispatcher alltoall, recompute full" in megatron


def test_a_dry_run_shows_groups_update_and_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words("moonlight_16b_8gpu", "--dry-run")) == 0
    shown = capsys.readouterr().out.splitlines()
    heads = [line.split()[0] for line in shown]
    assert heads == ["model", "trainer", "engines", "run", "groups", "megatron", "sync", "start", "engine", "nothing"]
    start = shown[heads.index("start")]
    assert "torchrun --standalone --nproc-per-node=4 -m moerl.train @" in start
    assert "--dry-run" not in start
    assert "--tp-size 1" in shown[heads.index("engine")]
    assert "127.681 GB, 1.000 of the minimum" in shown[heads.index("sync")]


def test_ranks_of_several_machines_meet_at_the_first() -> None:
    found = trainer_command(64, ["@", "c.toml", "--dry-run"])
    assert found[:3] == ["torchrun", "--nnodes=8", "--node-rank=NUMBER"]
    assert found[-5:] == ["--nproc-per-node=8", "-m", "moerl.train", "@", "c.toml"]


def test_what_megatron_refuses_is_refused_before_anything_starts() -> None:
    config = load_config(words("moonlight_16b_8gpu", "--megatron.recompute_method", "none"))
    with pytest.raises(ConfigError, match="Megatron refuses these settings"):
        preview(config, read_spec(config.model.path), [])
