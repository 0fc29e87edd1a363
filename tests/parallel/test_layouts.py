"""Every parallel layout computes what one process computes: log-probabilities, routes, loss, gradients, one optimizer step."""

import numpy as np
import pytest

SINGLE = {"single": "", "recompute": "recompute=1"}
TWO = {
    "dp2": "",
    "ep2": "ep=2",
    "tp2": "tp=2",
    "pp2": "pp=2",
    "cp2": "cp=2",
    "tp2_ep2": "tp=2,ep=2",
    "tp2_etp2": "tp=2,etp=2",
    "pp2_vpp2": "pp=2,vpp=2",
    "pp2_recompute": "pp=2,recompute=1",
    "pp2_vpp2_recompute": "pp=2,vpp=2,recompute=1",
}
FOUR = {
    "tp2_pp2_ep2": "tp=2,pp=2,ep=2",
    "cp2_tp2_ep4": "cp=2,tp=2,ep=4",
    "pp2_vpp2_cp2_ep2": "pp=2,vpp=2,cp=2,ep=2",
    "pp2_dp2_ep2": "pp=2,ep=2",
}


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(got.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-12))


def compare(got, expected) -> None:
    """Arrays of one layout against those of a single process."""
    assert set(got.files) == set(expected.files)
    limits = {"weights": 0.0, "off": 1e-6, "on": 1e-6, "grad_off": 1e-5, "grad_on": 1e-5, "agreement": 0.0, "norm": 1e-6}
    for name in expected.files:
        kind = name.split("/")[0]
        if name == "first/routes":
            assert np.array_equal(np.sort(got[name], -1), np.sort(expected[name], -1))
            continue
        if kind == "stepped":
            compare_steps(name.removeprefix("stepped/"), got, expected)
            continue
        limit = limits.get(kind, 1e-6)
        assert relative(got[name], expected[name]) <= limit, f"{name} differs by {relative(got[name], expected[name]):.1e}"


def compare_steps(weight: str, got, expected) -> None:
    """AdamW's first step is the gradient's sign: only where the gradient is far from zero does rounding not decide it."""
    difference = np.abs(got[f"stepped/{weight}"] - expected[f"stepped/{weight}"])
    if f"grad_on/{weight}" not in expected.files:
        assert difference.max() == 0, f"{weight} has no gradient but moved"
        return
    gradient = np.abs(expected[f"grad_on/{weight}"])
    assert difference[gradient > 1e-3 * gradient.max()].max() < 1e-6, weight
    assert difference.max() < 2.1e-3, weight


@pytest.fixture(scope="session")
def single(run_layouts):
    return np.load(run_layouts(1, SINGLE) / "single.npz")


@pytest.mark.parametrize("layout", TWO)
def test_two_processes_equal_one(layout, run_layouts, single):
    compare(np.load(run_layouts(2, TWO) / f"{layout}.npz"), single)


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_processes_equal_one(layout, run_layouts, single):
    compare(np.load(run_layouts(4, FOUR) / f"{layout}.npz"), single)


def test_full_recompute_under_replay_is_bit_exact(run_layouts, single):
    recomputed = np.load(run_layouts(1, SINGLE) / "recompute.npz")
    assert set(recomputed.files) == set(single.files)
    for name in single.files:
        assert np.array_equal(recomputed[name], single[name]), name


def test_replay_forced_every_decision(single):
    assert single["agreement/agreeing"] == single["agreement/total"] > 0
    assert relative(single["first/forced"], single["first/natural"]) > 0.01, "random routes must change the log-probabilities"
