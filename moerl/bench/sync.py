"""`moerl bench sync`: a new version of all weights from a trainer to an engine, against other ways there, as ratios within one run.

    2 trainer ranks, TP2·EP2 --direct or compatible, over gloo--> a real SGLang engine, TP1
                             --Megatron's own refit, over gloo--> a process with a Megatron model, TP1·EP1
                             --the transport alone, over gloo---> the same process, which looks at nothing

All processes are on this machine, on CPUs. The ways run in turns within each round, after a round that only warms up; told are medians
over the rounds of the ratios of their seconds. Seconds of a sync are those of its phase `transfer`: from the first byte packed until
the engine has written and answered. The *transport alone* sends messages of the same sizes between as many ranks, already packed, and
nobody checks or unpacks them: no sync over this transport can be faster. The *refit* is `megatron.core.resharding.swap_model_weights`,
unchanged; see `sync_refit`.

Gloo is what `sync.transport = "auto"` takes between machines, so the figures of note are those over a wire that is slower than memory, as
networks are; see `wire`. The same ways are measured without that first: gloo is then a copy by the cores that pack, check and unpack, and
their work comes on top of it. Within a machine `auto` takes shared memory, which is measured by itself.

Then the trainer trains on random tokens, and pushes what changed (`sync.delta`). A weight of the engine changes when its float32 master
moves across the middle between two neighbouring bfloat16 numbers, so the share depends on the size of a step (about the learning rate, less
where gradients disagree, as random ones do), on the size of weights, and on where between two such numbers the masters are. The first
steps here are large, so that they are anywhere, as after a long run; right after a start from a bfloat16 checkpoint less changes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from moerl.errors import ReshardError
from moerl.ports import free_port

RANKS = 2
_OTHERS = {"compatible": "compatible", "refit": "mcore_refit", "transport": "raw_transport"}
"""Ways beside direct, and what they are called in the result."""
_TIMEOUT_S = 3000.0


class Settings(msgspec.Struct, frozen=True):
    """What is measured: a DeepSeek-V3 in which, as in the real one, 90 % of the weights are experts.

    Attributes:
        bucket_mib: of all ways but Megatron's, which sends a message per parameter. Small, since the model is: some 56 buckets of half
            of it.
        rounds: beside the one that warms up.
        wire_gbit_per_s: of the slow wire, into the engine; the trainer's ranks share it.
        warmup_steps, warmup_lr: of training before changes are counted.
        steps_per_lr: whose changes are counted.
    """

    hidden: int = 1024
    layers: int = 5
    experts: int = 32
    expert_width: int = 256
    initializer_range: float = 0.02
    bucket_mib: float = 8.0
    rounds: int = 7
    wire_gbit_per_s: float = 10.0
    sequences: int = 8
    tokens_per_sequence: int = 64
    warmup_steps: int = 6
    warmup_lr: float = 1e-3
    lrs: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4)
    steps_per_lr: int = 2


class Timed(msgspec.Struct, frozen=True):
    """One way: bytes that left a rank in each round, and seconds by round."""

    wire_nbytes: int
    seconds: list[float]


class Changed(msgspec.Struct, frozen=True):
    """Steps at one learning rate: share of the elements that changed, and wire bytes by those of a full sync, by step."""

    lr: float
    changed_share: list[float]
    wire_share: list[float]


class Measured(msgspec.Struct, frozen=True):
    """What the ranks found.

    Attributes:
        minimum_nbytes: of all engine parameters.
        sender_max_over_mean, buckets: of the plan.
        ways: direct, compatible, refit, transport: rounds side by side; shared_memory: rounds of its own.
        paced: the same four over the slow wire.
        wire_gbit_per_s: of that.
        load_average: of the machine before the measurement; a busy machine slows the ways down unequally.
    """

    minimum_nbytes: int
    sender_max_over_mean: float
    buckets: int
    ways: dict[str, Timed]
    paced: dict[str, Timed]
    wire_gbit_per_s: float
    changes: list[Changed]
    load_average: float


def main(*, as_json: bool = False) -> int:
    """Measure and print the result."""
    measured = measure(Settings())
    found = figures(measured)
    _print_tables(measured)
    if as_json:
        print(json.dumps(found))
    return 0


def measure(settings: Settings) -> Measured:
    """Make a model, run the ranks on it, return what they found.

    Raises:
        ReshardError: a rank failed; ends with what the ranks said.
    """
    from moerl.convert.tiny import write_tiny
    from moerl.train.processes import no_process_left

    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as root, no_process_left():
        folder = Path(root)
        write_tiny(folder / "model", model_config(settings))
        (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        done = _torchrun("moerl.bench.sync_ranks", str(folder))
        if done.returncode or not (folder / "found.json").is_file():
            raise ReshardError(f"the benchmark's ranks ended with status {done.returncode}:\n{done.stdout[-4000:]}")
        return msgspec.json.decode((folder / "found.json").read_bytes(), type=Measured)


def model_config(settings: Settings) -> dict[str, Any]:
    """`config.json` of the model."""
    from moerl.convert.tiny import tiny_config

    names = ("hidden", "layers", "experts", "expert_width", "initializer_range")
    return tiny_config(**{name: getattr(settings, name) for name in names})


def figures(measured: Measured) -> dict[str, float]:
    """The JSON object. `vs_*`: seconds of the other by those of direct, so that direct is faster above 1.

    Returns:
        bytes_ratio: bytes on the wire by the engine's own. sender_max_over_mean: bytes of the busiest sender by those of the mean one.
        vs_*: over the wire. changed_share: of elements that a training step changes at a learning rate of 1e-6.
        loopback_vs_*: within the machine. shared_memory_vs_*: of direct in shared memory, within the machine.
    """
    direct, shared_s = measured.ways["direct"], statistics.median(measured.ways["shared_memory"].seconds)
    rl = min(measured.changes, key=lambda change: abs(change.lr - 1e-6))
    return {
        "bytes_ratio": round(direct.wire_nbytes / measured.minimum_nbytes, 6),
        **{f"vs_{title}": round(_ratio(measured.paced, name), 3) for name, title in _OTHERS.items()},
        "sender_max_over_mean": round(measured.sender_max_over_mean, 4),
        "changed_share": round(statistics.mean(rl.changed_share), 6),
        **{f"loopback_vs_{title}": round(_ratio(measured.ways, name), 3) for name, title in _OTHERS.items()},
        "shared_memory_vs_gloo": round(statistics.median(direct.seconds) / shared_s, 3),
        "shared_memory_vs_raw_transport": round(statistics.median(measured.ways["transport"].seconds) / shared_s, 3),
    }


def _ratio(ways: dict[str, Timed], name: str) -> float:
    """Seconds of a way by those of direct in the same round, the median."""
    pairs = zip(ways[name].seconds, ways["direct"].seconds, strict=True)
    return statistics.median(other / mine for other, mine in pairs)


def _torchrun(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a module on `RANKS` ranks of one thread each."""
    launcher = ["-m", "moerl.train.elastic", f"--nproc-per-node={RANKS}", "--rdzv-backend=static", "--master-addr=127.0.0.1"]
    command = [sys.executable, *launcher, f"--master-port={free_port()}", "-m", module, *arguments]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join((root, os.environ["PYTHONPATH"])) if "PYTHONPATH" in os.environ else root
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")[-4000:]
        raise ReshardError(f"the benchmark's ranks were not done after {_TIMEOUT_S:g} s:\n{said}") from error


def _print_tables(measured: Measured) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=140)
    console.print(f"{measured.minimum_nbytes / 1e6:.0f} MB of bfloat16, {RANKS} trainer ranks (TP2·EP2) to 1 engine rank, on CPUs")
    titles = {
        "direct": "direct",
        "shared_memory": "direct, in shared memory",
        "compatible": "compatible",
        "refit": "Megatron's refit, to TP1·EP1",
        "transport": "the transport alone",
    }
    wires = {"gloo within the machine": measured.ways, f"gloo, {measured.wire_gbit_per_s:g} Gbit/s": measured.paced}
    table = Table(box=None, pad_edge=False)
    table.add_column("way")
    for head in ("MB on the wire", "s, median", "s, range", "GB/s", "s by direct's"):
        table.add_column(head, justify="right")
    engine_gb = measured.minimum_nbytes / 1e9
    for wire, ways in wires.items():
        table.add_row(f"[bold]{wire}[/]")
        for name, title in titles.items():
            if name not in ways:
                continue
            seconds = ways[name].seconds
            middle, spread = statistics.median(seconds), f"{min(seconds):.3f} to {max(seconds):.3f}"
            ratio = _ratio(ways, name) if name in _OTHERS else middle / statistics.median(ways["direct"].seconds)
            sent = f"{ways[name].wire_nbytes / 1e6:.1f}"
            table.add_row(f"  {title}", sent, f"{middle:.3f}", spread, f"{engine_gb / middle:.2f}", f"{ratio:.2f}")
    console.print(table)
    console.print(
        f"{len(measured.ways['direct'].seconds)} rounds; GB/s count the engine's bytes once, however many travelled; "
        f"load average before: {measured.load_average:.1f} on {os.cpu_count()} cores",
        soft_wrap=True,
    )
    changes = Table(box=None, pad_edge=False)
    for head in ("learning rate", "elements changed by a step", "bytes on the wire, of a full sync"):
        changes.add_column(head, justify="right")
    for change in measured.changes:
        shares = (statistics.mean(values) for values in (change.changed_share, change.wire_share))
        changes.add_row(f"{change.lr:.0e}", *(f"{100 * share:.3f} %" for share in shares))
    console.print(changes)
    console.print(
        "trained on random tokens, whose gradients disagree from step to step: Adam's steps are then a fraction of the learning rate, and "
        "the share is lower than where they agree",
        soft_wrap=True,
    )
