"""Every family in real Megatron: loaded, cut and gathered bit for bit, and its layouts compute what one process computes.

The layouts of DeepSeek-V3 are in `test_layouts.py`; these are cases of the same workers.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.parallel.test_layouts import FULL, LIMITS, case, compared, misrouted

pytestmark = pytest.mark.timeout(600)

CHECKS = ["gathered", "forward", "natural", "replay"]
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "moe"]}
LAYOUTS = {
    "tp2": {"tp": 2},
    "ep2": {"ep": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_etp2": {"tp": 2, "etp": 2},
}
MODELS = {"qwen3": list(LAYOUTS), "qwen3_tied": ["tp2", "pp2"], "glm4": ["tp2", "pp2"], "deepseek_v2": ["cp2", "tp2_ep2"]}
"""Model -> the layouts that are compared with one process."""

ONE = {
    **{model: case(CHECKS, model=model) for model in MODELS},
    "qwen3-full": case(["replay"], FULL, model="qwen3"),
    "qwen3-selective": case(["replay"], SELECTIVE, model="qwen3"),
}
TWO = {
    **{f"{model}-{layout}": case(CHECKS, model=model, **LAYOUTS[layout]) for model, layouts in MODELS.items() for layout in layouts},
    **{f"deepseek-{layout}": case(["gathered"], **sizes) for layout, sizes in LAYOUTS.items()},
}


@pytest.mark.parametrize("name", TWO)
def test_what_is_loaded_cut_and_gathered_is_the_folder_bit_for_bit(name, found, small_models):
    got, folder = found(2, TWO, name), load_file(small_models / TWO[name]["model"] / "model.safetensors")
    gathered = {one.removeprefix("gathered/weights/"): got[one] for one in got if one.startswith("gathered/weights/")}
    assert gathered.keys() == folder.keys()
    assert not [weight for weight, tensor in folder.items() if not np.array_equal(gathered[weight], tensor)]


@pytest.mark.parametrize("check", ["forward", "natural", "replay"])
@pytest.mark.parametrize("name", [name for name in TWO if "forward" in TWO[name]["checks"]])
def test_layout_equals_one_process(name, check, found):
    # Advantages of both signs cancel to 1/200 of the terms in one of these losses; the log-probabilities have the usual limit.
    wrong = compared(found(2, TWO, name), found(1, ONE, TWO[name]["model"]), check, LIMITS[check] | {"loss": 1e-5})
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in TWO if "replay" in TWO[name]["checks"]])
def test_dispatchers_receive_the_trace(name, found):
    wrong = misrouted(found(2, TWO, name), "replay", "forward")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["qwen3-full", "qwen3-selective"])
def test_recomputation_is_bit_exact(name, found):
    recomputed, expected = found(1, ONE, name), found(1, ONE, "qwen3")
    names = [one for one in recomputed if "_recomputed" not in one]
    assert len(names) > 100
    assert not [one for one in names if not np.array_equal(recomputed[one], expected[one])]
