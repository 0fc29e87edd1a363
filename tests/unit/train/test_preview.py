"""`moerl train --dry-run`: Megatron accepts the settings of every file in configs/, and every process's command line is shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.config.schema import Parallel
from moerl.errors import ConfigError, ReshardError
from moerl.models import ModelSpec, read_spec
from moerl.plan import holdings
from moerl.plan.assumptions import assumptions_of
from moerl.plan.estimate import job_of
from moerl.plan.trainer import Elements, stage_elements
from moerl.reshard.trainer_layout import TrainerTopology
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
    job = job_of(config, spec, config.parallel.world, assumptions_of({}, config))
    groups, megatron = megatron_lines(config, spec, job)
    p, sizes = config.parallel, dict.fromkeys(("dp", "edp"), 0)
    sizes |= {word[: len(key)]: int(word[len(key) :]) for word in groups.split() for key in sizes if word.startswith(key)}
    assert p.tp * p.pp * p.cp * sizes["dp"] == p.etp * p.ep * p.pp * sizes["edp"] == p.world
    assert f"{spec.layers} layers" in megatron
    assert "dispatcher alltoall, recompute full" in megatron


def test_a_dry_run_shows_groups_update_and_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words("moonlight_16b_8gpu", "--dry-run")) == 0
    shown = capsys.readouterr().out.splitlines()
    heads = [line.split()[0] for line in shown]
    before, after = ["model", "trainer", "engines", "run", "groups", "megatron"], ["sync", "start", "engine", "nothing"]
    assert heads == [*before, "weights", "rank", "rank", *after]
    start = shown[heads.index("start")]
    assert "torchrun --standalone --nproc-per-node=4 -m moerl.train @" in start
    assert "--dry-run" not in start
    assert "--tp-size 1" in shown[heads.index("engine")]
    assert "127.681 GB, 1.000 of the minimum" in shown[heads.index("sync")]


def test_ranks_of_several_machines_meet_at_the_first() -> None:
    found = trainer_command(Parallel(nodes=3, nproc_per_node=4), ["@", "c.toml", "--dry-run"])
    assert found == [
        *("torchrun", "--nnodes=3", "--node-rank=NUMBER", "--master-addr=HOST", "--master-port=PORT", "--nproc-per-node=4"),
        *("-m", "moerl.train", "@", "c.toml"),
    ]


def test_several_machines_are_not_started_from_one(tmp_path: Path) -> None:
    start = "torchrun --nnodes=2 --node-rank=NUMBER .* --nproc-per-node=8 -m moerl.train @ "
    with pytest.raises(ConfigError, match=rf"parallel\.nodes 2: .* `{start}") as error:
        launch.main(words("qwen3_30b_32gpu", "--run.dir", str(tmp_path / "run")))
    assert "set parallel.nodes to 1" in str(error.value)


def test_a_launcher_with_another_number_of_ranks_is_refused() -> None:
    asked = words("qwen3_30b_32gpu")
    with pytest.raises(ConfigError, match="has started 8 trainer ranks"):
        launch.prepare(asked, started=8)
    assert launch.prepare(asked, started=16)[0].parallel.nodes == 2


def test_a_rank_that_does_not_hold_what_the_plan_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(spec: ModelSpec, topology: TrainerTopology) -> list[Elements]:
        return [replace(held, expert=held.expert + 7) for held in stage_elements(spec, topology)]

    monkeypatch.setattr(holdings, "stage_elements", wrong)
    config = load_config(words("moonlight_16b_8gpu"))
    with pytest.raises(ReshardError, match="in 4 points") as error:
        preview(config, read_spec(config.model.path), [])
    for rank in (0, 3):
        assert f"rank {rank}: elements of routed experts: " in str(error.value)


def test_an_engines_folder_that_is_elsewhere_is_said() -> None:
    config = load_config(words("moonlight_16b_8gpu", "--engine.model_path", "nowhere/fp8"))
    lines = preview(config, read_spec(config.model.path), [])
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert "engine.model_path nowhere/fp8 has no config.json here" in warning


def test_what_megatron_refuses_is_refused_before_anything_starts() -> None:
    config = load_config(words("moonlight_16b_8gpu", "--megatron.recompute_method", "none"))
    with pytest.raises(ConfigError, match="Megatron refuses these settings"):
        preview(config, read_spec(config.model.path), [])
