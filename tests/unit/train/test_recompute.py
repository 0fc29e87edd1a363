"""Captures made afterwards: the weights of a folder or of a checkpoint on recorded rollouts, and what is refused before anything starts."""

import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.config.schema import Config
from moerl.config.show import to_toml
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ConfigError, RolloutError
from moerl.report import capture as recording
from moerl.rollout import store
from moerl.rollout.sample import Group, Sample
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace
from moerl.train.batch import cut, pack
from moerl.train.objective import group_advantages
from moerl.train.recompute import Request, fitting, main, recompute, version_of
from moerl.train.samples import sequences
from tests.unit.routing.routes import random_ids

LAYOUT = Layout((1, 2), 8, 2)


def sample(number: int, version: int) -> Sample:
    rng, rows = np.random.default_rng(number), 8 + number
    tokens = rng.integers(3, 16, rows + 1)
    trace = Trace.of(random_ids(number, rows, 2, 8, 2), LAYOUT, tokens[:-1], [VersionRun(version, 0, rows)])
    logprobs = rng.uniform(-4, -1, rows - 2).astype("<f4").tobytes()
    runs = [(version, 0, rows - 2)]
    return Sample(
        number // 2, number % 2, tokens[:3].tolist(), tokens[3:].tolist(), logprobs, trace.to_bytes(), runs, "", "stop", 0, number / 4
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder of three recorded steps without captures, with version 1 of the weights as a checkpoint and as an export."""
    from moerl.train import megatron, trainer
    from moerl.train.progress import Progress

    root = tmp_path_factory.mktemp("recompute")
    hf = tiny_config(hidden=32, layers=3, experts=8, topk=2, groups=4, group_topk=2, expert_width=16, initializer_range=0.2)
    spec = write_tiny(root / "model", hf, seed=4)
    folder = root / "run"
    train = {"dtype": "float32", "device": "cpu", "lr": 1e-2, "tokens_per_microbatch": 64, "steps": 1}
    config = Config(
        model={"path": str(root / "model")}, train=train, run={"dir": str(folder)}, rollout={"max_prompt_tokens": 16, "max_new_tokens": 16}
    )
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config, comments=False))
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    for step in range(3):
        groups = [Group(prompt, "", [sample(2 * prompt + index, step) for index in range(2)]) for prompt in range(2)]
        if step == 1:
            groups.append(Group(2, "", [sample(4, 0), sample(5, 0)]))  # as a run with a lag trains
        store.save_step(folder / "rollouts", step, groups, store.make_header(root / "model", step=step, version=step))
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    built = trainer.build(config, spec, ranks)
    items, _ = sequences([Group(0, "", [sample(0, 0), sample(1, 0)])], LAYOUT, group_advantages(config.objective), config.replay)
    micro = pack(items, tokens_per_microbatch=64, dp=1, layout=LAYOUT)[0]
    trainer.train_step(built, [cut(one, built.place) for one in micro], 0, lambda name: nullcontext())
    from moerl.train import checkpoint, export  # import Megatron, which must find the platform ready

    checkpoint.save(folder / "checkpoints", Progress(1, 1, 4), built.model, built.optimizer, config, spec)
    export.export_hf(folder / "export", root / "model", built.model, spec, ranks, dtype=torch.float32)
    megatron.shutdown()
    return folder


def columns(path: Path) -> dict[str, np.ndarray]:
    rows = recording.concatenate(recording.read(path))
    return {entry.name: getattr(rows, entry.name) for entry in fields(rows)}


def test_a_folder_and_a_checkpoint_of_one_version_give_the_same_capture_of_its_step(run, tmp_path):
    found = {}
    for name, folder in (("folder", run / "export"), ("checkpoint", run / "checkpoints" / "step-000001")):
        (figures,) = recompute(Request(run, folder, tmp_path / name))
        assert (figures["step"], figures["version"], figures["capture_rows"]) == (1, 1, 8 + 9 + 10 + 11)
        assert 0 < figures["tokens_with_flip"] <= 1
        assert len(figures["flip_share_by_layer"]) == 2
        (path,) = recording.list_steps(tmp_path / name).values()
        meta = recording.read_meta(path)
        assert (meta.step, meta.trainer_version, meta.source, meta.topk) == (1, 1, "recompute", 2)
        assert set(recording.read_biases(path)) == {"trainer_bias"}
        found[name] = columns(path)
    for name, column in found["folder"].items():
        assert np.array_equal(column, found["checkpoint"][name], equal_nan=column.dtype.kind == "f"), name
    natural, replay = (found["folder"][f"{side}_logprob"][found["folder"]["response"]] for side in ("natural", "replay"))
    assert np.isfinite(natural).all()
    assert np.abs(natural - replay).max() > 1e-3


def test_steps_that_are_named_are_computed_whatever_generated_them(run, tmp_path):
    settings = ("--diagnostics.capture_tokens", "40", "--rollout.max_new_tokens", "8")
    request = Request(run, run.parent / "model", tmp_path, steps=(0, 2), version=9, settings=settings)
    found = list(recompute(request))
    assert [(figures["step"], figures["version"]) for figures in found] == [(0, 9), (2, 9)]
    assert all(8 <= figures["capture_rows"] <= 40 for figures in found)
    for step, path in recording.list_steps(tmp_path).items():
        assert (recording.read_meta(path).trainer_version, *set(columns(path)["version"].tolist())) == (9, step)


def test_samples_of_older_versions_are_left_out_unless_their_step_is_named(run, tmp_path):
    for steps, versions in ((None, {1}), ((1,), {0, 1})):
        (figures,) = recompute(Request(run, run / "export", tmp_path, steps))
        assert figures["step"] == 1
        (path,) = recording.list_steps(tmp_path).values()
        assert set(columns(path)["version"].tolist()) == versions


def test_which_steps_a_version_generated(run, tmp_path):
    expected = store.make_header(run.parent / "model", step=0, version=1)
    assert fitting(run / "rollouts", expected) == (1,)
    with pytest.raises(RolloutError, match=r"generated by version 7.*steps 0 to 2.*--steps"):
        fitting(run / "rollouts", store.make_header(run.parent / "model", step=0, version=7))
    groups = [Group(0, "", [sample(0, 1), sample(1, 1)])]
    for step in range(3):
        store.save_step(tmp_path, step, groups, store.make_header(run.parent / "model", step=step, version=1))
    assert fitting(tmp_path, expected) == (0, 1, 2), "a run that only generated has one version"


def test_the_version_is_what_folders_say(run, tmp_path):
    places = {run.parent / "model": 0, run / "checkpoints" / "step-000001": 1, run / "export": 1}
    assert {folder: version_of(Request(run, folder, tmp_path)) for folder in places} == places
    write_tiny(tmp_path / "other", tiny_config(layers=3), seed=1)
    with pytest.raises(ConfigError, match="does not say which version"):
        version_of(Request(run, tmp_path / "other", tmp_path))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{run}", "--checkpoint", "{tmp}"], 1, "holds no weights"),
        (["{tmp}", "--checkpoint", "{model}"], 2, "no config.toml"),
        (["{run}", "--checkpoint", "{model}", "--diagnostics.capture_tokens", "3"], 2, "may not hold one whole sample"),
        (["{run}", "--checkpoint", "{model}", "--train.stesp", "3"], 2, "train.steps"),
    ],
)
def test_what_cannot_be_computed_is_one_sentence(run, tmp_path, capsys, arguments, status, words):
    places = {"run": run, "tmp": tmp_path, "model": run.parent / "model"}
    assert main([argument.format(**places) for argument in arguments]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert words in said.err
