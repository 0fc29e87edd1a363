"""The planner's bounds: algebra, and figures that one can do by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema import Config
from moerl.models import FAMILIES
from moerl.plan import rates
from moerl.plan.assumptions import Assumptions, shape_of
from moerl.plan.engine import EngineWeights
from moerl.plan.trainer import microbatches, training_of
from moerl.reshard.trainer_layout import TrainerTopology
from tests.unit.models import published

ACTIVE = {
    # in billions, as published with the models, which count the embedding (DeepSeek-V3: 37, Kimi-K2: 32) or not, and round
    "DeepSeek-V3": (36.6, 37.6),
    "Kimi-K2-Instruct": (31.0, 33.0),
    "GLM-4.5": (31.0, 33.0),
    "Qwen3-30B-A3B": (3.0, 3.4),
    "Qwen3-235B-A22B": (21.0, 22.3),
    "Moonlight-16B-A3B-Instruct": (2.2, 3.1),
}


def spec_of(model: str):
    config = published.config(model)
    return FAMILIES[config["model_type"]].spec(config)


@pytest.mark.parametrize("model", ACTIVE)
def test_active_parameters_are_as_published(model: str) -> None:
    low, high = ACTIVE[model]
    assert low < rates.active_parameters(spec_of(model)) / 1e9 < high


@given(st.integers(1, 512), st.data())
def test_experts_read_lie_between_one_token_and_all(experts: int, data: st.DataObject) -> None:
    topk, tokens = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 4096))
    found = rates.experts_read(experts, topk, tokens)
    assert rates.experts_read(experts, topk, 1) == pytest.approx(topk)
    assert topk * (1 - 1e-9) <= found <= min(experts, topk * tokens) * (1 + 1e-9)


def test_a_decoding_step_by_hand() -> None:
    spec, assume = spec_of("Qwen3-30B-A3B"), Assumptions(prompt_tokens=100, response_tokens=200, hbm_tb_s=2.0, tflops=1000.0)
    weights = EngineWeights(experts=128 * 10**9, embedding=10**9, rest=2 * 10**9, derived=0)
    found = rates.generation(spec, weights, token_bytes=10**6, tp=1, batch=1, assumptions=assume, group_size=10**9)
    assert found.memory_s == pytest.approx((2e9 + 8e9 + 200 * 1e6) / 2e12)
    active, shape = rates.active_parameters(spec), shape_of(spec)
    assert found.compute_s == pytest.approx((2 * active + 2 * 48 * 32 * 256 * 200) / 1e15)
    assert shape.heads * (shape.key + shape.value) == 32 * 256
    assert found.tokens_per_s == pytest.approx(1 / found.step_s)


@given(st.integers(1, 4096))
def test_larger_batches_never_generate_more_slowly(batch: int) -> None:
    spec, weights = spec_of("DeepSeek-V3"), EngineWeights(40 * 10**9, 10**8, 10**9, 0)

    def speed(batch: int) -> float:
        return rates.generation(spec, weights, 70_000, 16, batch, Assumptions(), 8).tokens_per_s

    assert speed(batch + 1) >= speed(batch)


def test_absorbed_attention_works_on_the_latent() -> None:
    shape = shape_of(spec_of("DeepSeek-V3"))
    assert rates.absorbed_flops(shape, 61, 1.0) == 2 * 61 * 128 * (576 + 512)
    grouped = shape_of(spec_of("Qwen3-30B-A3B"))
    assert rates.absorbed_flops(grouped, 48, 1.0) == rates.attention_flops(grouped, 48, 1.0)


def config_with(**sections) -> Config:
    return Config(model={"path": "unused"}, **sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"diagnostics": {"mismatch_every_steps": 0}}, 3),
        ({"diagnostics": {"mismatch_every_steps": 4}}, 3.25),
        ({"diagnostics": {"mismatch_every_steps": 0}, "megatron": {"recompute_granularity": "full"}}, 4),
        ({"diagnostics": {"mismatch_every_steps": 0}, "objective": {"kl_coef": 0.1}}, 4),
        ({"diagnostics": {"mismatch_every_steps": 0}, "objective": {"epochs_per_batch": 2}}, 7),
    ],
)
def test_forward_passes(sections: dict, expected: float) -> None:
    assert rates.passes(config_with(**sections)) == expected


def test_training_time_by_hand() -> None:
    spec, assume = spec_of("Qwen3-30B-A3B"), Assumptions(tflops=1000.0, mfu=0.5, prompt_tokens=1000, response_tokens=1000)
    training = training_of(config_with(rollout={"prompts_per_step": 8, "group_size": 8}), assume)
    found = rates.training_time(spec, TrainerTopology(4, pp=2), training, assume, 3)
    flops = 6 * rates.active_parameters(spec) + 3 * 2 * 48 * 32 * 256 * 1000
    assert found.flops_per_token == pytest.approx(flops)
    assert found.microbatches == 64 * 2000 / 2 / 4096 + 0.375 == 16
    assert found.bubble == pytest.approx(1 / 17)
    assert found.step_s == pytest.approx(64 * 2000 * flops / (4 * 500e12) * 17 / 16)


def test_interleaved_schedules_need_a_multiple_of_the_stages() -> None:
    training = training_of(config_with(), Assumptions())
    plain = microbatches(replace(training, samples=20, sample_tokens=4096.0), TrainerTopology(8, pp=8))
    interleaved = microbatches(replace(training, samples=20, sample_tokens=4096.0), TrainerTopology(8, pp=8, vpp=2))
    assert (plain, interleaved) == (20, 24)
