"""`moerl train` and `moerl rollout` from a plain shell: check everything that needs no process, then start the processes.

    moerl train @ c.toml  --checks-->  torchrun -m moerl.train @ c.toml  (rank 0 starts a local Ray, engines and rewards)

Nothing is started when a check fails. Ctrl-C reaches this process alone; it passes a SIGTERM on and waits for an orderly end,
after which no process of the run is left.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.models import ModelSpec, read_spec
from moerl.ports import free_port
from moerl.train import progress
from moerl.train.processes import no_process_left

_STOP_GRACE_S = 60.0


@dataclass(frozen=True)
class Options:
    """What the command line says beside the config."""

    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    rollouts: Path | None = None


def split_options(argv: list[str]) -> tuple[Options, list[str]]:
    """Separate `--dry-run`, `--resume`, `--overwrite` and `--rollouts DIR` from the settings."""
    flags, rest, rollouts = set(), [], None
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if word in ("--dry-run", "--resume", "--overwrite"):
            flags.add(word)
        elif name == "--rollouts":
            value = value or next(words, "")
            if not value:
                raise ConfigError("--rollouts needs the folder of a run, or of its rollouts/")
            rollouts = Path(value)
        else:
            rest.append(word)
    return Options("--dry-run" in flags, "--resume" in flags, "--overwrite" in flags, rollouts), rest


def prepare(argv: list[str], started: int | None = None) -> tuple[Config, ModelSpec, Options]:
    """Load the config and check all that needs no process.

    Args:
        started: number of trainer ranks that a launcher has started; None where none has.

    Raises:
        ConfigError, ModelError, CheckpointError: with every violation found.
    """
    options, rest = split_options(argv)
    config = load_config(rest, started=started)
    spec = read_spec(config.model.path)
    if problems := model_problems(config, spec):
        raise ConfigError(problems)
    run_dir = Path(config.run.dir)
    if options.resume:
        progress.find(run_dir / "checkpoints", config, spec, config.parallel.world)
    elif (run_dir / "metrics.jsonl").exists() and not options.overwrite:
        raise ConfigError(f"run.dir {run_dir} already holds a run; continue it with --resume, replace it with --overwrite, or change it")
    if options.rollouts is not None:
        recorded = rollout_folder(options.rollouts)
        if not options.resume and recorded.resolve() == (run_dir / "rollouts").resolve():
            raise ConfigError(f"--rollouts {options.rollouts} lies in run.dir, which a new run clears; choose another run.dir")
    return config, spec, options


def rollout_folder(path: Path) -> Path:
    """The folder with recorded steps: `path` itself or its `rollouts/`."""
    for folder in (path / "rollouts", path):
        if any(folder.glob("step-*.rollout")):
            return folder
    raise ConfigError(f"--rollouts {path}: no step-*.rollout in it or in its rollouts/; give the folder of a run with rollout.save = true")


def main(argv: list[str]) -> int:
    """`moerl train`: returns the exit status of the run."""
    config, spec, options = prepare(argv)
    if options.dry_run:
        from moerl.train.preview import preview

        print(describe(config, spec, preview(config, spec, argv)))
        return 0
    if config.parallel.nodes > 1:
        from moerl.train.preview import trainer_command

        raise ConfigError(
            f"parallel.nodes {config.parallel.nodes}: `moerl train` starts the ranks of one machine; on each of them run "
            f"`{shlex.join(trainer_command(config.parallel, argv))}`, or set parallel.nodes to 1"
        )
    return _torchrun(config, argv)


def make_tiny_main(argv: list[str]) -> int:
    """`tools/make_tiny.py [FAMILY] @ config.toml`: make, or reuse, the warm-started model that the config's `model.path` names."""
    from moerl.convert.tiny import FAMILIES

    family, rest = (argv[0], argv[1:]) if argv and argv[0][:1] not in "@-" else ("deepseek", argv)
    if family not in FAMILIES:
        raise ConfigError(f"there is no tiny model of {family!r}; expected one of {', '.join(FAMILIES)}")
    config = load_config(rest)
    from moerl.train import platform

    platform.quiet()
    platform.install(platform.pick_device(config.train.device))
    from moerl.train.warmstart import make_tiny

    result = make_tiny(config, family=family)
    how = "reused" if result["cached"] else f"made in {result['seconds']:.0f} s ({result['steps']} steps)"
    print(f"{config.model.path}: {how}; held-out accuracy {result['greedy']:.2f} greedy, {result['sampled']:.2f} sampled")
    return 0


def rollout_main(argv: list[str]) -> int:
    """`moerl rollout`: generate and record only, with the engines alone."""
    config, spec, options = prepare(argv)
    if options.dry_run:
        print(describe(config, spec))
        return 0
    from moerl.train.record import record

    with no_process_left():
        record(config, spec)
    return 0


def describe(config: Config, spec: ModelSpec, details: Sequence[str] = ()) -> str:
    """What a run would do, in a few lines, and further ones."""
    sizes = " ".join(f"{name}{getattr(config.parallel, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp"))
    nodes, each = config.parallel.nodes, config.parallel.nproc_per_node
    ranks = f"{nodes} x {each}" if nodes > 1 else str(each)
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    return "\n".join(
        (
            f"model    {config.model.path}: {spec.family}, {spec.layers} layers ({len(spec.moe_layers)} MoE), "
            f"{spec.experts} experts, top-{spec.topk}",
            f"trainer  {ranks} ranks ({sizes}), {config.train.dtype}, replay {config.replay.actor}",
            f"engines  {config.engine.count} x tp{config.engine.tp}, {config.engine.dtype}",
            f"run      {config.train.steps} steps of {samples} samples into {config.run.dir}",
            *details,
            "nothing was started (--dry-run)",
        )
    )


def _torchrun(config: Config, argv: list[str]) -> int:
    launcher = ["moerl.train.elastic", f"--nproc-per-node={config.parallel.nproc_per_node}", "--rdzv-backend=static"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "moerl.train"]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join((root, os.environ["PYTHONPATH"])) if "PYTHONPATH" in os.environ else root
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(config.train.threads)}
    with no_process_left():
        return _supervise(subprocess.Popen([sys.executable, "-m", *launcher, *argv], env=env, start_new_session=True))


def _supervise(child: subprocess.Popen) -> int:
    """Wait for torchrun. A signal asks it to stop; if it has not after the grace period, its process group is killed."""
    asked_at: list[float] = []

    def ask(*_: object) -> None:
        asked_at.append(time.monotonic())
        child.terminate()

    previous = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        while child.poll() is None:
            if asked_at and time.monotonic() - asked_at[0] > _STOP_GRACE_S:
                os.killpg(child.pid, signal.SIGKILL)
            time.sleep(0.1)
        if asked_at:
            print("interrupted", file=sys.stderr)
            return 130
        return child.returncode
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
