"""What a conversion would take, without doing it: disk rates measured on a few megabytes, and the sizes that are known."""

import os
import shutil
import tempfile
import time
from pathlib import Path

_SAMPLE_BYTES = 32 << 20
_PIECE_BYTES = 1 << 22


def write_rate(folder: Path) -> float:
    """Bytes per second that reach the disk under `folder`, of `_SAMPLE_BYTES` in one new file."""
    piece = os.urandom(_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=_existing(folder)) as file:
        start = time.perf_counter()
        for _ in range(_SAMPLE_BYTES // _PIECE_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return _SAMPLE_BYTES / (time.perf_counter() - start)


def read_rate(path: Path) -> float:
    """Bytes per second of the first `_SAMPLE_BYTES` of a file; of memory, if it was read or written lately."""
    start, done = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        while done < _SAMPLE_BYTES and (part := file.read(_PIECE_BYTES)):
            done += len(part)
    return max(done, 1) / (time.perf_counter() - start)


def free_bytes(folder: Path) -> int:
    """Of the disk that `folder` is or would be on."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
