"""From recordings to one object of builtins: what `moerl report --json` prints and the page draws.

One pass over the row groups; what is held is sums per layer, expert, position, version, token and sample, never rows.

    Rows --prepare--> Chunk --> Gap, Flips, Causes, Shifts, Cost, Soundness --> report --> findings
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.capture import MODES, Meta, Rows
from moerl.report.causes import Causes, bias_differences
from moerl.report.chunk import chunks
from moerl.report.cost import Cost, add_texts
from moerl.report.evidence import Evidence
from moerl.report.findings import findings
from moerl.report.flips import Flips
from moerl.report.gap import Gap, column
from moerl.report.shifts import Shifts
from moerl.report.soundness import Soundness, empty
from moerl.report.stats import finite, share
from moerl.report.text import decoder

SCHEMA = 1


class Analysis:
    """All parts of the report over all steps.

    Args:
        metas: of every step; they must agree in layers, experts and top-k.

    Raises:
        ReportError: they do not, or there are none.
    """

    def __init__(self, metas: list[Meta]) -> None:
        if not metas:
            raise ReportError("there is nothing to report on: expected at least one recorded step")
        self.metas = metas
        self.meta = metas[0]
        layouts = {(meta.layers, meta.experts, meta.topk): meta.step for meta in metas}
        if len(layouts) > 1:
            found = "; ".join(f"step {step}: {len(a)} MoE layers, {b} experts, top-{c}" for (a, b, c), step in layouts.items())
            raise ReportError(f"the steps were recorded from different models, which one report cannot join: {found}")
        self.gap = Gap()
        self.flips, self.causes, self.shifts, self.cost, self.soundness = (
            part(self.meta) for part in (Flips, Causes, Shifts, Cost, Soundness)
        )
        self.bias: list[dict[str, Any]] = []
        self.bias_by_layer: dict[int, float] = {}
        self.two_sides = False

    def add_step(self, meta: Meta, parts: Iterable[Rows], biases: Mapping[str, np.ndarray]) -> None:
        """Count all rows of a step."""
        newest = -1
        for chunk in chunks(meta, parts):
            zero = empty(chunk.rows.engine_ids, meta.topk)
            self.two_sides |= chunk.flipped is not None
            self.gap.add(chunk, zero.all(axis=1))
            self.soundness.add(chunk, zero)
            for part in (self.flips, self.causes, self.shifts, self.cost):
                part.add(chunk)
            newest = max(newest, int(chunk.rows.version.max(initial=-1)))
        self.gap.end_step(meta)
        self.shifts.end_step(meta.step)
        self.soundness.end_step(meta.step)
        layers = bias_differences(meta, dict(biases), newest if newest >= 0 else None)
        for entry in layers:
            self.bias_by_layer[entry["layer"]] = max(entry["max_diff"], self.bias_by_layer.get(entry["layer"]) or 0.0)
        if layers:
            self.bias.append(max(layers, key=lambda entry: entry["max_diff"]))
            self.bias += [entry for entry in layers if entry["max_diff"] > 1e-6 and entry is not self.bias[-1]]

    def result(self, name: str, *, kind: str = "run", sides: tuple[str, str] = ("engine", "trainer")) -> dict[str, Any]:
        """The report without texts: builtins only, numbers finite or None."""
        load = self.soundness.load
        gained, lost = self.causes.flow.sum(axis=0)
        causes = self.causes.result(load, self.bias, self.bias_by_layer)
        if causes is not None:
            causes |= self.shifts.result()
        parts = {
            "gap": self.gap.result(),
            "flips": self.flips.result(),
            "causes": causes,
            "cost": self.cost.result(self.gap),
            "soundness": self.soundness.result(load - gained + lost if self.two_sides else None),
        }
        report = {
            "schema": SCHEMA,
            "name": name,
            "kind": kind,
            "sides": [sides[0], sides[1] if self.two_sides else None],
            "meta": self._meta(),
            "against": None,
            **self._numbers(parts),
            **parts,
        }
        report["findings"] = [asdict(finding) for finding in findings(self._evidence(report))]
        return report

    def _meta(self) -> dict[str, Any]:
        meta = self.meta
        names = ("experts", "topk", "groups", "group_topk", "ep", "engine_ep", "trainer_dtype", "engine_dtype", "router_dtype", "model")
        return {
            "steps": [entry.step for entry in self.metas],
            "layers": list(meta.layers),
            **{name: getattr(meta, name) for name in names},
            "sources": sorted({entry.source for entry in self.metas}),
            "trainer_versions": sorted({entry.trainer_version for entry in self.metas if entry.trainer_version >= 0}),
            "engine_versions": sorted(version for version in self.soundness.versions if version >= 0),
        }

    def _numbers(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The numbers at the top, which gates can name."""
        modes, sound, flips, causes = parts["gap"]["modes"], parts["soundness"], parts["flips"], parts["causes"]
        rows, layers = self.soundness.rows, len(self.meta.layers)
        numbers: dict[str, Any] = {
            "rows": rows,
            "samples": self.soundness.samples,
            "tokens": max((found["tokens"] for found in modes.values() if found), default=0),
            "steps": len(self.metas),
        }
        for mode in MODES:
            found = modes[mode]
            for figure in ("kl", "k1", "abs_diff", "ess"):
                numbers[f"{figure}_{mode}"] = _value(found and found[figure])
            suffix = "" if mode == "natural" else f"_{mode}"
            numbers[f"extreme_share{suffix}"] = _value(found and found["extreme"]["2"])
            numbers[f"wide_share{suffix}"] = _value(found and found["extreme"]["1.2"])
        natural, replay = numbers["kl_natural"], numbers["kl_replay"]
        errors = [entry["score_error"] for entry in causes["by_layer"] if entry["score_error"] is not None] if causes else []
        engine = sound["engine"]["by_layer"]
        return numbers | {
            "replay_removes": 1 - replay / natural if natural and replay is not None else None,
            "flip_share": share(self.flips.flips.sum(), self.flips.rows * layers),
            "tokens_with_flip": share(self.flips.flipped_rows, self.flips.rows),
            "score_error": finite(np.median(errors)) if errors else None,
            "stale_share": share(sum(count for lag, count in self.soundness.lags.items() if lag > 0), rows),
            "zero_rows": sound["zero_rows"],
            "repeated_ids": sound["repeated_ids"],
            "dead_experts": sum(len(entry["dead"]) for entry in engine),
            "max_imbalance": max((entry["imbalance"] for entry in engine), default=None),
            "bad_logprobs": self.soundness.unusable,
            "flip_share_by_layer": [entry["share"] for entry in flips["by_layer"]] if flips else None,
        }

    def _evidence(self, report: dict[str, Any]) -> Evidence:
        layers = len(self.meta.layers)
        pieces = [column(sums, ("flips", "rows")) * (1, layers) for _, _, sums, _ in self.gap.steps]
        return Evidence(
            report=report,
            moved_layers=self.shifts.moved_layers() if self.two_sides else [],
            offsets=self.shifts.offsets,
            shifted=self.shifts.shifted,
            samples=self.shifts.samples,
            swapped=self.causes.swapped(self.soundness.load) if self.two_sides else [],
            layer_flips=self.causes.flows()[1].sum(axis=1),
            sample_flips=np.concatenate(pieces) if pieces and self.two_sides else np.zeros((0, 2)),
        )


def _value(figure: dict[str, Any] | None) -> float | None:
    return figure["value"] if figure else None


def report_run(run: str | Path) -> dict[str, Any]:
    """The report of a run folder, with texts where its tokenizer is at hand.

    Raises:
        ReportError: no recordings there, or they cannot be read.
    """
    files = recordings(run)
    analysis = Analysis([capture.read_meta(path) for path in files.values()])
    for meta, path in zip(analysis.metas, files.values(), strict=True):
        analysis.add_step(meta, capture.read(path), capture.read_biases(path))
    report = analysis.result(str(run))
    add_texts(report["cost"], files, decoder(analysis.meta.model, run))
    return report


def find_recordings(run: Path) -> dict[int, Path]:
    """As `recordings`, empty if there are none."""
    return capture.list_steps(run / capture.FOLDER) or capture.list_steps(run)


def recordings(run: str | Path) -> dict[int, Path]:
    """Step -> recording of a run folder (or of its `mismatch` folder).

    Raises:
        ReportError: there are none; says what is there and how to record.
    """
    run = Path(run)
    files = find_recordings(run)
    if files:
        return files
    if not run.is_dir():
        raise ReportError(f"{run} does not exist; expected the folder of a run")
    raise ReportError(
        f"{run} has no recordings in {capture.FOLDER}/; expected step-000001.parquet and so on. Train with "
        "--diagnostics.capture_every_steps 10, or bring records of another system with `moerl report --import`"
    )
