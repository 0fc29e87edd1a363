"""The layer for multi-token prediction, trained in every parallel layout: as in one process, and without touching any other gradient."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from moerl.convert.tiny import tiny_config, tiny_glm4_config
from tests.parallel.conftest import write_small
from tests.parallel.test_layouts import FULL, moved_otherwise, relative
from tests.torchrun import launch

pytestmark = pytest.mark.timeout(600)

# Vocabularies don't divide by two; one model's stages have different numbers of layers.
MODELS = {
    "deepseek": tiny_config(hidden=64, layers=5, experts=8, topk=2, groups=4, group_topk=2, expert_width=32, mtp=True),
    "glm4": tiny_glm4_config(hidden=64, layers=4, experts=8, topk=2, heads=8, kv_heads=4, head_dim=16, expert_width=32, mtp=True),
    "glm4_tied": tiny_glm4_config(hidden=64, layers=2, experts=8, topk=2, heads=8, kv_heads=4, head_dim=16, expert_width=32, mtp=True)
    | {"tie_word_embeddings": True},
}


def case(model: str = "deepseek", megatron: dict[str, Any] | None = None, **parallel: int) -> dict[str, Any]:
    return {"model": model, "parallel": parallel, "megatron": megatron or {}, "dtype": "float32"}


HEAD_ALONE = {"pipeline_model_parallel_layout": [["embedding", *["decoder"] * 4], ["loss"]]}
LAYOUTS: dict[int, dict[str, Any]] = {
    1: {model: case(model) for model in MODELS},
    2: {
        "dp2": case(),
        "ep2": case(ep=2),
        "tp2": case(tp=2),
        "pp2": case(pp=2),
        "cp2": case(cp=2),
        "tp2_etp2": case(tp=2, etp=2),
        "cp2_ep2": case(cp=2, ep=2),
        "pp2_vpp2": case(pp=2, vpp=2),
        "pp2_full": case(megatron=FULL, pp=2),
        "tp2_full": case(megatron=FULL, tp=2),
        "glm4_tp2_ep2": case("glm4", tp=2, ep=2),
        "glm4_pp2": case("glm4", pp=2),
        "glm4_pp2_head_alone": case("glm4", HEAD_ALONE, pp=2),
        "glm4_cp2": case("glm4", cp=2),
        "glm4_tied_tp2": case("glm4_tied", tp=2),
        "glm4_tied_pp2": case("glm4_tied", pp=2),
    },
    4: {
        "tp2_pp2_ep2": case(tp=2, pp=2, ep=2),
        "cp2_tp2_ep4": case(cp=2, tp=2, ep=4),
        "pp2_vpp2_cp2_ep2": case(pp=2, vpp=2, cp=2, ep=2),
        "glm4_dp2_pp2": case("glm4", pp=2),
    },
}
CASES = [
    pytest.param(processes, name, id=name, marks=[pytest.mark.slow] if processes > 2 else [])
    for processes, cases in LAYOUTS.items()
    for name in cases
]
SEVERAL = [one for one in CASES if one.values[0] > 1]

Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mtp")
    for name, config in MODELS.items():
        write_small(root / name, config | {"vocab_size": 17})
    return root


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> Callable[[int, str], Arrays]:
    """(processes, case) -> its arrays; all cases of one number of processes are one launch."""
    folders: dict[int, Path] = {}

    def find(processes: int, name: str) -> Arrays:
        if processes not in folders:
            out = folders[processes] = tmp_path_factory.mktemp(f"mtp{processes}")
            (out / "cases.json").write_text(json.dumps(LAYOUTS[processes]))
            worker = Path(__file__).with_name("mtp_worker.py")
            done = launch(processes, worker, str(models), str(out), str(out / "cases.json"), timeout_s=500)
            (out / "output").write_text(done.stdout)
        out = folders[processes]
        errors = "\n".join(path.read_text() for path in sorted(out.glob("*.error")))
        assert (out / f"{name}.npz").is_file(), f"the worker wrote nothing for {name}:\n{errors}\n{(out / 'output').read_text()[-3000:]}"
        return np.load(out / f"{name}.npz")

    return find


def arrays(found: Arrays, kind: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{kind}/"): found[name] for name in found if name.startswith(f"{kind}/")}


@pytest.mark.parametrize(("processes", "name"), CASES)
def test_what_is_loaded_and_gathered_is_the_folders_bit_for_bit(processes, name, found, models):
    loaded, folder = arrays(found(processes, name), "loaded"), load_file(models / LAYOUTS[processes][name]["model"] / "model.safetensors")
    assert len(loaded) > 30
    assert not [weight for weight, tensor in loaded.items() if not np.array_equal(tensor, folder[weight])]


@pytest.mark.parametrize(("processes", "name"), CASES)
def test_no_other_gradient_is_touched_in_any_bit(processes, name, found):
    got = found(processes, name)
    assert got["disturbed"] == 0
    assert got["of"] > 100_000
    assert got["loss/all"][0] == got["loss/all"][1]


@pytest.mark.parametrize(("processes", "name"), SEVERAL)
def test_layout_equals_one_process(processes, name, found):
    got, expected = found(processes, name), found(1, LAYOUTS[processes][name]["model"])
    assert got["loss/tokens"] == expected["loss/tokens"] > 100
    assert relative(got["loss/ahead"], expected["loss/ahead"]) < 1e-6
    gradients, single = arrays(got, "grad"), arrays(expected, "grad")
    assert gradients.keys() == single.keys()
    assert not {weight: relative(gradients[weight], one) for weight, one in single.items() if not relative(gradients[weight], one) <= 1e-5}


@pytest.mark.parametrize(("processes", "name"), SEVERAL)
def test_first_step_equals_one_process(processes, name, found):
    """Clipped by the norm of the layer's own gradients, over all ranks."""
    single = found(1, LAYOUTS[processes][name]["model"])
    got, expected = arrays(found(processes, name), "stepped"), arrays(single, "stepped")
    before = arrays(single, "loaded")
    gradient = {weight: one for weight, one in arrays(single, "grad").items() if one.any()}  # unused experts have none
    assert got.keys() == expected.keys()
    wrong = [line for weight in got for line in moved_otherwise(weight, got[weight], expected[weight], gradient.get(weight))]
    assert not wrong, "\n".join(wrong)
    moved = [weight for weight, one in expected.items() if not np.array_equal(one, before[weight])]
    assert {weight for weight in expected if ".experts." not in weight} - set(moved) == {
        weight for weight in expected if weight.endswith("correction_bias")
    }
