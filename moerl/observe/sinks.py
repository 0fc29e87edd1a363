"""Where metrics go: `metrics.jsonl` always, TensorBoard, Weights & Biases and trackio on request.

    {"reward/mean": 0.5, ...} per step  --Sinks.log-->  one JSON line, flushed; scalars to the others

Invariant: `metrics.jsonl` holds one object per step, in order, and is valid JSON: NaN and infinities become null.
"""

import importlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moerl.config.native import sink_problems
from moerl.config.schema import Config
from moerl.errors import ConfigError

log = logging.getLogger(__name__)


class Sink(Protocol):
    """One place for metrics."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_sinks(run_dir: Path, config: Config, *, first_step: int = 0) -> "Sinks":
    """Open all sinks that the config asks for.

    Args:
        run_dir: the run folder, made if missing.
        first_step: where this run begins. Lines of `metrics.jsonl` from that step on are from a run that did not get to its
            next checkpoint; they are dropped.

    Raises:
        ConfigError: a sink's package is not installed.
    """
    if problems := sink_problems(config.observe):
        raise ConfigError(problems)
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    observe, settings = config.observe, config.model_dump(mode="json")
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl", first_step)]
    if observe.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard"))
    if observe.wandb_project:
        sinks.append(Tracker("wandb", observe.wandb_project, run_dir.name, settings, dir=str(run_dir)))
    if observe.trackio_project:
        sinks.append(Tracker("trackio", observe.trackio_project, run_dir.name, settings))
    return Sinks(sinks)


class Sinks:
    """Several sinks as one. The first, `metrics.jsonl`, must work; another that fails is dropped with an error in the log."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics everywhere."""
        first, *others = self._sinks
        first.log(step, metrics)
        for sink in others:
            try:
                sink.log(step, metrics)
            except Exception:  # a tracking service that is down must not end a run
                log.exception("%s failed at step %d and gets no further metrics", type(sink).__name__, step)
                self._sinks.remove(sink)

    def close(self) -> None:
        while self._sinks:
            self._sinks.pop().close()


class JsonLines:
    """`{"step": n, ...}` per line, flushed after each."""

    def __init__(self, path: Path, first_step: int = 0):
        keep = [line for line in _lines(path) if json.loads(line)["step"] < first_step]
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(keep), encoding="utf-8")
        rewritten.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **plain(metrics)}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard events, written without torch."""

    def __init__(self, folder: Path):
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _scalars(metrics).items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Weights & Biases, or trackio, which has the same interface."""

    def __init__(self, package: str, project: str, name: str, settings: dict[str, Any], **options: Any):
        self._module = importlib.import_module(package)
        self._module.init(project=project, name=name, config=settings, **options)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._module.log(_scalars(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


def plain(value: Any) -> Any:
    """A value that JSON can hold: numpy and torch scalars and arrays become numbers and lists; NaN and infinities null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"a metric must be a number, text, list or table of them, got {type(value).__name__}")


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in plain(metrics).items() if isinstance(value, (int, float))}


def _lines(path: Path) -> list[str]:
    """Whole lines of an existing file: a last one that was cut short by a crash is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
