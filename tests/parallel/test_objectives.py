"""Objectives of whole sequences, in the trainer: sequences that context parallelism has cut give one process's loss and gradients."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(600)

OBJECTIVES = {
    "gspo": {
        "loss": "gspo",
        "old_policy": "engine",
        "correction": "none",
        "clip_low": 0.02,
        "clip_high": 0.02,
        "length_normalization": "sequences",
        "opsm_threshold": 0.03,
    },
    "mis_sequence": {"correction": "mis_sequence", "mis_cap": 1.05, "length_normalization": "constant"},
    "cispo": {"loss": "cispo"},
}
METRICS = {
    "gspo": {"loss", "clip_share", "clip_share_of_sequences", "opsm_masked_share", "opsm_masked_share_of_sequences"},
    "mis_sequence": {"loss", "correction_ess", "correction_weight", "correction_cut_share_of_sequences"},
    "cispo": {"loss", "clip_share"},
}


@pytest.fixture(scope="module")
def layouts(torchrun, small_models, tmp_path_factory) -> dict[str, dict[str, np.ndarray]]:
    folder, found = tmp_path_factory.mktemp("objectives"), {}
    for name, processes, parallel in (("single", 1, {}), ("cp2", 2, {"cp": 2})):
        arguments = (str(small_models / "deepseek"), str(folder / f"{name}.npz"), json.dumps(parallel), json.dumps(OBJECTIVES))
        done = torchrun(processes, "objective_worker.py", *arguments, timeout_s=250)
        assert done.returncode == 0, done.stdout[-3000:]
        found[name] = dict(np.load(folder / f"{name}.npz"))
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_cut_sequences_change_nothing(layouts, name: str) -> None:
    single, cut = layouts["single"], layouts["cp2"]
    compared = {key for key in single if key.startswith((f"{name}/grad/", *(f"{name}/metric/{metric}" for metric in METRICS[name])))}
    assert {f"{name}/metric/{metric}" for metric in METRICS[name]} <= compared
    wrong = [key for key in sorted(compared) if np.abs(single[key] - cut[key]).max() > 1e-5 * max(np.abs(single[key]).max(), 1e-6)]
    assert not wrong


def test_the_cases_are_not_empty(layouts) -> None:
    """Some sequences are clipped, masked or cut, and some are not; every objective has a gradient of its own."""
    single = layouts["single"]
    for key in ("gspo/metric/clip_share_of_sequences", "gspo/metric/opsm_masked_share_of_sequences"):
        assert 0 < single[key] < 1, key
    assert 0 < single["mis_sequence/metric/correction_cut_share_of_sequences"] < 1
    gradients = [np.concatenate([single[key].ravel() for key in sorted(single) if key.startswith(f"{name}/grad/")]) for name in OBJECTIVES]
    assert all(np.abs(one).max() > 0 for one in gradients)
    assert all(not np.allclose(gradients[i], gradients[j]) for i in range(3) for j in range(i))
