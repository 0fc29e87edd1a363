"""Whole runs of a model with a layer for multi-token prediction: engines that don't draft are served as ever, and nothing is lost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moerl.convert.tiny import tiny_config, write_tiny
from tests.system.run_harness import Finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AHEAD = "model.layers.3."
COPIES = {f"{AHEAD}embed_tokens.weight": "model.embed_tokens.weight", f"{AHEAD}shared_head.head.weight": "lm_head.weight"}
STAGES = ("--parallel.nproc_per_node", "2", "--parallel.pp", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("mtp") / "model"
    write_tiny(made, tiny_config(layers=3, experts=16, topk=4, groups=4, group_topk=2, mtp=True), seed=1)
    return made


@pytest.fixture(scope="module")
def run(moerl, folder) -> Callable[..., Finished]:
    def go(name: str, *arguments: str) -> Finished:
        finished = moerl(f"mtp-{name}", "--model.path", str(folder), *arguments)
        assert finished.status == 0, finished.output[-4000:]
        return finished

    return go


@pytest.fixture(scope="module")
def trained(run) -> Finished:
    return run("trained", "--train.mtp", "trained", "--sync.way", "direct", *STAGES)


def exported(finished: Finished) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights of the layer, all others), after a look at the copies and the config."""
    export = finished.folder / "export"
    assert json.loads((export / "config.json").read_text())["num_nextn_predict_layers"] == 1
    stored = load_file(export / "model.safetensors")
    assert all(torch.equal(stored.pop(copy), stored[of]) for copy, of in COPIES.items())
    ahead = {name: stored.pop(name) for name in list(stored) if name.startswith(AHEAD)}
    return ahead, stored


def started_with(folder: Path) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "model.safetensors")
    return {name: one for name, one in stored.items() if name.startswith(AHEAD) and name not in COPIES}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def steps(finished: Finished) -> list[dict[str, object]]:
    return [record for record in finished.metrics if record["step"] >= 0]


def test_engines_hold_what_was_sent_and_the_layer_learns(trained, folder):
    """Two stages, so that the embedding comes from another rank than the layer's."""
    assert [record["engine_versions"] for record in steps(trained)] == [[1], [2], [3], [4]]
    assert trained.summary["versions_consistent"]
    assert all(record["sync_way"] == "direct" for record in steps(trained))
    assert trained.summary["replay_agreement"] == 1.0
    assert all(1 < record["mtp_loss"] < 5 for record in steps(trained))
    ahead, before = exported(trained)[0], started_with(folder)
    assert ahead.keys() == before.keys()
    kept = {name for name in before if torch.equal(ahead[name], before[name]) and ".experts." not in name}
    assert kept == {f"{AHEAD}mlp.gate.e_score_correction_bias"}


def test_the_same_rollouts_without_it_give_the_same_policy(trained, run, folder):
    passed = run("passed", "--rollouts", str(trained.folder), *STAGES)
    for name in ("loss", "grad_norm", "entropy", "kl_replay", "kl_natural"):
        assert [record[name] for record in steps(passed)] == [record[name] for record in steps(trained)], name
    assert "mtp_loss" not in steps(passed)[0]
    ahead, others = exported(passed)
    assert equal(others, exported(trained)[1])
    assert equal(ahead, started_with(folder))


def test_it_is_continued_from_a_checkpoint(trained, run):
    """As it was: two steps from the middle give the bits that four steps gave."""
    rollouts = ("--rollouts", str(trained.folder), "--train.mtp", "trained", *STAGES)
    run("continued", *rollouts, "--train.steps", "2")
    resumed = run("continued", *rollouts, "--resume")
    for mine, other in zip(exported(resumed), exported(trained), strict=True):
        assert equal(mine, other)


def test_a_frozen_layer_and_the_way_that_gathers(run, folder):
    frozen = run("frozen", "--train.mtp", "frozen", "--sync.way", "compatible", "--train.steps", "2")
    assert frozen.summary["versions_consistent"]
    assert all(record["sync_way"] == "compatible" for record in steps(frozen))
    assert equal(exported(frozen)[0], started_with(folder))
