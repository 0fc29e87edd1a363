"""A run as its own records tell it: `metrics.jsonl`, `config.json` and `summary.json` of a run folder. numpy only.

    metrics.jsonl  --read_run-->  Overview  --trend-->  at most so many points, each with its mean and spread

Invariants: a step that was run again after a resume counts once, with its last record; a last line that a crash cut short is
left out; a figure that a step has not measured is NaN there.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from moerl.config.schema import Config
from moerl.errors import ReportError
from moerl.observe.alarms import alarms

MOST_POINTS = 200
"""Steps that a curve shows one by one; more of them are drawn in bins."""


@dataclass(frozen=True)
class Fault:
    """One kind of thing that went wrong, over all steps that it happened in.

    Attributes:
        steps: those steps, ascending.
        text: what it means and which setting to change, as of the last of them.
    """

    kind: str
    steps: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Overview:
    """Attributes:
    name: the run folder, as it was given.
    records: one per training step, ascending; what was measured before the first step is in `before`.
    config: None where config.json is missing or of another version of moerl, which `config_problem` says.
    summary: what the run wrote at its end; empty if it has not ended.
    """

    name: str
    records: tuple[Mapping[str, Any], ...]
    before: Mapping[str, Any]
    config: Config | None
    config_problem: str
    summary: Mapping[str, Any]
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> np.ndarray:
        """int64[n], ascending."""
        return np.array([record["step"] for record in self.records], np.int64)

    def column(self, name: str) -> np.ndarray:
        """A metric of all steps: float64[n], NaN where it was not measured."""
        return np.array([as_float(record[name]) if name in record else math.nan for record in self.records], np.float64)

    def names(self, pattern: str) -> list[str]:
        """Metrics whose whole name matches, in the order of their numbers or of their first appearance."""
        found = {name: None for record in self.records for name in record if re.fullmatch(pattern, name)}
        return sorted(found, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])

    def measured(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())


@dataclass(frozen=True)
class Trend:
    """A curve, in bins of whole steps where there are many.

    Attributes:
        first, last: int64[m] steps that a bin covers.
        mean, low, high: float64[m] of what was measured in them; NaN where nothing was.
    """

    first: np.ndarray
    last: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def middle(self) -> np.ndarray:
        """float64[m]"""
        return (self.first + self.last) / 2

    @property
    def binned(self) -> bool:
        return bool((self.last > self.first).any())


def read_run(run: str | Path) -> Overview:
    """What a run folder records of its steps.

    Raises:
        ReportError: the folder or its metrics are missing or cannot be read.
    """
    run = Path(run)
    if not run.is_dir():
        raise ReportError(f"run folder {run} does not exist; give the folder that run.dir named")
    records = _records(run / "metrics.jsonl")
    config, problem = _config(run / "config.json")
    steps = tuple(record for record in records if record["step"] >= 0)
    before = next((record for record in records if record["step"] < 0), {})
    return Overview(str(run), steps, before, config, problem, _json(run / "summary.json") or {}, tuple(_faults(steps, config)))


def trend(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> Trend:
    """Put a curve into at most `most` bins of equally many steps.

    Args:
        steps: int64[n], ascending.
        values: float64[n], NaN where not measured.
    """
    size = max(1, math.ceil(len(steps) / most))
    starts = np.arange(0, len(steps), size)
    ends = np.minimum(starts + size, len(steps)) - 1
    known = np.isfinite(values)
    count = np.add.reduceat(known, starts, dtype=np.int64) if len(steps) else np.zeros(0, np.int64)

    def over(reduce: np.ufunc, missing: float) -> np.ndarray:
        found = reduce.reduceat(np.where(known, values, missing), starts) if len(steps) else np.zeros(0)
        return np.where(count > 0, found, math.nan)

    mean = over(np.add, 0.0) / np.maximum(1, count)
    return Trend(steps[starts], steps[ends], mean, over(np.minimum, math.inf), over(np.maximum, -math.inf))


def as_float(value: Any) -> float:
    """A figure as a float; NaN for what is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found: dict[int, dict[str, Any]] = {}
    for index, line in enumerate(lines, 1):
        if not line.endswith("\n") or not line.strip():
            continue
        try:
            record = json.loads(line)
            found[int(record["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(
                f'{path}, line {index}: expected a JSON object with a whole number "step", got {line.strip()[:80]!r} '
                f"({type(error).__name__}: {error}); remove the line if you know why it is there"
            ) from error
    return [found[step] for step in sorted(found)]


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error


def _config(path: Path) -> tuple[Config | None, str]:
    tree = _json(path)
    if tree is None:
        return None, f"{path.name} is missing, so settings and what alarms advise are left out"
    try:
        return Config.model_validate(tree), ""
    except ValidationError as error:
        return None, f"{path.name} is of another version of moerl ({error.error_count()} settings differ), so settings are left out"


def _faults(records: Sequence[Mapping[str, Any]], config: Config | None) -> Iterator[Fault]:
    """What raised an alarm, and engines that served something else than was pushed; most steps first."""
    steps: dict[str, list[int]] = defaultdict(list)
    texts: dict[str, str] = {}
    for record in records:
        found = alarms(record, config) if config is not None else {}
        if record.get("versions_consistent") is False:
            served = f"engines served versions {record.get('engine_versions')} after the update to {record.get('version')}"
            found = {"versions": f"{served}, or other bytes than were sent; look for the push in logs/", **found}
        for kind, text in found.items():
            steps[kind].append(record["step"])
            texts[kind] = text
    for kind in sorted(steps, key=lambda kind: (kind != "versions", -len(steps[kind]))):
        yield Fault(kind, tuple(steps[kind]), texts[kind])
