"""Every parallel layout computes what one process computes, on the experts that it is told to use, recomputing or not.

Each group of cases is one torchrun whose workers run them all. Arrays are named check/kind/name (see `layout_worker.py`).
"""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest

Arrays = Mapping[str, np.ndarray]

pytestmark = pytest.mark.timeout(600)

CORE = ["forward", "capture", "natural", "replay", "perturbed", "optimizer"]
BIAS = ["bias_native", "bias_replayed"]
DEEP = [*CORE, "differences", *BIAS]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MODULES = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj", "layernorm", "mlp", "shared_experts", "moe"],
}
"""All that can be recomputed without Transformer Engine."""
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True}
"""Megatron's schedule that runs one microbatch's expert communication during another's computation; bfloat16 only."""
DENSE_FIRST_STAGE = {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder", "decoder", "decoder", "loss"]]}


def case(
    checks: list[str], megatron: dict[str, Any] | None = None, *, model: str = "deepseek", dtype: str = "float32", **parallel: int
) -> dict[str, Any]:
    return {"model": model, "parallel": parallel, "megatron": megatron or {}, "dtype": dtype, "checks": checks}


LAYOUTS: dict[int, dict[str, Any]] = {
    1: {
        "single": case(DEEP),
        "full": case(["replay", "bias_native"], FULL),
        "moe": case(["replay", "bias_native"], MOE),
        "modules": case(["replay", "bias_native"], MODULES),
    },
    2: {
        "dp2": case([*CORE, *BIAS]),
        "ep2": case(DEEP, ep=2),
        "tp2": case(DEEP, tp=2),
        "pp2": case(DEEP, pp=2),
        "cp2": case(DEEP, cp=2),
        "tp2_ep2": case(CORE, tp=2, ep=2),
        "tp2_etp2": case(CORE, tp=2, etp=2),
        "cp2_ep2": case(CORE, cp=2, ep=2),
        "tp2_ep2_allgather": case(["forward", "replay"], ALLGATHER, tp=2, ep=2),
        "pp2_vpp2": case(CORE, pp=2, vpp=2),
        "pp2_dense_first_stage": case([*CORE, *BIAS], DENSE_FIRST_STAGE, pp=2),
        "ep2_bf16": case(["replay"], dtype="bfloat16", ep=2),
        "ep2_overlapped": case(["replay"], OVERLAPPED, dtype="bfloat16", ep=2),
    },
    4: {
        "tp2_pp2": case(CORE, tp=2, pp=2),
        "tp2_ep2_etp2": case(CORE, tp=2, ep=2, etp=2),
        "cp2_tp2_ep2": case([*CORE, "differences", "bias_native"], cp=2, tp=2, ep=2),
        "tp2_pp2_ep2": case(CORE, tp=2, pp=2, ep=2),
        "cp2_tp2_ep4": case(CORE, cp=2, tp=2, ep=4),
        "pp2_vpp2_cp2_ep2": case(CORE, pp=2, vpp=2, cp=2, ep=2),
        "pp2_dp2_ep2": case(CORE, pp=2, ep=2),
        "pp2_vpp2_ep2_bf16": case(["replay"], dtype="bfloat16", pp=2, vpp=2, ep=2),
        "pp2_vpp2_ep2_overlapped": case(["replay"], OVERLAPPED, dtype="bfloat16", pp=2, vpp=2, ep=2),
    },
}
RECOMPUTED: dict[str, Any] = {
    "pp2_full": case(["replay"], FULL, pp=2),
    "pp2_moe": case(["replay", "bias_native"], MOE, pp=2),
    "pp2_vpp2_full": case(["replay"], FULL, pp=2, vpp=2),
    "pp2_vpp2_moe": case(["replay"], MOE, pp=2, vpp=2),
    "tp2_moe": case(["replay"], MOE, tp=2),
    "ep2_moe": case(["replay"], MOE, ep=2),
    "cp2_moe": case(["replay"], MOE, cp=2),
    "tp2_modules": case(["replay"], MODULES, tp=2),
    "pp2_modules": case(["replay"], MODULES, pp=2),
}

LIMITS = {
    "forward": {"weights": 0.0, "natural": 1e-6, "forced": 1e-6, "loss": 1e-6, "chosen": 0.0},
    "capture": {
        **dict.fromkeys(("sample", "position", "engine_ids", "trainer_ids", "trainer_bias"), 0.0),
        **dict.fromkeys(("natural_logprob", "replay_logprob"), 1e-6),
        **dict.fromkeys(("margin", "flipped_mass"), 1e-3),
    },
    "natural": {"loss": 1e-6, "grad": 1e-5},
    "replay": {"loss": 1e-6, "grad": 1e-5, "agreeing": 0.0, "decisions": 0.0},
    "perturbed": {"natural": 1e-6, "forced": 1e-6, "loss": 1e-6, "chosen": 0.0},
    "bias_native": {"bias": 0.0, "counts": 0.0},
    "bias_replayed": {"bias": 0.0, "counts": 0.0},
}
"""Largest difference from one process, over the array's largest magnitude, by check and kind."""


def layouts(*checks: str, dtypes: tuple[str, ...] = ("float32",)) -> list[Any]:
    """One parameter (processes, cases, name, check) per layout in one of `dtypes` and check that it runs."""
    return [
        pytest.param(processes, cases, name, check, id=f"{name}-{check}", marks=[pytest.mark.slow] if processes > 2 else [])
        for processes, cases in [*LAYOUTS.items(), (2, RECOMPUTED)]
        for name, one in cases.items()
        if one["dtype"] in dtypes
        for check in checks
        if check in one["checks"]
    ]


def arrays(found: Arrays, check: str, kind: str) -> dict[str, np.ndarray]:
    """Name -> array of one kind."""
    return {name.removeprefix(f"{check}/{kind}/"): found[name] for name in found if name.startswith(f"{check}/{kind}/")}


def numbered(found: Arrays, check: str, kind: str) -> Iterator[np.ndarray]:
    """The arrays of one kind, by microbatch."""
    for number in count():
        if f"{check}/{kind}/{number}" not in found:
            return
        yield found[f"{check}/{kind}/{number}"]


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(got.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-12))


def compared(got: Arrays, expected: Arrays, check: str, limits: Mapping[str, float]) -> list[str]:
    """A line for every array of the check, of a kind in `limits`, that is missing or differs by more than its limit."""
    wrong = []
    for name in sorted({*got, *expected}):
        which, kind, *_ = name.split("/")
        if which != check or kind not in limits:
            continue
        if name not in got or name not in expected:
            wrong.append(f"{name}: only {'one process' if name in expected else 'the layout'} has it")
        elif got[name].shape != expected[name].shape:
            wrong.append(f"{name}: shape {got[name].shape}, expected {expected[name].shape}")
        elif not relative(got[name], expected[name]) <= limits[kind]:
            wrong.append(f"{name} differs by {relative(got[name], expected[name]):.1e}, limit {limits[kind]:.0e}")
    return wrong


def misrouted(found: Arrays, check: str, which: str) -> list[str]:
    """A line for every microbatch in which some row's experts at the dispatcher, or counts at the experts, are not the trace's."""
    wrong, traces = [], list(numbered(found, check, "trace"))
    dispatched = list(numbered(found, check, f"dispatched_{which}"))
    assert len(dispatched) == len(traces) > 0
    for number, (trace, used) in enumerate(zip(traces, dispatched, strict=True)):
        assert used.shape == trace.shape
        if places := np.argwhere((used != trace).any(axis=-1)).tolist():
            wrong.append(f"{check}, {which}, microbatch {number}: {len(places)} decisions differ, first (row, MoE layer) {places[0]}")
    received = found[f"{check}/received_{which}"]
    expected = histogram(traces, received.shape[1])
    if (received != expected).any():
        wrong.append(f"{check}, {which}: rows received by experts minus those of the trace: {(received - expected).tolist()}")
    return wrong


def histogram(routes: list[np.ndarray], experts: int) -> np.ndarray:
    """int64[moe_layer, expert] from integer[n, moe_layer, k] arrays."""
    joined = np.concatenate(routes)
    return np.stack([np.bincount(joined[:, layer].ravel(), minlength=experts) for layer in range(joined.shape[1])])


def real_rows(found: Arrays, kind: str, check: str = "forward") -> list[np.ndarray]:
    """Routes per microbatch without padding."""
    every = zip(numbered(found, check, kind), numbered(found, check, "real"), strict=True)
    return [routes[real[: len(routes)]] for routes, real in every]


@pytest.fixture(scope="session")
def single(found) -> Arrays:
    return found(1, LAYOUTS[1], "single")


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("forward", "capture", "natural", "replay", "perturbed"))
def test_layout_equals_one_process(processes, cases, name, check, found, single):
    wrong = compared(found(processes, cases, name), single, check, LIMITS[check])
    assert not wrong, "\n".join(wrong)


def test_a_capture_holds_the_rows_of_its_samples_and_no_others(single):
    """The reference itself, against the choice and the trace as whole microbatches have them."""
    numbers = list(numbered(single, "capture", "numbers"))
    for name, kind in (("trainer_ids", "chosen"), ("engine_ids", "trace")):
        wanted = [whole[(held % 3 > 0) & (held >= 0)] for whole, held in zip(numbered(single, "forward", kind), numbers, strict=True)]
        assert np.array_equal(np.sort(single[f"capture/{name}"], axis=-1), np.concatenate(wanted)), name
    _, counts = np.unique(single["capture/sample"], return_counts=True)
    assert np.array_equal(single["capture/position"], np.concatenate([np.arange(count) for count in counts]))
    assert single["capture/margin"].min() >= 0
    assert 0.3 < single["capture/flipped_mass"].astype(float).mean() < 1


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("forward", "replay", "perturbed", dtypes=("float32", "bfloat16")))
def test_dispatchers_receive_the_trace(processes, cases, name, check, found, single):
    """For every token (padding too) and layer, in recomputations as well, whatever the routers' weights are."""
    got = found(processes, cases, name)
    recomputes = bool(cases[name]["megatron"].get("recompute_granularity"))
    wrong = [line for which in ("forward", "recomputed")[: 1 + recomputes] for line in misrouted(got, check, which)]
    assert not wrong, "\n".join(wrong)
    for trace, expected in zip(numbered(got, check, "trace"), numbered(single, check, "trace"), strict=True):
        assert np.array_equal(trace[: len(expected)], expected), "pipeline parallelism adds rows at the end and changes none"


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("perturbed"))
def test_perturbed_routers_choose_otherwise_without_replay(processes, cases, name, check, found):
    """The control for the test above: what the dispatchers received came from the trace, not from the weights."""
    got = found(processes, cases, name)
    assert abs(got["perturbed/loss/natural"] / got["forward/loss/natural"] - 1) > 1e-2
    assert abs(got["perturbed/loss/forced"] / got["forward/loss/forced"] - 1) > 1e-4, "gate weights come from the live routers"
    before, after = (np.concatenate(real_rows(got, "chosen", check)) for check in ("forward", "perturbed"))
    trace = np.concatenate(real_rows(got, "trace"))
    assert (before != after).any(axis=-1).mean() > 0.2
    assert (after != trace).any(axis=-1).mean() > 0.5


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("optimizer"))
def test_first_step_equals_one_process(processes, cases, name, check, found, single):
    got = found(processes, cases, name)
    assert relative(got["optimizer/norm"], single["optimizer/norm"]) <= 1e-6
    stepped, expected, gradient = arrays(got, check, "stepped"), arrays(single, check, "stepped"), arrays(single, "replay", "grad")
    assert stepped.keys() == expected.keys()
    wrong = [line for weight in expected for line in moved_otherwise(weight, stepped[weight], expected[weight], gradient.get(weight))]
    assert not wrong, "\n".join(wrong)


def moved_otherwise(weight: str, got: np.ndarray, expected: np.ndarray, gradient: np.ndarray | None) -> list[str]:
    """AdamW's first step is the gradient's sign: only where the gradient is far from zero does rounding not decide it."""
    difference = np.abs(got - expected)
    if gradient is None:
        return [f"{weight} has no gradient, but moved by {difference.max():.1e}"] if difference.max() else []
    clear = np.abs(gradient) > 1e-3 * np.abs(gradient).max()
    if difference[clear].max() < 1e-6 and difference.max() < 2.1e-3:
        return []
    return [f"{weight} moved otherwise, by {difference[clear].max():.1e} where the gradient is clear, elsewhere by {difference.max():.1e}"]


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("differences"))
def test_router_gradient_under_replay_is_a_finite_difference(processes, cases, name, check, found):
    got = found(processes, cases, name)
    slopes, gradients = arrays(got, check, "slope"), arrays(got, check, "gradient")
    assert len(slopes) == 4
    for layer, slope in slopes.items():
        assert abs(gradients[layer]) > 1e-3
        assert slope == pytest.approx(gradients[layer], rel=0.01), f"router of layer {layer}"


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts(*BIAS))
def test_expert_bias_counts_real_rows_of_all_ranks(processes, cases, name, check, found, single):
    got = found(processes, cases, name)
    wrong = compared(got, single, check, LIMITS[check])
    assert not wrong, "\n".join(wrong)


def test_expert_bias_counts_the_trace_or_the_routers_own_choice(single):
    """The reference itself: replayed counts are the trace's; native ones the choice's, where no forced layer came before."""
    native, replayed = (np.stack(list(arrays(single, check, "counts").values())) for check in BIAS)
    chosen = histogram(real_rows(single, "chosen"), native.shape[1])
    assert np.array_equal(replayed, histogram(real_rows(single, "trace"), native.shape[1]))
    assert np.array_equal(native[0], chosen[0])
    assert np.array_equal(native.sum(axis=1), replayed.sum(axis=1))
    assert (native != replayed).any()


@pytest.mark.parametrize("check", BIAS)
def test_expert_bias_moves_by_its_rate_towards_balance(check, single):
    bias, before = arrays(single, check, "bias"), arrays(single, "forward", "weights")
    for (name, after), counts in zip(bias.items(), arrays(single, check, "counts").values(), strict=True):
        np.testing.assert_allclose(after - before[name], 1e-3 * np.sign(counts.mean() - counts), atol=1e-7)


@pytest.mark.parametrize(("processes", "cases", "name", "check"), layouts("optimizer"))
def test_frozen_expert_bias_stays(processes, cases, name, check, found):
    got = found(processes, cases, name)
    biases = {weight: after for weight, after in arrays(got, check, "stepped").items() if weight.endswith("correction_bias")}
    assert len(biases) == 4
    for weight, after in biases.items():
        assert np.array_equal(after, got[f"forward/weights/{weight}"]), weight


@pytest.mark.parametrize("name", [name for name in LAYOUTS[1] if name != "single"])
def test_recomputation_under_replay_is_bit_exact(name, found, single):
    recomputed = found(1, LAYOUTS[1], name)
    names = {one for one in recomputed if "_recomputed" not in one}
    assert names == {one for one in single if one.split("/")[0] in ("replay", "bias_native")}
    differing = sorted(one for one in names if not np.array_equal(recomputed[one], single[one]))
    wrong = [f"{one} differs by {relative(recomputed[one], single[one]):.1e}" for one in differing]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("processes", "layout"), [(2, "ep2"), pytest.param(4, "pp2_vpp2_ep2", marks=pytest.mark.slow)])
def test_overlapped_expert_communication_under_replay_is_bit_exact(processes, layout, found):
    got, expected = (found(processes, LAYOUTS[processes], f"{layout}_{schedule}") for schedule in ("overlapped", "bf16"))
    wrong = compared(got, expected, "replay", dict.fromkeys(LIMITS["replay"], 0.0))
    assert not wrong, "\n".join(wrong)


def test_replay_forced_every_decision(single):
    real = sum(len(rows) for rows in real_rows(single, "trace"))
    assert single["replay/agreeing"] == single["replay/decisions"] == 4 * real
    natural, forced = (np.concatenate(list(numbered(single, "forward", kind))) for kind in ("natural", "forced"))
    assert relative(forced, natural) > 0.01, "random routes must change the log-probabilities"
