"""Real Ray and a real engine in a driver of their own: an engine's death and revival, Ctrl-C, and the driver's sudden death."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = Path(__file__).with_name("cluster_driver.py")
ROOT = DRIVER.parents[2]


@pytest.fixture
def drive(tiny_model, tmp_path):
    """Start the driver; yields (process, facts up to and including the first with `until`)."""
    started = []

    def start(mode):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "driver.err").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(tiny_model), str(tmp_path), mode],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,
            )
        started.append(process)
        facts = {}
        for line in process.stdout:
            facts |= json.loads(line)
            if "generating" in facts:
                return process, facts
        raise AssertionError(f"the driver ended with {process.wait()}:\n{(tmp_path / 'driver.err').read_text()[-4000:]}")

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def running(pids):
    """Those that still run; a zombie does not."""
    left = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                left.append(pid)
        except OSError:
            continue
    return left


def wait_until_gone(pids, timeout_s):
    deadline = time.monotonic() + timeout_s
    while left := running(pids):
        if time.monotonic() > deadline:
            names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200] for pid in left}
            raise AssertionError(f"still running after {timeout_s} s: {names}")
        time.sleep(0.1)


def test_an_engine_is_revived_and_ctrl_c_leaves_nothing_behind(drive):
    process, facts = drive("through-death")
    assert facts["prompts"] == [0, 1, 2, 3]
    assert facts["traces"] > 100
    assert "was killed by SIGKILL" in facts["died"]
    assert facts["seconds"] < 60
    assert (facts["restarted"], facts["version"], facts["versions"]) == ([0], None, [2])
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(90) != 0
    wait_until_gone(facts["generating"], 10)


def test_the_drivers_sudden_death_takes_everything_with_it(drive):
    process, facts = drive("at-once")
    assert len(facts["generating"]) > 5
    # Two helper processes of Ray itself look for its death only now and then.
    helpers = [pid for pid in facts["generating"] if b"Agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    wait_until_gone([pid for pid in facts["generating"] if pid not in helpers], 30)
    wait_until_gone(helpers, 200)
