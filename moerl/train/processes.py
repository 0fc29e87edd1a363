"""The processes of a run, as its launcher sees them: whatever happens, none of them outlives it. Linux only.

with no_process_left():     orphans of the run become this process's children
    start and supervise     -> on leaving, what still runs below this process is ended, whoever started it
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERM_S, _END_TIMEOUT_S = 1.0, 10.0


def stop_with_parent() -> None:
    """From now on this process receives SIGTERM when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """On leaving, end everything that was started below this process meanwhile; processes that it had before are left alone."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = set(descendants(os.getpid()))
    try:
        yield
    finally:
        start = time.monotonic()
        while (left := descendants(os.getpid(), without=before)) and (waited := time.monotonic() - start) < _END_TIMEOUT_S:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    # Python's resource trackers ignore the first, and remove what killed processes left before they go by themselves
                    os.kill(pid, signal.SIGTERM if waited < _TERM_S else signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):  # not (yet) this process's own child
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def descendants(root: int, *, without: set[int] = frozenset()) -> list[int]:
    """Ids of all processes below `root`, nearest first; zombies count only while they are `root`'s own children.

    Args:
        without: these and, as far as they are not reached otherwise, what is below them are left out.
    """
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state ppid …; the name may contain anything, so split after its last parenthesis
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" or int(parent) == root:
            parents[int(stat.parent.name)] = int(parent)
    found: list[int] = []
    front = {root}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front and pid not in without}
        found += sorted(front)
    return found
