"""Models of single ranks of a job, built without weights and without the other ranks, hold what real ones and the plan hold."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moerl.config.load import load_config
from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.errors import ConfigError, ReshardError, TrainError
from moerl.models import FAMILIES, ModelSpec, read_spec
from moerl.models.stages import pipeline_stages
from moerl.plan.assumptions import assumptions_of
from moerl.plan.estimate import Job, job_of
from moerl.plan.holdings import Holding, check_holdings, spread_of
from moerl.reshard.trainer_layout import TrainerTopology, trainer_topology
from moerl.train import megatron
from moerl.train.meta import build_rank, fake_world, hold, on_meta
from moerl.train.preview import build_ranks, holding_lines
from tests.unit.train.test_preview import MODEL, words

FAMILY = {
    "deepseek_v3": tiny_config(),
    "deepseek_v2": tiny_deepseek_v2_config(),
    "glm4_moe": tiny_glm4_config(),
    "qwen3_moe": tiny_qwen3_config(),
}
SIZES = {
    "everything cut": (32, {"tp": 2, "pp": 2, "ep": 4, "etp": 2, "cp": 2}),
    "interleaved stages": (8, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}),
    "uneven stages": (6, {"pp": 3, "ep": 2}),
}


def config_of(**sections) -> Config:
    return Config(model={"path": "unused"}, **sections)


def local(config: Config, world: int) -> TrainerTopology:
    return trainer_topology(config.parallel, world, transformer_engine=False)


def job(name: str, *more: str) -> Job:
    config = load_config(words(name, *more))
    return job_of(config, read_spec(config.model.path), config.parallel.world, assumptions_of({}, config))


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("case", SIZES)
def test_every_rank_holds_what_the_plan_says(family: str, case: str) -> None:
    world, sizes = SIZES[case]
    spec = FAMILIES[family].spec(FAMILY[family])
    config = config_of(parallel=sizes, train={"dtype": "bfloat16"})
    topology = local(config, world)
    holdings = [build_rank(spec, config, rank, world) for rank in sorted({*range(0, world, topology.per_stage), *range(1, world, 5)})]
    check_holdings(spec, topology, 2, holdings)
    assert spread_of(holdings, topology) == pipeline_stages(spec.layers, topology.pp * topology.vpp)


def test_it_is_the_model_that_would_be_trained(tmp_path: Path) -> None:
    spec = write_tiny(tmp_path / "model", FAMILY["deepseek_v3"])
    config = Config(model={"path": str(tmp_path / "model")}, train={"device": "cpu", "dtype": "float32"})
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    try:
        real = hold(megatron.build_model(spec, config, ranks), spec, ranks)
    finally:
        megatron.shutdown()
    assert build_rank(spec, config, 0, 1) == real
    assert real.layers == (5,)
    assert real.nbytes > 4 * real.parameters


@pytest.mark.parametrize("name", MODEL)
def test_ranks_of_a_recipe_hold_what_the_plan_says(name: str) -> None:
    asked = job(name)
    found, holdings = build_ranks(asked)
    assert found == asked
    per_stage = asked.trainer.per_stage
    assert [each.rank for each in holdings] == [*range(0, asked.trainer.world, per_stage), asked.trainer.world - 1]
    assert sum(sum(each.layers) for each in holdings[:-1]) == asked.spec.layers
    # Of the first ranks of all stages: what tensor parallelism cuts, as often as it does, and all experts, are more than the model.
    expert = sum(each.elements.expert for each in holdings[:-1]) * asked.trainer.ep * asked.trainer.etp
    dense = sum(each.elements.dense for each in holdings[:-1])
    total = asked.spec.parameter_count()
    assert expert < total <= expert + dense * asked.trainer.tp < 1.03 * total
    head, *lines = holding_lines(found, holdings)
    assert f"{len(holdings)} ranks" in head
    assert "Transformer Engine is absent here" in head
    assert f"{holdings[0].parameters:,} parameters, {holdings[0].nbytes / 1e9:.3f} GB" in lines[0]
    assert lines[-1].startswith(f"rank     {asked.trainer.world - 1}: stage {asked.trainer.pp - 1} of {asked.trainer.pp},")


def test_layers_that_megatron_spreads_otherwise_move_in_the_plan_too() -> None:
    spread = {"first": "5", "last": "8"}
    asked = job("deepseek_v3_384gpu", *(f"--megatron.num_layers_in_{name}_pipeline_stage={count}" for name, count in spread.items()))
    found, holdings = build_ranks(asked)
    assert found.trainer.stages == (5, 8, 8, 8, 8, 8, 8, 8)
    with pytest.raises(ReshardError, match=r"rank 0: decoder\.layers\.5\.\S+ is missing"):
        check_holdings(asked.spec, replace(asked.trainer, transformer_engine=False), 2, holdings)


def test_both_copies_of_a_tied_embedding_are_counted() -> None:
    spec = FAMILIES["qwen3_moe"].spec({**FAMILY["qwen3_moe"], "tie_word_embeddings": True})
    config = config_of(parallel={"pp": 2, "tp": 2})
    first, last = holdings = [build_rank(spec, config, rank, 4) for rank in (0, 2)]
    check_holdings(spec, local(config, 4), 2, holdings)
    assert "embedding.word_embeddings.weight" in first.shapes
    assert not {"embedding.word_embeddings.weight", "output_layer.weight"} & last.shapes.keys()
    assert last.parameters == first.parameters + spec.hidden_size  # the final norm's


@pytest.mark.parametrize("mtp", ["frozen", "trained"])
def test_the_layer_for_multi_token_prediction_is_held_by_the_last_stage(mtp: str) -> None:
    spec = FAMILIES["deepseek_v3"].spec(tiny_config(mtp=True))
    config = config_of(parallel={"pp": 2, "tp": 2, "ep": 2}, train={"mtp": mtp})
    holdings = [build_rank(spec, config, rank, 4) for rank in (0, 3)]
    check_holdings(spec, replace(local(config, 4), mtp=True), 2, holdings)
    with pytest.raises(ReshardError, match="is not part of this rank's layout"):
        check_holdings(spec, local(config, 4), 2, holdings)


@pytest.fixture(scope="module")
def small() -> tuple[ModelSpec, TrainerTopology, list[Holding]]:
    spec = FAMILIES["deepseek_v3"].spec(FAMILY["deepseek_v3"])
    config = config_of(parallel={"pp": 2, "tp": 2, "ep": 2}, train={"dtype": "float32"})
    return spec, local(config, 4), [build_rank(spec, config, rank, 4) for rank in (0, 3)]


def test_a_shape_that_the_plan_has_wrong_is_named_on_every_rank(small: tuple[ModelSpec, TrainerTopology, list[Holding]]) -> None:
    spec, topology, holdings = small
    norm = next(param for param in spec.params if param.megatron.endswith("input_layernorm.weight"))
    other = replace(norm, shape=(norm.shape[0] + 2,))
    wrong = replace(spec, params=tuple(other if param is norm else param for param in spec.params))
    with pytest.raises(ReshardError) as error:
        check_holdings(wrong, topology, 4, holdings)
    lines = str(error.value).splitlines()[1:]
    shapes = [line for line in lines if "input_layernorm.weight is [128], expected [130]" in line]
    assert [line.split()[2].rstrip(":") for line in shapes] == ["0"] * 3 + ["3"] * 2
    for rank, layers in ((0, 3), (3, 2)):
        (elements,) = (line for line in lines if line.startswith(f"  - rank {rank}: elements outside routed experts: "))
        built, expected = (int(word.rstrip(",").replace(",", "")) for word in elements.split()[-3::2])
        assert expected - built == 2 * layers
        assert sum(line.startswith(f"  - rank {rank}: weights take ") for line in lines) == 1
    assert f"in {len(lines)} points" in str(error.value)
    assert len(lines) == 5 + 4


def test_layers_of_another_kind_are_a_difference(small: tuple[ModelSpec, TrainerTopology, list[Holding]]) -> None:
    spec, topology, holdings = small
    with pytest.raises(ReshardError, match=r"linear_kv_down_proj\.weight is \[\d+, 128\], expected \[\d+, 128\]"):
        check_holdings(spec, replace(topology, transformer_engine=True), 4, holdings)


def test_weights_of_another_width_are_a_difference(small: tuple[ModelSpec, TrainerTopology, list[Holding]]) -> None:
    spec, topology, holdings = small
    check_holdings(spec, topology, 4, holdings)
    with pytest.raises(ReshardError, match="rank 3: weights take"):
        check_holdings(spec, topology, 2, holdings)


def test_nothing_stays_of_a_rank() -> None:
    spec, config = FAMILIES["qwen3_moe"].spec(FAMILY["qwen3_moe"]), config_of(parallel={"tp": 2, "ep": 2})
    torch.manual_seed(5)
    random.seed(5)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    build_rank(spec, config, 2, 4)
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = list(RouterReplay.global_router_replay_instances)
    build_rank(spec, config, 3, 4)
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert RouterReplay.global_router_replay_instances == routers
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.empty(1, device="cpu").device.type == torch.empty(1).device.type == "cpu"


def test_a_process_of_a_group_cannot_be_another_rank() -> None:
    config = config_of()
    with fake_world(config, 0, 1), pytest.raises(TrainError, match="has joined a process group"), fake_world(config, 0, 1):
        pass
    assert not torch.distributed.is_initialized()


def test_a_world_that_does_not_factor_is_refused() -> None:
    config = config_of(parallel={"tp": 4})
    with pytest.raises(ConfigError, match=r"world size 6 is not a multiple of tp \* pp \* cp"), fake_world(config, 0, 6):
        pass
    assert not torch.distributed.is_initialized()


def test_on_meta_only_the_device_is_another() -> None:
    module = torch.nn.Linear(2, 3, device="cpu")
    with on_meta():
        assert torch.zeros(2, device="cpu").device.type == "meta"
        assert torch.zeros(2).device.type == "meta"
        moved = torch.empty(4, device=torch.device("cpu"), dtype=torch.float32).to(torch.device("cpu"), torch.bfloat16)
        assert (moved.device.type, moved.dtype) == ("meta", torch.bfloat16)
        assert {tensor.device.type for tensor in module.to(torch.device("cpu")).parameters()} == {"meta"}
