"""Resuming refuses when there is nothing to resume or when the config would make another run of it."""

import json
from pathlib import Path

import pytest

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config
from moerl.errors import CheckpointError
from moerl.models import ModelSpec, read_spec
from moerl.train import progress


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return read_spec(tmp_path)


def config(**sections: dict[str, object]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections})


def write(folder: Path, step: int, spec: ModelSpec, saved: Config, world: int = 1) -> None:
    target = folder / f"step-{step:06d}"
    target.mkdir(parents=True)
    state = {
        "progress": {"step": step, "version": step, "position": 16 * step},
        "settings": progress.settings_that_matter(saved, spec),
        "ranks": progress.rank_layout(saved, world),
    }
    (target / "state.json").write_text(json.dumps(state))


def test_nothing_to_resume(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        progress.find(tmp_path, config(), spec, 1)


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path, spec: ModelSpec) -> None:
    (tmp_path / ".writing-step-000009").mkdir()
    (tmp_path / "step-000010").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        progress.find(tmp_path, config(), spec, 1)


def test_the_newest_is_found(tmp_path: Path, spec: ModelSpec) -> None:
    for step in (2, 10):
        write(tmp_path, step, spec, config())
    found = progress.find(tmp_path, config(engine={"count": 2}, train={"steps": 500}), spec, 1)
    assert found.progress == progress.Progress(10, 10, 160)
    assert found.same_layout
    assert not progress.find(tmp_path, config(), spec, 2).same_layout


def test_settings_that_matter_are_all_listed(tmp_path: Path, spec: ModelSpec) -> None:
    write(tmp_path, 2, spec, config())
    changed = config(rollout={"group_size": 4}, objective={"correction": "icepop"}, parallel={"ep": 2})
    with pytest.raises(CheckpointError, match=r"(?s)objective.correction: saved 'tis', now 'icepop'.*rollout.group_size.*parallel.ep"):
        progress.find(tmp_path, changed, spec, 2)


def test_the_number_of_steps_matters_only_with_a_decaying_rate(tmp_path: Path, spec: ModelSpec) -> None:
    write(tmp_path, 2, spec, config(train={"lr_final_ratio": 0.1, "steps": 10}))
    with pytest.raises(CheckpointError, match=r"train\.steps: saved 10, now 20"):
        progress.find(tmp_path, config(train={"lr_final_ratio": 0.1, "steps": 20}), spec, 1)
