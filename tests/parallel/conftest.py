"""The long-lived torchrun workers of this folder, and what they found."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from tests.torchrun import launch

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess]:
    """(processes, script of this folder, arguments…, timeout_s=) -> what became of it."""
    return lambda processes, script, *arguments, **options: launch(processes, HERE / script, *arguments, **options)


SMALL = {
    "deepseek": tiny_config(hidden=64, layers=5, experts=8, topk=2, groups=4, group_topk=2, expert_width=32),
    "qwen3": tiny_qwen3_config(hidden=64, layers=5, experts=8, topk=2, heads=8, kv_heads=4, head_dim=16, expert_width=32),
    "glm4": tiny_glm4_config(hidden=64, layers=4, experts=8, topk=2, heads=8, kv_heads=4, head_dim=16, expert_width=32),
    "deepseek_v2": tiny_deepseek_v2_config(hidden=64, layers=4, experts=8, topk=3, groups=4, group_topk=2, expert_width=32),
    "qwen3_tied": tiny_qwen3_config(hidden=64, layers=3, experts=8, topk=2, expert_width=32)
    | {"tie_word_embeddings": True, "mlp_only_layers": [1]},
}


@pytest.fixture(scope="session")
def small_models(tmp_path_factory) -> Path:
    """A folder for each of `SMALL`; vocabularies don't divide by two, norms and router biases are not trivial."""
    root = tmp_path_factory.mktemp("small")
    for name, config in SMALL.items():
        write_small(root / name, config | {"vocab_size": 17})
    return root


def write_small(folder: Path, config: dict[str, Any]) -> None:
    write_tiny(folder, config, seed=1)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, weight in weights.items():
        if name.endswith("correction_bias"):
            weights[name] = (0.05 * rng.standard_normal(weight.shape)).astype(np.float32)
        if "norm" in name:
            weights[name] = (1 + 0.1 * rng.standard_normal(weight.shape)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def run_layouts(small_models, tmp_path_factory) -> Callable[[int, Mapping[str, Any]], Path]:
    """(processes, cases of layout_worker.py) -> folder with one <name>.npz per case; launched once per session and set of cases."""
    folders: dict[tuple[int, str], Path] = {}

    def run(processes: int, cases: Mapping[str, Any]) -> Path:
        key = (processes, json.dumps(cases))
        if key not in folders:
            out = folders[key] = tmp_path_factory.mktemp(f"layouts{processes}")
            (out / "cases.json").write_text(json.dumps(cases))
            done = launch(processes, HERE / "layout_worker.py", str(small_models), str(out), str(out / "cases.json"), timeout_s=500)
            (out / "output").write_text(done.stdout)
        return folders[key]

    return run


@pytest.fixture(scope="session")
def found(run_layouts) -> Callable[[int, Mapping[str, Any], str], Mapping[str, np.ndarray]]:
    """(processes, cases, name) -> the arrays of one case; fails with the worker's error if it got no further."""

    def find(processes: int, cases: Mapping[str, Any], name: str) -> Mapping[str, np.ndarray]:
        out = run_layouts(processes, cases)
        errors = "\n".join(path.read_text() for path in sorted(out.glob("*.error")))
        assert (out / f"{name}.npz").is_file(), f"the worker wrote nothing for {name}:\n{errors}\n{(out / 'output').read_text()[-3000:]}"
        return np.load(out / f"{name}.npz")

    return find
