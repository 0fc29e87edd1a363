"""Runs a long-lived torchrun worker and ends what it started, whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from moerl.train.processes import descendants

ROOT = Path(__file__).parent.parent


def launch(processes: int, script: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess:
    """Run `script` under torchrun; neither it nor a rank, each of which leads its own session, is left when this returns."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)
