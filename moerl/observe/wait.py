"""Named waits: each has a deadline, a heartbeat line in the log, and a dump of all stacks when the deadline passes.

    with waiting("weights on engine 0", who="rank 0", ...)   blocking code
    await await_named(coroutine, "health of engine 0", ...)  asyncio
    poll_until(predicate, "port 3000", ...)                  a condition

All end in `WaitTimeout`, which says who waited for what and for how long.
"""

import asyncio
import ctypes
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from moerl.errors import WaitTimeout

log = logging.getLogger(__name__)

_INTERRUPT_GRACE_S = 10.0


@contextmanager
def waiting(name: str, *, timeout_s: float, heartbeat_s: float, who: str = "", hard: bool = False) -> Iterator[None]:
    """Watch a block of code that may wait.

    A deadline that passes is raised in the block as soon as it runs Python code again. A block that sits in native code (a
    collective, say) cannot be reached: with `hard` the process then ends with status 70, so that a launcher that supervises
    it stops the others; without, the error is raised when the block returns.

    Raises:
        WaitTimeout: the block took longer than `timeout_s`, even if it finished in the end.
    """
    watch = _Watch(name, who, timeout_s, heartbeat_s, hard, threading.get_ident())
    watch.thread.start()
    try:
        yield
    except WaitTimeout as error:
        watch.finish()
        if watch.expired and not error.args:  # the interruption itself, not an error of the block's own
            raise WaitTimeout(watch.sentence()) from None
        raise
    except BaseException:
        watch.finish()
        raise
    watch.finish()
    if watch.expired:
        raise WaitTimeout(watch.sentence())


async def await_named[T](coroutine: Coroutine[Any, Any, T], name: str, *, timeout_s: float, heartbeat_s: float, who: str = "") -> T:
    """Await with a deadline; the coroutine is cancelled, and its cancellation awaited, when it passes.

    Raises:
        WaitTimeout: the deadline passed.
    """
    task = asyncio.ensure_future(coroutine)
    start = time.monotonic()
    try:
        while True:
            left = timeout_s - (time.monotonic() - start)
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(heartbeat_s, left)))
            if done:
                return task.result()
            if left <= heartbeat_s:
                break
            log.info(_heartbeat(name, who, time.monotonic() - start, timeout_s))
        sentence = _expired(name, who, timeout_s)
        log.error("%s\n%s", sentence, _task_stacks())
        raise WaitTimeout(sentence)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_INTERRUPT_GRACE_S)


def poll_until[T](
    predicate: Callable[[], T], name: str, *, timeout_s: float, heartbeat_s: float, who: str = "", interval_s: float = 0.1
) -> T:
    """Call `predicate` until it returns something true, and return that.

    Raises:
        WaitTimeout: it stayed false until the deadline.
    """
    start = beat = time.monotonic()
    while True:
        if result := predicate():
            return result
        now = time.monotonic()
        if now - start >= timeout_s:
            sentence = _expired(name, who, timeout_s)
            log.error("%s\n%s", sentence, thread_stacks())
            raise WaitTimeout(sentence)
        if now - beat >= heartbeat_s:
            beat = now
            log.info(_heartbeat(name, who, now - start, timeout_s))
        time.sleep(min(interval_s, max(0.0, timeout_s - (now - start))))


def thread_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in sys._current_frames().items()
    )


class _Watch:
    """The thread behind `waiting`: heartbeats, then the interruption."""

    def __init__(self, name: str, who: str, timeout_s: float, heartbeat_s: float, hard: bool, waiter: int):
        self.name, self.who, self.timeout_s, self.heartbeat_s, self.hard, self.waiter = name, who, timeout_s, heartbeat_s, hard, waiter
        self.expired = False
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"wait: {name}", daemon=True)

    def sentence(self) -> str:
        return _expired(self.name, self.who, self.timeout_s)

    def finish(self) -> None:
        """The block has ended: stop watching, and take back an interruption that has not been delivered."""
        with self._lock:
            self._done.set()
            if self.expired:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.waiter), None)

    def _run(self) -> None:
        start = time.monotonic()
        while True:
            left = self.timeout_s - (time.monotonic() - start)
            if self._done.wait(max(0.0, min(self.heartbeat_s, left))):
                return
            if left <= self.heartbeat_s:
                break
            log.info(_heartbeat(self.name, self.who, time.monotonic() - start, self.timeout_s))
        with self._lock:
            if self._done.is_set():
                return
            self.expired = True
            log.error("%s\n%s", self.sentence(), thread_stacks())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.waiter), ctypes.py_object(WaitTimeout))
        if self.hard and not self._done.wait(_INTERRUPT_GRACE_S):
            log.critical("%s; it sits in native code and cannot be interrupted, so this process ends", self.sentence())
            logging.shutdown()
            os._exit(70)


def _subject(who: str) -> str:
    return who or f"process {os.getpid()}"


def _heartbeat(name: str, who: str, waited_s: float, timeout_s: float) -> str:
    return f"{_subject(who)} has waited {waited_s:.0f} s for {name} (deadline {timeout_s:g} s)"


def _expired(name: str, who: str, timeout_s: float) -> str:
    return f"{_subject(who)} waited {timeout_s:g} s for {name}, and it did not come; the log holds the stacks of that moment"


def _task_stacks() -> str:
    """Where every asyncio task of the running loop stands."""
    lines = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=8)
        stack = "".join(traceback.format_list([traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]))
        lines.append(f"task {task.get_name()}:\n{stack}")
    return "\n".join(lines)
