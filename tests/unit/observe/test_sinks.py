"""Metric sinks: JSON lines, TensorBoard files, trackers (stand-ins for their packages), and absent packages."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.observe.sinks import JsonLines, Sinks, TensorBoard, open_sinks, plain


def config(**observe: Any) -> Config:
    return Config(model={"path": "m"}, observe=observe)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Tracker(ModuleType):
    """Takes the place of the wandb or trackio package."""

    def __init__(self, name: str, *, broken: bool = False):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.calls: list[tuple] = []
        self.broken = broken

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, metrics: dict, step: int) -> None:
        self.calls.append(("log", metrics, step))
        if self.broken:
            raise ConnectionError("service down")

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    module = Tracker(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_one_line_per_step_written_at_once(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path / "run", config())
    sinks.log(0, {"reward": 0.5, "phase": "train"})
    sinks.log(1, {"reward": np.float32(0.25), "load": np.arange(3), "nested": {"a": 1}})
    assert lines(tmp_path / "run") == [
        {"step": 0, "reward": 0.5, "phase": "train"},
        {"step": 1, "reward": 0.25, "load": [0, 1, 2], "nested": {"a": 1}},
    ]
    sinks.close()


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, config())
    sinks.log(0, {"a": math.nan, "b": [1.0, math.inf], "c": np.float64("nan")})
    sinks.close()
    assert lines(tmp_path) == [{"step": 0, "a": None, "b": [1.0, None], "c": None}]


def test_a_metric_that_json_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="a metric must be a number, text, list or table of them, got object"):
        plain({"a": object()})


def test_continuing_drops_steps_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(4):
        sink.log(step, {"x": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x')
    sink = JsonLines(tmp_path / "metrics.jsonl", first_step=2)
    sink.log(2, {"x": 20})
    sink.close()
    assert lines(tmp_path) == [{"step": 0, "x": 0}, {"step": 1, "x": 1}, {"step": 2, "x": 20}]


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    for _ in range(2):
        sinks = open_sinks(tmp_path, config())
        sinks.log(0, {"x": 1})
        sinks.close()
    assert len(lines(tmp_path)) == 1


def test_tensorboard_file_holds_the_scalars(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sinks = open_sinks(tmp_path, config(tensorboard=True))
    sinks.log(3, {"reward": 0.5, "note": "text", "load": [1, 2], "bad": math.nan})
    sinks.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in loader.LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert [(event.step, [(value.tag, value.simple_value) for value in event.summary.value]) for event in events] == [
        (3, [("reward", 0.5)])
    ]
    assert "torch" not in TensorBoard.__module__


@pytest.mark.parametrize("tracker", ["wandb", "trackio"], indirect=True)
def test_trackers_get_settings_and_scalars(tmp_path: Path, tracker: Tracker) -> None:
    sinks = open_sinks(tmp_path / "run-a", config(**{f"{tracker.__name__}_project": "p"}))
    sinks.log(1, {"reward": 0.5, "load": [1]})
    sinks.close()
    (_, options), *rest = tracker.calls
    assert (options["project"], options["name"], options["config"]["train"]["steps"]) == ("p", "run-a", 100)
    assert rest == [("log", {"reward": 0.5}, 1), ("finish",)]


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, tracker: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    tracker.broken = True
    sinks = open_sinks(tmp_path, config(wandb_project="p"))
    for step in range(3):
        sinks.log(step, {"x": 1})
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert "failed at step 0 and gets no further metrics" in caplog.text
    assert sum(call[0] == "log" for call in tracker.calls) == 1


def test_the_main_sink_that_fails_does_end_the_run() -> None:
    class Full:
        def log(self, step: int, metrics: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None: ...

    with pytest.raises(OSError, match="disk full"):
        Sinks([Full()]).log(0, {})


def test_a_sink_whose_package_is_absent_is_a_config_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="observe.wandb_project needs the package wandb, .* pip install wandb"):
        open_sinks(tmp_path / "run", config(wandb_project="p"))
    assert not (tmp_path / "run").exists()
