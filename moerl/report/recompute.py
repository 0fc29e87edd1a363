"""Record a run afterwards: the trainer's own process scores recorded rollouts with a checkpoint, and writes the run's recordings."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moerl.errors import ReportError

_MODULE = "moerl.train.recompute"


def recompute(run: Path, checkpoint: str, options: Sequence[str]) -> None:
    """Run `python -m moerl.train.recompute RUN --checkpoint CHECKPOINT OPTIONS`; what it prints goes to this process's stderr.

    Raises:
        ReportError: it failed; its own message stands above.
    """
    command = [sys.executable, "-m", _MODULE, str(run), "--checkpoint", checkpoint, *options]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH")) if path)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ReportError(f"recomputing {run} with {checkpoint} failed with status {done.returncode}; its message stands above")
