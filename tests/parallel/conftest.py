"""Launches the long-lived torchrun workers of this folder and ends what it launched, whatever happens."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moerl.convert.tiny import tiny_config, write_tiny

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def launch(processes: int, script: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess:
    """Run `script` of this folder under torchrun; the whole process group is gone when this returns."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        str(HERE / script),
        *arguments,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess]:
    return launch


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    """A small DeepSeek-V3 whose vocabulary doesn't divide by two and whose norms and router bias are not trivial."""
    folder = tmp_path_factory.mktemp("small")
    config = tiny_config(hidden=64, layers=5, experts=8, topk=2, groups=4, group_topk=2, expert_width=32)
    write_tiny(folder, config | {"vocab_size": 17}, seed=1)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, weight in weights.items():
        if name.endswith("correction_bias"):
            weights[name] = (0.05 * rng.standard_normal(weight.shape)).astype(np.float32)
        if "norm" in name:
            weights[name] = (1 + 0.1 * rng.standard_normal(weight.shape)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def run_layouts(small_model, tmp_path_factory) -> Callable[[int, dict[str, str]], Path]:
    """(processes, {name: sizes}) -> folder with one <name>.npz per layout; each set of layouts is launched once per session."""
    folders: dict[tuple[int, str], Path] = {}

    def run(processes: int, cases: dict[str, str]) -> Path:
        arguments = [f"{name}:{sizes}" for name, sizes in cases.items()]
        key = (processes, " ".join(arguments))
        if key not in folders:
            out = tmp_path_factory.mktemp(f"layouts{processes}")
            done = launch(processes, "layout_worker.py", str(small_model), str(out), *arguments, timeout_s=280)
            errors = "\n".join(path.read_text() for path in out.glob("*.error"))
            assert done.returncode == 0, f"the worker failed:\n{errors}\n{done.stdout[-3000:]}"
            folders[key] = out
        return folders[key]

    return run
