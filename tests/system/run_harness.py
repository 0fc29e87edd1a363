"""What the tests of whole runs share: settings of a very small run, and commands that are started, watched and ended.

Every process that a command starts becomes the test process's own if it is orphaned, so that none can hide.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moerl.train.processes import descendants

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
[model]
path = "{model}"
[task]
options = {{ min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1 }}
strip_question = "(State the final answer to the following arithmetic problem:)|(\\\\s)"
prompts = 200
heldout_prompts = 16
reward = "exact_integer"
[rollout]
prompts_per_step = 4
group_size = 4
max_prompt_tokens = 16
max_new_tokens = 6
[engine]
device = "cpu"
max_total_tokens = 4096
max_running_requests = 16
[train]
device = "cpu"
dtype = "float32"
steps = 4
tokens_per_microbatch = 512
lr = 1e-3
[sync]
bucket_mib = 1
[checkpoint]
every_steps = 2
keep = 4
[observe]
console = false
"""


@dataclass(frozen=True)
class Finished:
    """A finished command: its run folder, what it printed, and the processes that it left behind."""

    folder: Path
    output: str
    status: int
    left: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def engine_log(self) -> str:
        return (self.folder / "logs" / "engine-0.log").read_text(errors="replace")


@dataclass
class Started:
    """A command that runs. Its standard output and error go to one file."""

    process: subprocess.Popen
    folder: Path
    output: Path
    before: set[int]

    def processes(self) -> dict[int, str]:
        """Id -> command line (or, of a renamed process, its title) of everything that the command has started."""
        return {pid: _title(pid) for pid in descendants(os.getpid(), without=self.before)}

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout_s: float = 300.0) -> Any:
        """Poll until the condition gives something true; it may meet files that are not there yet."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.output.read_text()[-4000:]}"
            with contextlib.suppress(FileNotFoundError):
                if found := condition():
                    return found
            time.sleep(0.1)
        raise AssertionError(f"waited {timeout_s} s for {what}:\n{self.output.read_text()[-4000:]}")

    def steps(self) -> list[int]:
        """Steps in `metrics.jsonl` so far; -1 is the evaluation before the first."""
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def finish(self, timeout_s: float) -> Finished:
        """Wait for the command's end, then for the end of what it started."""
        status = self.process.wait(timeout_s)
        return Finished(self.folder, self.output.read_text(), status, self.left())

    def reap(self) -> None:
        """Orphans that have ended are zombies until their new parent, this process, takes note."""
        for pid in self.processes():
            if pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def left(self, timeout_s: float = 2.0) -> list[str]:
        """What is still running after a moment, for a command that has ended."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.05)
        return sorted(left.values())


@contextlib.contextmanager
def running(argv: list[str], folder: Path, *, python_path: str, output: Path) -> Iterator[Started]:
    """Run a command of this interpreter (`-m module …`); nothing of it is left afterwards, however the block ends."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    before = set(descendants(os.getpid()))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as sink:
        process = subprocess.Popen([sys.executable, *argv], stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=output.parent)
    started = Started(process, folder, output, before)
    try:
        yield started
    finally:
        for pid in started.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        started.left(10.0)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
