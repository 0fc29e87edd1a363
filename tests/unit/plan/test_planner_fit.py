"""Which sizes the planner refuses, and what it offers instead; the search for a split."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_glm4_config, tiny_qwen3_config
from moerl.errors import ConfigError, ReshardError
from moerl.models import FAMILIES, ModelSpec
from moerl.plan import fit
from moerl.plan.assumptions import Assumptions
from moerl.plan.estimate import Job, as_dict, check_sizes, estimate
from moerl.plan.split import splits
from moerl.plan.trainer import stage_memory, training_of
from moerl.reshard.boxes import kinds
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.fp8_layout import wire_kinds
from moerl.reshard.trainer_layout import TrainerTopology, check_trainer
from tests.unit.models import published

MODELS = ("Moonlight-16B-A3B-Instruct", "Qwen3-30B-A3B")


def spec_of(model: str) -> ModelSpec:
    config = published.config(model)
    return FAMILIES[config["model_type"]].spec(config)


SPECS = {name: spec_of(name) for name in MODELS}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def job(model: str, trainer: TrainerTopology, engine: EngineTopology, **changes) -> Job:
    config = Config(model={"path": model}, megatron=FULL, rollout={"prompts_per_step": 64}, buffer={"max_lag": 1})
    return Job(model, config, SPECS[model], trainer, engine, **{"assumptions": Assumptions(), **changes})


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((tiny_config(), tiny_qwen3_config(), tiny_glm4_config())),
    st.fixed_dictionaries({name: st.sampled_from((1, 2, 3, 4, 8)) for name in ("tp", "pp", "cp", "ep", "etp")}),
    st.sampled_from((1, 2, 4)),
)
def test_sizes_are_refused_exactly_where_the_transfer_plan_refuses_them(config: dict, sizes: dict[str, int], dp: int) -> None:
    topology, spec = TrainerTopology(sizes["tp"] * sizes["pp"] * sizes["cp"] * dp, **sizes), FAMILIES[config["model_type"]].spec(config)
    try:
        check_trainer(spec, topology)
        wrong = False
    except ReshardError:
        wrong = True
    wrong |= bool(spec.megatron["num_attention_heads"] % sizes["tp"])  # Megatron's own demand
    assert bool(fit.trainer_problems(spec, topology)) == wrong


@pytest.mark.parametrize(
    ("trainer", "engine", "sentences"),
    [
        (TrainerTopology(12, tp=3, pp=4), EngineTopology(), ["16 attention heads cannot be split over tp = 3", "as tp="]),
        (TrainerTopology(9, ep=3, pp=3), EngineTopology(), ["64 experts cannot be spread over ep = 3", "9 ranks as tp=1 pp=3"]),
        (TrainerTopology(8, pp=3), EngineTopology(), ["8 ranks are not a multiple of tp * cp * pp = 1 * 1 * 3 = 3", "8 ranks as"]),
        (TrainerTopology(32, pp=32), EngineTopology(), ["27 layers are fewer than pp * vpp = 32 * 1 = 32", "32 ranks as tp=1 pp=16"]),
        (
            TrainerTopology(8),
            EngineTopology(tp=3),
            ["16 attention heads cannot be cut", "nearest legal sizes of the engines: 1 engine(s) of"],
        ),
        (TrainerTopology(8), EngineTopology(tp=4, ep=3), ["not a multiple of ep = 3"]),
    ],
)
def test_illegal_sizes_come_with_the_nearest_legal_ones(trainer: TrainerTopology, engine: EngineTopology, sentences: list[str]) -> None:
    one = job(MODELS[0], trainer, engine)
    with pytest.raises(ConfigError) as caught:
        check_sizes(one, kinds(one.spec))
    for sentence in sentences:
        assert sentence in str(caught.value)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from((2, 6, 8, 12, 24)), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_nearest_sizes_are_legal_and_for_as_many_ranks(world: int, tp: int, pp: int, ep: int) -> None:
    asked = TrainerTopology(world, tp=tp, pp=pp, ep=ep)
    found = fit.nearest_trainer(SPECS[MODELS[0]], asked)
    assert found.world == world
    assert not fit.trainer_problems(SPECS[MODELS[0]], found)
    if not fit.trainer_problems(SPECS[MODELS[0]], asked) and SPECS[MODELS[0]].experts % ep == 0:
        assert found == asked


def test_what_does_not_fit_is_refused_with_its_parts_and_what_would() -> None:
    small = job(MODELS[1], TrainerTopology(4, ep=4), EngineTopology(tp=1))
    with pytest.raises(ConfigError) as caught:
        estimate(small)
    text = str(caught.value)
    assert "trainer: rank 0 (of stage 0 of 1) needs" in text
    assert "GiB of 80: weights" in text
    ranks = int(text.split("nearest that fits: ")[1].split()[0])
    assert ranks > 4
    wide = replace(small, trainer=TrainerTopology(ranks, pp=2, ep=ranks // 2), assumptions=Assumptions(gpu_gib=141))
    assert estimate(wide).sync.ratio == 1.0


def test_an_engine_without_room_for_its_weights_is_offered_more_ranks() -> None:
    with pytest.raises(ConfigError, match=r"with room for 0 tokens of cache; nearest that fits: 1 engine\(s\) of tp=2 ep=1"):
        estimate(job(MODELS[1], TrainerTopology(16, pp=2, ep=8), EngineTopology(tp=1), assumptions=Assumptions(gpu_gib=60)))


def test_a_cache_that_is_too_large_is_offered_what_fits() -> None:
    one = job(MODELS[1], TrainerTopology(16, pp=2, ep=8), EngineTopology(tp=1))
    asked = one.config.engine.model_copy(update={"max_total_tokens": 10**9})
    with pytest.raises(ConfigError, match=r"nearest that fits: engine.max_total_tokens \d+"):
        estimate(replace(one, config=one.config.model_copy(update={"engine": asked})))


def test_uneven_stages_show_the_worst_rank() -> None:
    found = estimate(job(MODELS[0], TrainerTopology(16, pp=4, ep=4), EngineTopology(tp=2)))
    sizes = [sum(parts.values()) for parts in found.stages]
    assert sizes[found.worst] == max(sizes)
    assert len(set(sizes)) == 4
    shown = as_dict(found)["memory_per_rank"]["trainer"]
    assert (shown["stage"], shown["rank"]) == (found.worst, found.worst * 4)


def test_a_split_holds_both_pools_and_no_neighbour_is_faster() -> None:
    base = job(MODELS[1], TrainerTopology(8), EngineTopology(), fill_cache=True)
    found = splits(base, 32)
    best = found[0]
    assert best.gpus <= 32
    assert best.tokens_per_s == max(one.tokens_per_s for one in found)
    for one in found:
        assert not fit.trainer_problems(base.spec, one.trainer)
        stages = stage_memory(base.spec, one.trainer, training_of(base.config, base.assumptions))
        assert max(sum(parts.values()) for parts in stages) <= base.assumptions.budget
    slower = max(best.rollout_s, best.training_s)
    assert best.tokens_per_s == pytest.approx(64 * 8 * 512 / slower)
    assert estimate(replace(base, trainer=best.trainer, engine=best.engine)).tokens_per_s <= best.tokens_per_s


def test_too_few_gpus_say_how_many_would_do() -> None:
    with pytest.raises(
        ConfigError, match="4 GPUs of 80 GiB cannot hold both pools: the trainer needs at least 8 GPUs, an engine at least 1"
    ):
        splits(job(MODELS[1], TrainerTopology(8), EngineTopology(), fill_cache=True), 4)


def test_a_thousand_gpus_are_split_in_seconds() -> None:
    config = published.config("DeepSeek-V3")
    spec = FAMILIES["deepseek_v3"].spec(config)
    fp8 = EngineTopology(fp8_block=(128, 128))
    large = replace(job(MODELS[0], TrainerTopology(8), fp8, fill_cache=True, assumptions=Assumptions(gpu_gib=141)), spec=spec)
    start = time.process_time()
    best = splits(large, 1000)[0]
    assert time.process_time() - start < 20
    assert 900 < best.gpus <= 1000
    assert not fit.block_problems(wire_kinds(spec, fp8), best.trainer, best.engine)
