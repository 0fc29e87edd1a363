"""Orphans of a run come to its launcher and are ended; what the launcher had before stays."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moerl.train.processes import descendants

ROOT = Path(__file__).resolve().parents[3]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(pid: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launch(code: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_orphan_in_a_session_of_its_own_is_ended_and_older_children_are_not(stubborn):
    process = launch(
        f"""
        import subprocess, sys
        from moerl.train.processes import no_process_left
        older = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
        with no_process_left():
            trap = "trap '' TERM; " if {stubborn} else ""
            # the shell in between ends at once, so its child is an orphan
            shell = f"({{trap}} while :; do sleep 0.1; done) >/dev/null 2>&1 & echo $!"
            orphan = subprocess.run(["setsid", "sh", "-c", shell], capture_output=True, text=True).stdout.strip()
        assert older.poll() is None
        print(older.pid, orphan, flush=True)
        """
    )
    older, orphan = (int(word) for word in process.communicate(timeout=60)[0].split())
    try:
        assert process.returncode == 0
        assert not alive(orphan)
        assert alive(older)
    finally:
        os.kill(older, signal.SIGKILL)


def test_a_process_stops_with_its_parent():
    process = launch(
        """
        import subprocess, sys, time
        child = "from moerl.train.processes import *; import time; stop_with_parent(); print('up', flush=True); time.sleep(600)"
        started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
        started.stdout.readline()
        print(started.pid, flush=True)
        time.sleep(600)
        """
    )
    child = int(process.stdout.readline())
    assert descendants(os.getpid(), without=set()) != []
    assert child in descendants(process.pid)
    assert child not in descendants(os.getpid(), without={process.pid})
    process.kill()
    process.communicate()
    wait_for_end(child)
