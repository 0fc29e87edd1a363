"""Memory of one process that others on the same machine can map: a file without a name.

    Shelf.offer (numbers that fit a message) --attach in another process--> the same bytes, uint8

The file is a memfd, which peers open through `/proc/<pid>/fd`. It never has a name, so that nothing can be left behind, whatever kills
the process; only processes that may debug this one can open it (same user, same PID namespace); and, unlike files in /dev/shm, it is not
bounded by the size of that mount, which is 64 MB in many containers. Processes in different PID namespaces cannot share it.
"""

import errno
import os
import secrets
import struct
from collections.abc import Sequence

import torch

_FRONT_BYTES = 4096
"""Holds the token by which a peer knows that it mapped the right file."""

OFFER_WORDS = 5


class Shelf:
    """Owner's side; `close` it, or drop it.

    Attributes:
        memory: uint8[nbytes], all pages allocated.
        offer: what `attach` needs, int64[OFFER_WORDS].

    Raises:
        OSError: the memory is not to be had.
    """

    def __init__(self, nbytes: int):
        token, size = secrets.randbits(63), _FRONT_BYTES + nbytes
        self._file = os.fdopen(os.memfd_create("moerl-buckets", os.MFD_CLOEXEC), "r+b", buffering=0)
        fd = self._file.fileno()
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size)  # now, because a page that cannot be had later would kill the process
            self._file.write(struct.pack("<q", token))
            self.memory = _map(fd, size)
        except OSError:
            self.close()
            raise
        status = os.fstat(fd)
        self.offer = (os.getpid(), fd, status.st_dev, status.st_ino, token)

    def close(self) -> None:
        """Nobody can attach any more; the memory is freed when nobody holds a view of it, here or in peers."""
        self._file.close()


def attach(offer: Sequence[int], nbytes: int) -> torch.Tensor:
    """uint8[nbytes], another process's `Shelf.memory`.

    Raises:
        OSError: it cannot be reached from here; ESTALE if that process has something else under these numbers.
    """
    pid, number, device, inode, token = offer
    path, size = f"/proc/{pid}/fd/{number}", _FRONT_BYTES + nbytes
    status = os.stat(path)  # first, because merely opening some other kind of file may block or change it
    if (status.st_dev, status.st_ino, status.st_size) != (device, inode, size):
        raise OSError(errno.ESTALE, "another file has this number", path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, 8, 0) != struct.pack("<q", token):
            raise OSError(errno.ESTALE, "another file has this number", path)
        return _map(fd, size)
    finally:
        os.close(fd)


def _map(fd: int, size: int) -> torch.Tensor:
    try:
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)[_FRONT_BYTES:]
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"cannot map {size} bytes: {error}") from error
