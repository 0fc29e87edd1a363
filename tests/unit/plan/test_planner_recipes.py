"""recipes/README.md shows what the planner prints for the settings in configs/, and every recipe names settings that are there."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from moerl.config.load import load_config
from tests.unit.models import published

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("recipes_table", ROOT / "recipes" / "table.py")
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)

README = table.README.read_text()
CLUSTER = (ROOT / "recipes" / "cluster.sh").read_text()
SCRIPTS = sorted((ROOT / "recipes").glob("*.sh"))


@pytest.mark.parametrize("job", table.JOBS)
def test_the_row_is_what_the_planner_prints(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert table.row(job) in README.splitlines()
    assert " ".join(table.words(job)) in README


def test_every_settings_file_of_a_cluster_is_in_the_table() -> None:
    assert {file.stem for file in (ROOT / "configs").glob("*.toml")} - {"tiny_cpu"} == set(table.JOBS)


@pytest.mark.parametrize("model", sorted({model for model, _ in table.JOBS.values()}))
def test_models_are_planned_with_their_published_configuration(model: str) -> None:
    found = json.loads((ROOT / "configs" / "models" / model / "config.json").read_text())
    assert found == published.config(model)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_recipe_is_valid_bash_with_settings_that_exist_and_is_explained(script: Path) -> None:
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 25
    for file in re.findall(r"configs/\w+\.toml", text):
        assert (ROOT / file).is_file()
    assert script.name in README


@pytest.mark.parametrize("job", table.JOBS)
def test_machines_of_a_recipe_are_those_of_its_settings(job: str) -> None:
    settings = load_config(["@", str(ROOT / "configs" / f"{job}.toml")])
    text = (ROOT / "recipes" / f"{job}.sh").read_text()
    parallel, engines = settings.parallel, settings.engine.count * settings.engine.tp
    if machines := re.search(r"TRAINER_NODES=(\d+)", text):
        assert int(machines[1]) == parallel.nodes > 1
        assert f"--nproc-per-node={parallel.nproc_per_node} " in CLUSTER
        assert f"# {parallel.nodes + engines // 8} machines of 8 GPUs: the first {parallel.nodes} train, {engines // 8} run engines" in text
    else:
        assert parallel.nodes == 1
        assert parallel.nproc_per_node + engines == 8
