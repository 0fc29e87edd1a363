"""One short run through the command line, shared by the tests that look at what it left."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moerl.convert.tiny import tiny_config, write_tiny
from tests.system.run_harness import ROOT, SETTINGS, Finished


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, tiny_config(layers=3, experts=16, topk=4, groups=4, group_topk=2), seed=1)
    return folder


@pytest.fixture(scope="session")
def moerl(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Finished]:
    """Run `moerl train` on the tiny model: name of the run folder, then further arguments."""
    root = tmp_path_factory.mktemp("runs")
    config = root / "tiny.toml"
    config.write_text(SETTINGS.format(model=tiny_model))

    def run(name: str, *arguments: str, timeout_s: float = 240.0, command: str = "train") -> Finished:
        folder = root / name
        argv = [sys.executable, "-m", "moerl.cli", command, "@", str(config), "--run.dir", str(folder), *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=root, check=False)
        return Finished(folder, done.stdout + done.stderr, done.returncode)

    return run


@pytest.fixture(scope="session")
def live_run(moerl: Callable[..., Finished]) -> Finished:
    """Four steps with a real engine, checkpoints after steps 2 and 4."""
    finished = moerl("live")
    assert finished.status == 0, finished.output[-4000:]
    return finished
