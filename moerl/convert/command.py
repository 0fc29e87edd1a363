"""`moerl convert hf-to-megatron|megatron-to-hf SRC DST [OPTIONS]`, `moerl convert verify FOLDER CHECKPOINT`.

arguments --parse--> survey or plan --(--dry-run: the inventory)--> files with a progress bar --(--verify)--> what was done
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moerl.convert import estimate, hf_to_megatron, megatron_to_hf
from moerl.convert.jobs import Written, aside
from moerl.convert.limits import limits
from moerl.convert.stored import open_checkpoint
from moerl.convert.survey import Survey, survey
from moerl.convert.verify import verify
from moerl.errors import CheckpointError, ConfigError
from moerl.models import read_spec

USAGE = "hf-to-megatron|megatron-to-hf SRC DST [--mtp keep|drop] [--dtype keep|bfloat16|float32|fp8] [--hf-config FOLDER] [--verify] ..."


def main(argv: Sequence[str]) -> int:
    """Run one conversion; the exit status.

    Raises:
        ConfigError: wrong arguments. ModelError, CheckpointError: see the conversions.
    """
    asked = _parse(argv)
    console = Console(highlight=False, soft_wrap=True)
    if asked.direction == "verify":
        read_spec(asked.source)
        open_checkpoint(asked.target)
        _verify(asked.source, asked.target, console)
        return 0
    if asked.target.exists() and not asked.dry_run:
        raise CheckpointError(f"{asked.target} exists; choose another folder, or remove it")
    sizes = partial(limits, memory_mib=asked.memory_mib, workers=asked.workers, file_mib=asked.file_mib)
    if asked.direction == "hf-to-megatron":
        _to_megatron(asked, sizes, console)
    else:
        _to_hf(asked, sizes, console)
    return 0


def _to_megatron(asked: argparse.Namespace, sizes: Callable[[int], Any], console: Console) -> None:
    found = survey(asked.source, asked.mtp)
    names = {name for entry in found.entries() for name in entry.hf}
    total = sum(found.weights[name].stored.nbytes * (2 if found.weights[name].scales else 1) for name in names)
    chosen = sizes(total)
    _tell(console, found)
    if asked.dry_run:
        files = len(hf_to_megatron.plan(found, chosen).files)
        _estimate(asked, files, total, chosen.workers, min(one.path for one in found.stored.values()), console)
        return
    with _timed(asked.target, total, console) as bar:
        bar.written = hf_to_megatron.convert(found, asked.target, chosen, bar.advance)
    if asked.verify:
        _verify(asked.source, asked.target, console, exact=True)


def _to_hf(asked: argparse.Namespace, sizes: Callable[[int], Any], console: Console) -> None:
    planned = megatron_to_hf.plan(asked.source, asked.hf_config, dtype=asked.dtype, mtp=asked.mtp, sizes=sizes)
    total = sum(target.nbytes for target in planned.targets)
    spec, ahead = planned.spec, "with" if planned.mtp else "without"
    console.print(f"{asked.source}: {spec.family}, {spec.layers} layers, {spec.experts} experts, {len(planned.targets)} tensors")
    if spec.mtp_layers or planned.mtp:
        console.print(f"written {ahead} the weights for multi-token prediction")
    if asked.dry_run:
        first = min(asked.source.glob("*.distcp"))
        _estimate(asked, len(planned.files), total, planned.limits.workers, first, console)
        return
    with _timed(asked.target, total, console) as bar:
        bar.written = megatron_to_hf.convert(planned, asked.target, bar.advance)
    if asked.verify:
        _verify(asked.target, asked.source, console)


def _tell(console: Console, found: Survey) -> None:
    """What a folder holds and what becomes of it."""
    counts, spec = found.counts, found.spec
    quantised = sum(1 for weight in found.weights.values() if weight.scales)
    size = sum(one.nbytes for one in found.stored.values())
    console.print(
        f"{found.folder}: {spec.family}, {spec.layers} layers, {spec.experts} experts, {len(found.stored)} tensors, {size / 1e9:.2f} GB"
    )
    if quantised:
        console.print(f"{quantised} fp8 weights become bfloat16")
    if found.mtp == "absent":
        console.print("config.json announces multi-token prediction, but the folder has no weights for it; neither will the checkpoint")
    elif found.mtp != "none":
        verb = {"keep": "kept", "drop": "left out, as asked for (--mtp drop)"}[found.mtp]
        console.print(f"{counts['mtp']} weights for multi-token prediction are {verb}")
    if found.copies:
        console.print(f"{len(found.copies)} tensors repeat others and are stored once: {', '.join(found.copies)}")
    if counts["ignorable"]:
        console.print(f"{counts['ignorable']} buffers that follow from the config are left out (rotary_emb.inv_freq)")


def _estimate(asked: argparse.Namespace, files: int, total: int, workers: int, sample: Path, console: Console) -> None:
    writing, reading = estimate.write_rate(asked.target.parent), estimate.read_rate(sample)
    free = estimate.free_bytes(asked.target.parent)
    seconds = total / writing + total / reading
    console.print(f"would write {files} files, {total / 1e9:.2f} GB, {workers} at a time; {free / 1e9:.2f} GB are free")
    console.print(
        f"about {_time(seconds)} (estimate from 32 MB written at {writing / 1e6:.0f} MB/s and read at {reading / 1e6:.0f} MB/s just now; "
        "what is in memory reads faster than the rest)"
    )


class _Bar:
    """The progress of a conversion. `written`: what it returned."""

    def __init__(self, progress: Progress, total: int, label: str):
        self._progress, self._task = progress, progress.add_task(label, total=total)
        self.written: list[Written] = []

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)


@contextmanager
def _bar(label: str, total: int, console: Console) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = Console(stderr=True, highlight=False)
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        yield _Bar(progress, total, label)


@contextmanager
def _timed(target: Path, total: int, console: Console) -> Iterator[_Bar]:
    """A bar, and afterwards one line about what was written."""
    if aside(target).is_dir():
        console.print(f"going on with {aside(target)}")
    start = time.perf_counter()
    with _bar("converting", total, console) as bar:
        yield bar
    seconds, done = time.perf_counter() - start, bar.written
    size, kept = sum(one.nbytes for one in done), sum(one.kept for one in done)
    earlier = f", {kept} of them from before the interruption" if kept else ""
    console.print(f"{target}: {len(done)} files{earlier}, {size / 1e9:.2f} GB in {_time(seconds)}")


def _verify(folder: Path, checkpoint: Path, console: Console, *, exact: bool = False) -> None:
    total = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    with _bar("verifying", total, console) as bar:
        found = verify(folder, checkpoint, bar.advance)
    if exact and (found.rounded):
        raise CheckpointError(f"{checkpoint}: {found.rounded} tensors are not those of {folder} bit for bit; the conversion is wrong")
    rounded = f", {found.rounded} of them rounded to another type" if found.rounded else ", bit for bit"
    absent = f"; {found.absent} tensors for multi-token prediction are in the folder only" if found.absent else ""
    console.print(
        f"verified: {found.tensors} tensors, {found.elements} values are the same on both sides{rounded}{absent}; "
        f"{found.files} files have the checksums of their writing"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"moerl convert: {message}; usage: moerl convert {USAGE}")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="moerl convert", add_help=False, allow_abbrev=False)
    parser.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf", "verify"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--mtp", choices=("keep", "drop"), default="keep")
    parser.add_argument("--dtype", choices=("keep", "bfloat16", "float32", "fp8"), default="keep")
    parser.add_argument("--hf-config", type=Path)
    parser.add_argument("--memory-mib", type=_positive, default=1024)
    parser.add_argument("--workers", type=_positive)
    parser.add_argument("--file-mib", type=_positive)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args(list(argv))
    wrong = []
    if asked.direction != "megatron-to-hf":
        wrong += ["--dtype is for megatron-to-hf: a Megatron checkpoint keeps the folder's types"] if asked.dtype != "keep" else []
        wrong += ["--hf-config is for megatron-to-hf"] if asked.hf_config else []
    if asked.direction == "verify" and (asked.verify or asked.dry_run or asked.mtp != "keep"):
        wrong.append("verify takes a Hugging Face folder and a checkpoint, and no options")
    if wrong:
        raise ConfigError(wrong)
    return asked
