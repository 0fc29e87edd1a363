"""The planner's memory of a layer for multi-token prediction, against what Megatron holds with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_glm4_config, write_tiny
from moerl.models import FAMILIES
from moerl.plan import trainer
from moerl.plan.assumptions import Assumptions
from moerl.plan.estimate import job_of, plan_sync
from moerl.plan.holdings import check_holdings
from moerl.train.meta import build_rank
from tests.unit.plan.test_planner_memory import bytes_held

CONFIGS = {"deepseek_v3": tiny_config(mtp=True), "glm4_moe": tiny_glm4_config(mtp=True)}
MODES = ("passed_through", "frozen", "trained")


def config_of(mtp: str, path: str = "unused", **parallel: int) -> Config:
    return Config(model={"path": path}, train={"dtype": "bfloat16", "device": "cpu", "mtp": mtp}, parallel=parallel)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("mtp", MODES)
def test_weights_gradients_and_optimizer_are_what_megatron_holds(mtp: str, family: str, tmp_path: Path) -> None:
    spec, config = write_tiny(tmp_path, CONFIGS[family], seed=1), config_of(mtp, str(tmp_path))
    measured = bytes_held(spec, config, 1)
    job = job_of(config, spec, 1, Assumptions())
    (parts,) = trainer.stage_memory(spec, job.trainer, trainer.training_of(config, job.assumptions))
    assert parts["weights"] == pytest.approx(measured.weights, rel=0.001)
    assert parts["gradients"] == pytest.approx(measured.gradients, rel=0.05)
    assert parts["optimizer"] == pytest.approx(measured.optimizer, rel=0.05)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2, "tp": 2}, {"pp": 2, "vpp": 2, "cp": 2}], ids=str)
def test_every_stage_holds_what_the_plan_says(family: str, sizes: dict[str, int]) -> None:
    spec, config = FAMILIES[family].spec(CONFIGS[family]), config_of("frozen", **sizes)
    job = job_of(config, spec, 8, Assumptions())
    check_holdings(spec, job.trainer, 2, [build_rank(spec, config, rank, 8) for rank in (0, 7)])


@pytest.mark.parametrize("family", CONFIGS)
def test_only_the_last_stage_pays_and_updates_cost_the_same(family: str) -> None:
    spec, found, syncs = FAMILIES[family].spec(CONFIGS[family]), {}, {}
    for mtp in MODES:
        config = config_of(mtp, pp=2, tp=2, ep=2)
        job = job_of(config, spec, 8, Assumptions())
        found[mtp] = trainer.stage_memory(spec, job.trainer, replace(trainer.training_of(config, job.assumptions), reference=True))
        syncs[mtp] = plan_sync(job)[0].bytes_total
    (first, last), (_, frozen), (other, trained) = (found[mtp] for mtp in MODES)
    assert first == found["frozen"][0] == other
    assert frozen == {**last, "weights": frozen["weights"]}, "a frozen layer is never run, and the reference has none"
    assert frozen["weights"] == trained["weights"] > last["weights"]
    assert all(trained[part] > last[part] for part in ("gradients", "optimizer", "activations", "head"))
    assert len(set(syncs.values())) == 1
