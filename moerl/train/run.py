"""A run from start to end: folder, logs, trainer, engines, and everything's orderly end.

`open_run` starts what the options ask for, in an order that overlaps the slow starts, and undoes it in reverse whatever
happens. Rank 0 owns the run folder, the console, Ray and the engines; the other ranks have a trainer and a log file.
"""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moerl.cluster.engines import EnginePool
from moerl.config.schema import Config
from moerl.models import ModelSpec
from moerl.observe.alarms import alarms, due
from moerl.observe.console import RunConsole
from moerl.observe.logs import setup_logging
from moerl.observe.sinks import Sinks, open_sinks
from moerl.observe.timer import PhaseTimer
from moerl.observe.wait import waiting
from moerl.reshard.sync import WeightSync
from moerl.reshard.topology import engine_topology
from moerl.rollout import store
from moerl.routing.shard import Place
from moerl.train import checkpoint, megatron, progress
from moerl.train.export import export_hf
from moerl.train.fresh import Kept
from moerl.train.launch import Options, rollout_folder
from moerl.train.progress import Progress
from moerl.train.source import Live, Recorded, Source, open_live, prepare_folder
from moerl.train.summary import check_requirements, closing_rows, headline, read_metrics, summarise
from moerl.train.trainer import Trainer, build

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What the loop works with. `source`, `sinks` are on rank 0 only; `sync` is None where nothing is served.

    Attributes:
        places: (data-parallel rank, place within the replica) of every global rank.
        alarmed: kind of alarm -> step at which it was last shown.
        kept: weights that were kept to measure with; None with `buffer.max_lag` 0.
    """

    config: Config
    spec: ModelSpec
    folder: Path
    trainer: Trainer
    source: Source | None
    sync: WeightSync | None
    progress: Progress
    places: list[tuple[int, Place]]
    timer: PhaseTimer
    console: RunConsole
    sinks: Sinks | None
    started: float
    alarmed: dict[str, int] = field(default_factory=dict)
    kept: Kept | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name, time and show a part of the step; a long one says so in the log, one past its deadline ends the process with all stacks."""
        limits = {"timeout_s": self.config.parallel.timeout_s, "heartbeat_s": self.config.observe.heartbeat_s}
        who = f"trainer rank {self.trainer.ranks.rank}"
        with self.timer(name), waiting(f"the end of {name} in step {self.progress.step}", who=who, hard=True, **limits):
            yield

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a step's metrics with the seconds of its phases, show its line, and say what is wrong with it."""
        metrics = {**metrics, "version": self.progress.version, **self.timer.take()}
        if self.sinks:
            found = alarms(metrics, self.config)
            self.sinks.log(step, {**metrics, "alarms": len(found), **{f"alarm/{kind}": 1 for kind in found}})
            if "reward" in metrics or "loss" in metrics:
                self.console.step(step, headline(metrics, ahead=self.config.buffer.max_lag > 0))
            for kind, sentence in due(found, step, self.alarmed, self.config.observe.alarm_every_steps).items():
                self.alarmed[kind] = step
                self.console.message(f"  alarm: {sentence}")
                log.warning("step %d: %s", step, sentence)

    def finish(self) -> None:
        """Export the weights, write `summary.json`, show what happened, and fail if the run had to achieve more."""
        if self.config.checkpoint.export_hf:
            dtype = megatron.DTYPES[self.config.train.dtype]
            trainer, model = self.trainer, self.config.model
            lacks = export_hf(
                self.folder / "export",
                Path(model.path),
                trainer.model,
                self.spec,
                trainer.ranks,
                dtype=dtype,
                mtp=self.config.train.builds_mtp,
                origin=Path(model.megatron_checkpoint or model.path),
            )
            if lacks:
                self.console.message(f"  export: {lacks}")
        if self.sinks is None:
            return
        found = summarise(read_metrics(self.folder), minutes=(time.monotonic() - self.started) / 60)
        (self.folder / "summary.json").write_text(json.dumps(found, indent=2))
        self.console.table("what happened", closing_rows(found), next_command=self._next_command())
        if isinstance(self.source, Live):  # recorded rewards are given, and without an engine nothing is evaluated
            check_requirements(found, self.config.require)

    def _next_command(self) -> str:
        if isinstance(self.source, Live) and self.config.rollout.save:
            folder = self.folder
            return f"tools/moerl train @ {folder}/config.toml --rollouts {folder} --run.dir {folder}-again   (same rollouts, no engine)"
        return f"less {self.folder}/metrics.jsonl"


@contextmanager
def open_run(config: Config, spec: ModelSpec, options: Options) -> Iterator[Run]:
    """Everything a run needs, started; stopped on leaving, also after an error or an interruption."""
    folder, started = Path(config.run.dir), time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        ranks = megatron.initialise(config.parallel, config.train, config.run.seed)
        stack.callback(megatron.shutdown)
        resume = progress.find(folder / "checkpoints", config, spec, ranks.world) if options.resume else None
        at = resume.progress if resume else Progress(0, 0, 0)
        if ranks.rank == 0:
            prepare_folder(folder, config, fresh=resume is None)
        dist.barrier()
        setup_logging(folder, ranks.rank, config.observe.log_level)
        console = stack.enter_context(RunConsole(config.train.steps, first_step=at.step, shown=config.observe.console and ranks.rank == 0))
        live = options.rollouts is None
        source, pool, sinks = None, None, None
        if ranks.rank == 0:
            console.header("moerl train", _facts(config, spec, ranks.world, at, options))
            sinks = open_sinks(folder, config, first_step=at.step)
            stack.callback(sinks.close)
            if live:
                console.message("starting the engines ...")
                pool, source = open_live(stack, config, spec, folder, trainer_ranks=ranks.world, at=at, message=console.message)
            else:
                source = Recorded(rollout_folder(options.rollouts), store.make_header(config.model.path, step=0, version=0))
        trainer = build(config, spec, ranks)
        if resume:
            checkpoint.load(resume.folder, trainer.model, trainer.optimizer, same_layout=resume.same_layout)
        sync = _open_sync(stack, config, spec, pool) if live else None
        places: list[Any] = [None] * ranks.world
        dist.all_gather_object(places, (ranks.dp[0], trainer.place))
        yield Run(config, spec, folder, trainer, source, sync, at, places, PhaseTimer(console.phase), console, sinks, started)


def _open_sync(stack: ExitStack, config: Config, spec: ModelSpec, pool: EnginePool | None) -> WeightSync:
    sync = WeightSync(spec, config.parallel, engine_topology(config), config.sync, pool)
    stack.callback(sync.close)
    return sync


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM (from torchrun, which passes Ctrl-C on) unwinds like Ctrl-C, so that engines and Ray are stopped in order."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _facts(config: Config, spec: ModelSpec, world: int, at: Progress, options: Options) -> dict[str, Any]:
    engine = config.engine
    live = f"{engine.count} SGLang engine(s), tp {engine.tp}, {engine.dtype}"
    return {
        "model": f"{config.model.path} ({spec.family}, {len(spec.moe_layers)} MoE layers, {spec.experts} experts, top-{spec.topk})",
        "trainer": f"Megatron, {world} rank(s), {config.train.dtype}, replay {config.replay.actor}",
        "rollouts": f"recorded in {options.rollouts}" if options.rollouts else live,
        "task": f"{config.task.kind} {config.task.name or config.task.path}, reward {config.task.reward}",
        "run folder": f"{config.run.dir}" + (f", continued after step {at.step}" if at.step else ""),
    }
