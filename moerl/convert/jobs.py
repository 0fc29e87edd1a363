"""Writing many files side by side into a folder that appears only when all are complete, and going on after an interruption.

    .converting-NAME/           while it is written
        journal/purpose.json    what is being made of what; another purpose may not continue here
        journal/FILE.json       FILE is complete: its size, its checksum, and what the conversion wants to know of it later
        FILE, ...
    NAME/                       by one rename, without the journal

A file counts as finished when its entry in the journal is there, which is written after the file is on the disk. On the next start
finished files are read back and kept if size and checksum are those of the entry; all others are written anew.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moerl.errors import CheckpointError, MoerlError

_READ_BYTES = 1 << 22
_WRITE_BYTES = 1 << 20
"""So few that they are still in a core's cache when the second of file and checksum gets them."""
_SPARE_BYTES = 64 << 20
"""Left free on the disk, for metadata and for others."""


class Output:
    """One file being written from its start, with its checksum.

    A stream as torch's checkpoint writer wants one. Its own errors are kept, since torch may turn them into others.
    """

    def __init__(self, path: Path, advance: Callable[[int], None]):
        self._file = path.open("wb", buffering=0)
        self._advance, self._digest, self._written = advance, xxhash.xxh3_64(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        try:
            while len(view):
                part = view[:_WRITE_BYTES]
                count = self._file.write(part)
                self._digest.update(part[:count])
                view = view[count:]
                self._written += count
                self._advance(count)
        except OSError as error:
            self.error = error
            raise
        return total

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Nothing is buffered here."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """One file to write.

    Attributes:
        nbytes: about how many bytes it will have.
        write: fills the file; returns what the conversion wants to know of it later, fit for JSON.
    """

    name: str
    nbytes: int
    write: Callable[[Output], Any]


@dataclass(frozen=True)
class Written:
    """A finished file. `kept`: from an earlier start."""

    name: str
    nbytes: int
    checksum: str
    result: Any
    kept: bool


def aside(final: Path) -> Path:
    """Where `final` is written until it is complete."""
    return final.with_name(f".converting-{final.name}")


def prepare(final: Path, purpose: dict[str, Any]) -> Path:
    """The folder to write to: a new one, or that of an interrupted conversion with the same purpose.

    Raises:
        CheckpointError: `final` exists, or the folder aside belongs to another conversion.
    """
    if final.exists():
        raise CheckpointError(f"{final} exists; choose another folder, or remove it")
    folder = aside(final)
    stated = folder / "journal" / "purpose.json"
    if stated.is_file():
        before = json.loads(stated.read_text())
        if changed := [name for name in sorted({*before, *purpose}) if before.get(name) != purpose.get(name)]:
            lines = (f"  - {name}: then {_shown(before.get(name))}, asked for {_shown(purpose.get(name))}" for name in changed)
            raise CheckpointError(
                f"{folder} holds another conversion that was interrupted; remove it to start anew, or repeat that one:\n" + "\n".join(lines)
            )
    elif folder.exists():
        raise CheckpointError(f"{folder} exists, but is no interrupted conversion; remove it")
    else:
        stated.parent.mkdir(parents=True)
        _put(stated, purpose)
    return folder


def publish(folder: Path, final: Path) -> None:
    """Give the complete folder its name."""
    shutil.rmtree(folder / "journal")
    _sync(folder)
    folder.rename(final)
    _sync(final.parent)


def run(folder: Path, jobs: Sequence[Job], workers: int, advance: Callable[[int], None]) -> list[Written]:
    """Write what is not finished yet, `workers` files at a time; the result is in the order of `jobs`.

    Args:
        advance: told of bytes as they are written, from any thread; of a kept file's bytes at once.

    Raises:
        CheckpointError: the disk is or becomes full, or refuses to be written to. What a job raises. Finished files stay, for the next
            start, in all cases.
    """
    finished = {job.name: kept for job in jobs if (kept := _kept(folder, job.name)) is not None}
    for kept in finished.values():
        advance(kept.nbytes)
    left = [job for job in jobs if job.name not in finished]
    need, free = sum(job.nbytes for job in left) + _SPARE_BYTES, shutil.disk_usage(folder).free
    if left and need > free:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed; make room, then run the same command again"
        )
    stop = threading.Event()

    def told(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        advance(count)

    # A worker goes on while what it wrote goes to the disk.
    with ThreadPoolExecutor(workers, "convert") as writers, ThreadPoolExecutor(workers, "flush") as flushers:
        writing = [writers.submit(_write, folder, job, told) for job in left]
        try:
            flushing = [flushers.submit(_flush, folder, *done.result()) for done in as_completed(writing)]
            for done in as_completed(flushing):
                written = done.result()
                finished[written.name] = written
        except BaseException:
            stop.set()
            writers.shutdown(wait=True, cancel_futures=True)
            raise
    return [finished[job.name] for job in jobs]


class _Stopped(Exception):
    """This file is given up because another could not be written, or because of Ctrl-C."""


def _write(folder: Path, job: Job, advance: Callable[[int], None]) -> tuple[Job, Output, Any]:
    """A job, its file, filled and still open, and its result."""
    output = Output(folder / job.name, advance)
    try:
        with _explained(folder, job, output):
            return job, output, job.write(output)
    except BaseException:
        output.close()
        raise


def _flush(folder: Path, job: Job, output: Output, result: Any) -> Written:
    """Have a filled file on the disk, and then its entry in the journal."""
    try:
        with _explained(folder, job, output):
            os.fsync(output.fileno())
    finally:
        output.close()
    written = Written(job.name, output.tell(), output.checksum, result, False)
    _put(_entry(folder, job.name), {"nbytes": written.nbytes, "checksum": written.checksum, "result": result})
    return written


@contextmanager
def _explained(folder: Path, job: Job, output: Output) -> Iterator[None]:
    try:
        yield
    except (MoerlError, _Stopped):
        raise
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a stream's OSError
        cause = output.error or error
        if not isinstance(cause, OSError):
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else f"{cause.strerror or cause}"
        hint = "make room" if full else "repair that"
        raise CheckpointError(
            f"{folder / job.name}: {what} after {output.tell() / 1e9:.2f} of about {job.nbytes / 1e9:.2f} GB; {hint}, then run the same "
            "command again: finished files are kept"
        ) from error


def checksum(path: Path) -> str:
    """Of a file as it is on the disk, in the form of `Output.checksum`."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _kept(folder: Path, name: str) -> Written | None:
    entry = _entry(folder, name)
    if not entry.is_file():
        return None
    found, path = json.loads(entry.read_text()), folder / name
    if path.is_file() and path.stat().st_size == found["nbytes"] and checksum(path) == found["checksum"]:
        return Written(name, found["nbytes"], found["checksum"], found["result"], True)
    entry.unlink()
    return None


def _entry(folder: Path, name: str) -> Path:
    return folder / "journal" / f"{name}.json"


def _put(path: Path, content: Any) -> None:
    """Write JSON so that the file is complete or absent, whatever happens."""
    writing = path.with_name(f".{path.name}")
    with writing.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    writing.rename(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."
