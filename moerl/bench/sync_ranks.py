"""What the trainer's two ranks do in `moerl bench sync`. Run by torchrun: `-m moerl.bench.sync_ranks FOLDER`.

    FOLDER/model, settings.json --> trainer, engine, the other process --> ways in turns --> training --> FOLDER/found.json

Both ranks make the same calls in the same order; seconds are those of rank 0, which also drives the engine and the other process.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from moerl.bench import sync_peer, wire
from moerl.bench.sync import RANKS, Changed, Measured, Settings, Timed
from moerl.bench.sync_link import ClientLink, connect
from moerl.config.schema import Config, Sync
from moerl.errors import ReshardError
from moerl.models import ModelSpec, read_spec
from moerl.reshard import crew
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.plan import Plan, make_plan
from moerl.reshard.sync import SyncReport, WeightSync
from moerl.reshard.topology import engine_topology
from moerl.reshard.trainer_layout import trainer_topology
from moerl.reshard.transport.gloo import GlooTransport
from moerl.rollout.server import EngineServer
from moerl.train import platform

TIMEOUT_S = sync_peer.TIMEOUT_S
_PACED = 1.2
"""How many times as much as it should a slow wire may seem to carry, since each connection may begin with a burst."""


def main(folder: Path) -> None:
    """Measure, and write what was found."""
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=Settings)
    platform.quiet()
    platform.install("cpu")
    found = measure(settings, folder)
    if dist.get_rank() == 0:
        (folder / "found.json").write_bytes(msgspec.json.encode(found))
    from moerl.train import megatron

    megatron.shutdown()


def config_of(settings: Settings, folder: Path) -> Config:
    """The run that is measured: no replay, since nothing is generated."""
    return Config.model_validate(
        {
            "model": {"path": str(folder / "model")},
            "engine": {"device": "cpu", "max_running_requests": 8, "max_total_tokens": 4096, "start_timeout_s": TIMEOUT_S},
            "train": {"device": "cpu", "tokens_per_microbatch": settings.sequences * settings.tokens_per_sequence},
            "replay": {"actor": "off"},
            "diagnostics": {"mismatch_every_steps": 0},
            "parallel": {"tp": RANKS, "ep": RANKS, "nproc_per_node": RANKS},
            "sync": {"bucket_mib": settings.bucket_mib, "verify": "never", "timeout_s": TIMEOUT_S},
        }
    )


def measure(settings: Settings, folder: Path) -> Measured:
    """Everything, in order."""
    from moerl.train import megatron, trainer

    config, load_average = config_of(settings, folder), os.getloadavg()[0]
    spec = read_spec(config.model.path)
    ranks = megatron.initialise(config.parallel, config.train, config.run.seed)
    with ExitStack() as stack:
        server = stack.enter_context(_engine(config, folder / "engine.log")) if ranks.rank == 0 else None
        built = trainer.build(config, spec, ranks)
        others = Others(config, built.model[0], make_the_plan(config, spec))
        stack.callback(others.stop)
        if server is not None:
            server.wait_healthy()
        link = stack.enter_context(connect([server], TIMEOUT_S)) if server is not None else None
        pushes = Pushes(config, built, link)
        stack.callback(pushes.close)
        ways, paced = side_by_side(settings, pushes, others)
        ways["shared_memory"] = alone(settings, pushes)
        changes = train(settings, config, built, pushes)
    summary = others.plan.summary()
    return Measured(
        others.plan.minimum_bytes,
        summary.sender_max_over_mean,
        summary.buckets,
        ways,
        paced,
        settings.wire_gbit_per_s,
        changes,
        load_average,
    )


def make_the_plan(config: Config, spec: ModelSpec) -> Plan:
    """The plan that the direct way makes too; all processes are on one machine."""
    return make_plan(
        spec,
        trainer_topology(config.parallel, RANKS, transformer_engine=False),
        engine_topology(config),
        bucket_bytes=config.sync.bucket_bytes,
        ranks_per_node=RANKS + 1,
    )


class Pushes:
    """Syncs of the trainer's weights into the engine. Several may be open at once, but only one that is direct."""

    def __init__(self, config: Config, trainer: Any, link: ClientLink | None):
        self._config, self._trainer, self._link = config, trainer, link
        self._open: dict[str, WeightSync] = {}
        self._version = 0

    def open(self, name: str, **settings: Any) -> Callable[[], SyncReport]:
        """A way to push, by that name; `settings` as in `[sync]`."""
        sync = Sync.model_validate(self._config.sync.model_dump() | settings)
        trainer = self._trainer
        self._open[name] = WeightSync(trainer.spec, self._config.parallel, engine_topology(self._config), sync, self._link)
        return partial(self._push, self._open[name])

    def close(self, *names: str) -> None:
        """Those that are named, or all."""
        for name in names or tuple(self._open):
            self._open.pop(name).close()

    def held_nbytes(self) -> int:
        """Of the weights that rank 0 holds."""
        return crew.first(lambda: sum(shard.tensor.nbytes for shard in self._trainer.shards()), Deadline("counting", TIMEOUT_S))

    def _push(self, sync: WeightSync) -> SyncReport:
        self._version += 1
        report = sync.push(self._trainer.shards(), self._version)
        if report.attempts > 1:
            raise ReshardError(f"version {self._version} took {report.attempts} attempts; what was measured is not a sync")
        return report


class Others:
    """The ways that need no engine, from this rank to the process of `sync_peer`."""

    def __init__(self, config: Config, chunk: Any, plan: Plan):
        from moerl.train import megatron

        self.plan, self._rank = plan, dist.get_rank()
        deadline = Deadline("joining the benchmark's other process", TIMEOUT_S)
        store = sync_group.open_store(sync_peer.HOST, RANKS + 1, deadline) if self._rank == 0 else None
        port = crew.first(lambda: store.port, deadline)
        store = store or sync_group.reach_store(sync_peer.HOST, port, RANKS + 1, deadline)
        buckets = [sync_peer.Bucket(int(each["sender"]), int(each["nbytes"])) for each in plan.buckets]
        self._mine = [bucket for bucket in buckets if bucket.sender == self._rank]
        self._peer = sync_peer.start(port, config, buckets, plan.bucket_bytes, RANKS) if self._rank == 0 else None
        group = sync_group.join(store, sync_peer.GROUP, "gloo", RANKS + 1, deadline, rank=self._rank, interrupt=self._fail_early)
        self._transport = GlooTransport(group, self._rank, plan.bucket_bytes)
        self._refit = sync_peer.Refit(megatron.unwrap(chunk), store, self._rank, RANKS + 1, RANKS, TIMEOUT_S)
        self._tell(None)
        self._warm = False

    def transport(self) -> float:
        """Send the plan's messages; seconds until the last has arrived."""
        start = self._begin("receive")
        sync_peer.send(self._transport, self._mine, RANKS, Deadline("sending", TIMEOUT_S), fill=not self._warm)
        self._tell(None)
        self._warm = True
        return time.perf_counter() - start

    def refit(self) -> float:
        """Megatron's own; seconds until the destination is done."""
        start = self._begin("refit")
        self._refit.run()
        self._tell(None)
        return time.perf_counter() - start

    def refit_nbytes(self) -> int:
        """Sent by all ranks so far."""
        return sum(crew.all(lambda: self._refit.sent_nbytes, Deadline("counting", TIMEOUT_S)))

    def check_refit(self) -> None:
        """Raises:
        ReshardError: the destination does not hold what the trainer was built from.
        """
        if wrong := self._tell("differing"):
            raise ReshardError(f"Megatron's refit left {len(wrong)} parameters that differ, such as {', '.join(wrong[:4])}")

    def stop(self) -> None:
        if self._peer is not None:
            self._peer.stop()

    def _begin(self, word: str) -> float:
        dist.barrier()
        if self._peer is not None:
            self._peer.start(word)
        return time.perf_counter()

    def _tell(self, word: str | None) -> Any:
        """What the other process answers, on rank 0: to this word, or to that under way."""
        if self._peer is None:
            return None
        if word is not None:
            self._peer.start(word)
        return self._peer.result()

    def _fail_early(self) -> None:
        if self._peer is not None and not self._peer.alive():
            self._peer.result()


def side_by_side(settings: Settings, pushes: Pushes, others: Others) -> tuple[dict[str, Timed], dict[str, Timed]]:
    """Rounds of the four ways over gloo, within the machine and over a slow wire; in each, the first round only warms up."""
    direct = pushes.open("direct", way="direct", transport="gloo")
    compatible = pushes.open("compatible", way="compatible")
    reports: dict[str, SyncReport] = {}

    def synced(name: str, push: Callable[[], SyncReport]) -> float:
        dist.barrier()
        reports[name] = push()
        return reports[name].seconds["transfer"]

    ways = {
        "direct": partial(synced, "direct", direct),
        "compatible": partial(synced, "compatible", compatible),
        "transport": others.transport,
        "refit": others.refit,
    }

    def measure() -> dict[str, list[float]]:
        rounds = [{name: way() for name, way in ways.items()} for _ in range(settings.rounds)]
        return {name: [taken[name] for taken in rounds] for name in ways}

    def warm_up() -> None:
        for way in ways.values():
            way()

    warm_up()
    others.check_refit()
    refit_nbytes = others.refit_nbytes()
    seconds = measure()
    wire.pace(int(settings.wire_gbit_per_s * 1e9 / 8 / RANKS))
    warm_up()
    paced = measure()
    wire.pace(None)
    pushes.close("direct", "compatible")
    planned = others.plan.summary().nbytes
    if (sent := reports["direct"].moved.wire_nbytes) != planned:
        raise ReshardError(f"the direct way sent {sent} bytes, but the plan that is measured against has {planned}")
    if (carried := planned * 8e-9 / statistics.median(paced["transport"])) > _PACED * settings.wire_gbit_per_s:
        raise ReshardError(
            f"a wire of {settings.wire_gbit_per_s:g} Gbit/s carried {carried:.1f}: this system does not pace connections within the "
            "machine; measure on another one"
        )
    nbytes = {
        "direct": sent,
        # What rank 0 lacks is gathered there, then all is broadcast.
        "compatible": 2 * reports["compatible"].moved.wire_nbytes - pushes.held_nbytes(),
        "transport": planned,
        "refit": refit_nbytes,
    }
    return tuple({name: Timed(nbytes[name], found[name]) for name in ways} for found in (seconds, paced))


def alone(settings: Settings, pushes: Pushes) -> Timed:
    """Rounds of the direct way through shared memory."""
    push = pushes.open("shared_memory", way="direct", transport="shared_memory")
    reports = [push() for _ in range(settings.rounds + 1)][1:]
    pushes.close("shared_memory")
    if (kinds := {kind for report in reports for kind in report.moved.travelled}) != {"shared_memory"}:
        raise ReshardError(f"bytes should travel in shared memory, but went by {' and '.join(sorted(kinds))}")
    return Timed(reports[0].moved.wire_nbytes, [report.seconds["transfer"] for report in reports])


def train(settings: Settings, config: Config, trainer: Any, pushes: Pushes) -> list[Changed]:
    """Steps on random tokens, after some that warm up, each followed by a push of what changed."""
    from moerl.train import megatron
    from moerl.train.batch import cut, pack
    from moerl.train.forward import forward_backward, localise

    batches = _batches(settings, trainer.spec.vocab_size)

    def step(lr: float) -> None:
        sizes = {"tokens_per_microbatch": config.train.tokens_per_microbatch, "multiple": trainer.ranks.sequence_multiple}
        whole = pack(next(batches), dp=1, layout=trainer.layout, **sizes)[0]
        local = localise([cut(one, trainer.place) for one in whole], trainer.ranks)
        forward_backward(trainer.model, local, trainer.ranks, loss_fn=_loss, **trainer.passes)
        megatron.optimizer_step(trainer.optimizer, lr)

    for _ in range(settings.warmup_steps):
        step(settings.warmup_lr)
    push = pushes.open("delta", way="direct", transport="auto", delta=True)
    full = push().moved.wire_nbytes
    changes = []
    for lr in settings.lrs:
        moved = []
        for _ in range(settings.steps_per_lr):
            step(lr)
            moved.append(push().moved)
        changes.append(Changed(lr, [each.changed_share for each in moved], [each.wire_nbytes / full for each in moved]))
    pushes.close("delta")
    return changes


def _batches(settings: Settings, vocab: int) -> Iterator[list[Any]]:
    """Random sequences, the same on both ranks."""
    from moerl.train.batch import Sequence

    rng, length = np.random.default_rng(0), settings.tokens_per_sequence
    while True:
        yield [Sequence(rng.integers(0, vocab, length + 1), np.ones(length, np.float32), None, {}) for _ in range(settings.sequences)]


def _loss(outputs: Any, rows: Any) -> tuple[Any, Any, dict[str, Any]]:
    return -(outputs.logprobs * rows.loss_mask).sum(), rows.loss_mask.sum(), {}


@contextmanager
def _engine(config: Config, log: Path) -> Iterator[EngineServer]:
    """Started, not yet healthy."""
    server = EngineServer(config.model.path, config.engine, config.sglang, log_path=log, seed=config.run.seed)
    server.start()
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
