"""What a step leaves behind: its line, its alarms on the console and in the log, and their number in the metrics; and what is trained."""

import io
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from moerl.config.schema import Config
from moerl.observe.console import RunConsole
from moerl.observe.timer import PhaseTimer
from moerl.rollout.sample import Group, Sample
from moerl.train import platform
from moerl.train.progress import Progress

EQUAL = {"reward": 1.0, "loss": 0.0, "uniform_groups_share": 1.0}


@pytest.fixture
def written():
    return []


@pytest.fixture
def run(written):
    platform.install("cpu")
    from moerl.train.run import Run

    config = Config(model={"path": "m"}, observe={"alarm_every_steps": 2})
    console = RunConsole(4, console=Console(file=io.StringIO(), width=1000))
    sinks = SimpleNamespace(log=lambda step, metrics: written.append(metrics))
    return Run(config, None, None, None, None, None, Progress(1, 1, 4), [], PhaseTimer(), console, sinks, 0.0)


def test_an_alarm_is_counted_at_every_step_and_shown_every_so_many(run, written, caplog):
    with caplog.at_level(logging.WARNING, logger="moerl"):
        for step in range(3):
            run.log(step, EQUAL)
        run.log(3, {**EQUAL, "uniform_groups_share": 0.5})
    lines = run.console._console.file.getvalue().splitlines()
    sentence = "every group of this step has equal rewards (mean 1): it teaches nothing"
    assert ["step" if line.startswith("step") else line.split(";")[0] for line in lines] == [
        "step", f"  alarm: {sentence}", "step", "step", f"  alarm: {sentence}", "step"
    ]  # fmt: skip
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [f"step 0: {sentence}", f"step 2: {sentence}"]
    assert [metrics["alarms"] for metrics in written] == [1, 1, 1, 0]


def test_rewards_are_shaped_before_they_are_compared(run, monkeypatch):
    from moerl.train import loop

    seen = []
    monkeypatch.setattr(loop, "sequences", lambda groups, *_, **__: (seen.extend(groups), ([], {"masked_share": 0.0}))[1])
    monkeypatch.setattr(loop, "pack", lambda *_, **__: [])
    monkeypatch.setattr(loop, "dist", SimpleNamespace(scatter_object_list=lambda *_, **__: None))
    ranks = SimpleNamespace(sequence_multiple=1, microbatch_multiple=1, dp=(0, 1), pp=(0, 1))
    run.trainer = SimpleNamespace(layout=None, ranks=ranks)
    run.config = Config(model={"path": "m"}, rollout={"max_new_tokens": 10}, objective={"overlong_margin_tokens": 4})
    samples = [Sample(0, i, [1], [2] * length, b"", b"", [], "", "stop", reward=1.0) for i, length in enumerate((6, 8, 10))]
    _, fates = loop.share(run, [Group(0, "", samples)])
    np.testing.assert_array_equal([sample.reward for sample in seen[0].samples], [1.0, 0.5, 0.0])
    assert fates == {"masked_share": 0.0, "overlong_penalty": -0.5, "uniform_shaped_share": 0.0}
