"""What a checkpoint says of its run, read without torch: how far it got, and whether a config continues it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.config.schema import Config
from moerl.errors import CheckpointError
from moerl.models import ModelSpec

# Settings that may differ between the saved run and the resumed one: where and how fast it runs, not what it computes.
_FREE_SECTIONS = ("run", "engine", "sync", "checkpoint", "diagnostics", "observe", "require", "parallel", "sglang")
_FREE_SETTINGS = {"train.threads", "train.device", "train.tokens_per_microbatch", "model.path", "model.megatron_checkpoint", "rollout.save"}


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `step` completed steps.

    Attributes:
        version: weight version of the trainer.
        position: prompts taken from the training set so far.
    """

    step: int
    version: int
    position: int


@dataclass(frozen=True)
class Resume:
    """A checkpoint to continue. `same_layout`: written by the same rank layout, so RNG states fit too."""

    folder: Path
    progress: Progress
    same_layout: bool


def available(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def find(folder: Path, config: Config, spec: ModelSpec, world: int) -> Resume:
    """The newest checkpoint in `folder`, if `config` continues the run that wrote it.

    Raises:
        CheckpointError: nothing to resume, or settings differ that change what is computed (all of them are listed).
    """
    found = available(folder)
    if not found:
        raise CheckpointError(f"--resume: no checkpoint in {folder}; start without --resume, or set run.dir to the run to continue")
    state = json.loads((found[-1] / "state.json").read_text())
    saved, now = state["settings"], settings_that_matter(config, spec)
    changed = [f"{key}: saved {saved.get(key)!r}, now {now.get(key)!r}" for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    before, after = state["ranks"]["ep"], config.parallel.ep
    if before != after and 1 in (before, after):
        changed.append(f"parallel.ep: saved {before}, now {after} (optimizer state cannot move between ep = 1 and ep > 1)")
    if changed:
        raise CheckpointError(
            f"--resume: {found[-1]} was written by a run with other settings; set them back, or start a new run.dir:\n"
            + "\n".join(f"  - {line}" for line in changed)
        )
    return Resume(found[-1], Progress(**state["progress"]), state["ranks"] == rank_layout(config, world))


def settings_that_matter(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Flat `section.key -> value` of everything that changes what a run computes, JSON-ready."""
    # with a decaying learning rate the number of steps shapes every step; otherwise a run may simply go on for longer
    free = _FREE_SETTINGS if config.train.lr_final_ratio != 1.0 else _FREE_SETTINGS | {"train.steps"}
    flat = {"model": spec.family, "model.layers": spec.layers, "model.experts": spec.experts, "model.hidden_size": spec.hidden_size}
    flat["run.seed"] = config.run.seed
    for section, values in config.model_dump(mode="json").items():
        if section not in _FREE_SECTIONS:
            flat |= {f"{section}.{key}": value for key, value in values.items()}
    return {key: value for key, value in flat.items() if key not in free}


def rank_layout(config: Config, world: int) -> dict[str, int]:
    """Sizes of the process groups, with the number of ranks."""
    return {**{name: getattr(config.parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}, "world": world}
