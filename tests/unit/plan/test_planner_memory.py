"""Memory that the planner counts, against the tensors of real Megatron models and optimizers, and of the engine's layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.models import FAMILIES, ModelSpec
from moerl.plan import trainer
from moerl.plan.assumptions import Assumptions, shape_of
from moerl.plan.engine import engine_weights, kv_token_bytes
from moerl.reshard.boxes import kinds
from moerl.reshard.engine_boxes import EngineTopology, engine_parameters
from moerl.reshard.fp8_layout import wire_kinds
from moerl.reshard.plan import ITEMSIZE
from moerl.reshard.trainer_layout import TrainerTopology, expected_shards, trainer_topology
from moerl.train import megatron, platform

CASES = {
    "alone": ("deepseek_v3", 1, {}, "bfloat16"),
    "alone in float32": ("qwen3_moe", 1, {}, "float32"),
    "first stage, everything cut": ("deepseek_v3", 16, {"tp": 2, "pp": 2, "ep": 4, "cp": 2}, "bfloat16"),
    "grouped queries with biases": ("glm4_moe", 4, {"tp": 2, "ep": 2, "etp": 2}, "bfloat16"),
    "experts spread wider than data": ("qwen3_moe", 8, {"tp": 2, "ep": 8}, "bfloat16"),
}
CONFIGS = {
    "deepseek_v3": tiny_config(),
    "qwen3_moe": tiny_qwen3_config(),
    "glm4_moe": tiny_glm4_config(),
    "deepseek_v2": tiny_deepseek_v2_config(),
}


def spec_of(family: str) -> ModelSpec:
    return FAMILIES[family].spec(CONFIGS[family])


@dataclass(frozen=True)
class Measured:
    weights: int
    gradients: int
    optimizer: int


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """Bytes of the tensors of rank 0 of each case, after one optimizer step. Other ranks exist as numbers only: nothing is sent."""
    return {name: measure(*case, tmp_path_factory.mktemp("model")) for name, case in CASES.items()}


def measure(family: str, world: int, sizes: dict[str, int], dtype: str, folder: Path) -> Measured:
    spec = write_tiny(folder, CONFIGS[family], seed=1)
    return bytes_held(spec, Config(model={"path": str(folder)}, train={"dtype": dtype, "device": "cpu"}, parallel=sizes), world)


def bytes_held(spec: ModelSpec, config: Config, world: int) -> Measured:
    """Of rank 0."""
    with fake_ranks(config, world) as ranks:
        model = megatron.build_model(spec, config, ranks)
        optimizer = megatron.build_optimizer(model, config)
        megatron.optimizer_step(optimizer, 0.0)
        (chunk,) = model
        weights = sum(tensor.nbytes for tensor in (*chunk.parameters(), *megatron.unwrap(chunk).buffers()) if tensor.dim())
        gradients = sum(buffer.grad_data.nbytes for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
        return Measured(weights, gradients, sum(state_bytes(part, config.train.dtype) for part in optimizer.chained_optimizers))


def state_bytes(part, dtype: str) -> int:
    masters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    assert all(parameter.dtype == torch.float32 for parameter in masters)
    moments = [tensor for state in part.optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor) and tensor.dim()]
    return sum(tensor.nbytes for tensor in (*moments, *(masters if dtype == "bfloat16" else ())))


@contextmanager
def fake_ranks(config: Config, world: int) -> Iterator[megatron.Ranks]:
    """Rank 0 of a world whose collectives do nothing."""
    platform.quiet()
    platform.install("cpu")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    from megatron.core import parallel_state, tensor_parallel

    p, new_group = config.parallel, torch.distributed.new_group
    with patch.object(torch.distributed, "new_group", lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tp,
            pipeline_model_parallel_size=p.pp,
            context_parallel_size=p.cp,
            expert_model_parallel_size=p.ep,
            expert_tensor_parallel_size=p.etp,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield megatron._read_ranks("cpu", p.vpp)
    finally:
        megatron.shutdown()


@pytest.mark.parametrize("name", CASES)
def test_weights_gradients_and_optimizer_are_what_megatron_holds(name: str, measured: dict[str, Measured]) -> None:
    family, world, sizes, dtype = CASES[name]
    config = Config(model={"path": "unused"}, parallel=sizes)
    topology = trainer_topology(config.parallel, world, transformer_engine=False)
    held, itemsize = trainer.stage_elements(spec_of(family), topology)[0], ITEMSIZE[dtype]
    found = measured[name]
    assert trainer.weight_bytes(held, itemsize) == pytest.approx(found.weights, rel=0.001)
    assert trainer.gradient_bytes(held) == pytest.approx(found.gradients, rel=0.05)
    assert trainer.optimizer_bytes(held, topology, itemsize) == pytest.approx(found.optimizer, rel=0.05)


TOPOLOGIES = [
    TrainerTopology(1),
    TrainerTopology(8, tp=2, pp=2, ep=2),
    TrainerTopology(8, tp=2, pp=2, ep=2, transformer_engine=True),
    TrainerTopology(8, tp=2, pp=2, vpp=2, ep=4),
    TrainerTopology(12, pp=3, ep=4),
    TrainerTopology(8, tp=2, ep=4, etp=2, transformer_engine=True),
]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_elements_are_those_that_a_sync_finds_on_the_rank(family: str, topology: TrainerTopology) -> None:
    spec = spec_of(family)
    for stage, held in enumerate(trainer.stage_elements(spec, topology)):
        shards = expected_shards(spec, topology, stage * topology.per_stage)
        biases = sum(prod(shape) for name, shape in shards.items() if name.endswith("expert_bias"))
        vocabulary = 2 * topology.tp * spec.hidden_size  # rows that fill it up to a multiple of tp
        difference = held.dense + held.expert - (sum(map(prod, shards.values())) - biases)
        assert 0 <= difference <= vocabulary
        layers = sum(name.endswith("input_layernorm.weight") for name in shards)
        assert held.buffers == 2 * biases + layers * trainer.yarn_elements(spec, topology.cp)


def test_tied_embeddings_are_on_the_first_and_the_last_stage() -> None:
    spec = FAMILIES["qwen3_moe"].spec({**CONFIGS["qwen3_moe"], "tie_word_embeddings": True})
    plain, tied = spec_of("qwen3_moe"), spec
    pipeline = TrainerTopology(2, pp=2)
    assert trainer.stage_elements(tied, pipeline) == trainer.stage_elements(plain, pipeline)
    alone = [trainer.stage_elements(one, TrainerTopology(1))[0].dense for one in (plain, tied)]
    assert alone[0] - alone[1] == spec.vocab_size * spec.hidden_size


def test_without_the_distributed_optimizer_every_rank_holds_all_of_its_state() -> None:
    held, topology = trainer.Elements(dense=1000, expert=4000, buffers=0), TrainerTopology(8, tp=2, ep=4)
    assert trainer.optimizer_bytes(held, topology, 2, distributed=False) == 12 * 5000
    assert trainer.optimizer_bytes(held, topology, 2) == 12 * (250 + 2000)
    assert trainer.optimizer_bytes(held, topology, 4) == 8 * (250 + 2000)


@pytest.mark.parametrize(
    ("stage", "pp", "vpp", "count", "expected"), [(0, 4, 1, 8, 4), (3, 4, 1, 8, 1), (0, 4, 1, 2, 2), (0, 4, 2, 8, 5.5), (3, 4, 2, 8, 2.5)]
)
def test_microbatches_in_flight(stage: int, pp: int, vpp: int, count: int, expected: float) -> None:
    assert trainer.in_flight(stage, pp, vpp, count) == expected


def training(**changes) -> trainer.Training:
    config = Config(model={"path": "unused"})
    return replace(trainer.training_of(config, Assumptions()), **changes)


@pytest.mark.parametrize("family", CONFIGS)
def test_recomputation_and_sharding_save_activations(family: str) -> None:
    spec, topology = spec_of(family), TrainerTopology(8, pp=2, ep=2)

    def most(topology: TrainerTopology, **changes) -> int:
        return max(parts["activations"] for parts in trainer.stage_memory(spec, topology, training(**changes)))

    none, full = most(topology), most(topology, granularity="full")
    modules = [("layernorm",), ("layernorm", "moe_act"), ("layernorm", "moe_act", "mlp", "shared_experts")]
    selective = [most(topology, granularity="selective", modules=some) for some in modules]
    assert none > selective[0] > selective[1] >= selective[2] > full
    assert most(topology, granularity="selective", modules=("core_attn",)) == none
    assert full < most(topology, granularity="full", block=2)
    assert most(replace(topology, tp=2)) == pytest.approx(none / 2, rel=0.01)
    assert most(replace(topology, cp=2)) == pytest.approx(none / 2, rel=0.01)


def test_routes_reference_and_buckets_are_counted() -> None:
    spec, topology = spec_of("deepseek_v3"), TrainerTopology(4, pp=2, ep=2)
    first, last = trainer.stage_memory(spec, topology, training(samples=64, sample_tokens=100.0, replay=True, reference=True, bucket=2**20))
    assert first["routes"] + last["routes"] == 64 * 100 // 2 * len(spec.moe_layers) * spec.topk
    assert first["reference"] == first["weights"]
    assert first["sync_buckets"] == 2**21
    assert first["head"] == 0 < last["head"]
    off = trainer.stage_memory(spec, topology, training(replay=False))
    assert off[0]["routes"] == off[0]["reference"] == 0


def test_many_experts_need_two_bytes_per_route() -> None:
    def routes(experts: int) -> int:
        spec = replace(spec_of("qwen3_moe"), experts=experts)
        return trainer.route_bytes(spec, TrainerTopology(1), training(samples=8, sample_tokens=64.0), 4)

    assert routes(257) == 2 * routes(256)


ENGINES = [
    EngineTopology(),
    EngineTopology(tp=2),
    EngineTopology(tp=4, ep=4),
    EngineTopology(tp=4, ep=2, attention_dp=2),
    EngineTopology(tp=2, replicated_dense=True, replicated_shared=True),
]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("topology", ENGINES, ids=str)
def test_engine_weights_are_those_of_the_engines_layout(family: str, topology: EngineTopology) -> None:
    spec = spec_of(family)
    every = kinds(spec)
    ranks = [sum(prod(one.shape) * ITEMSIZE[one.dtype] for one in parameters.values()) for parameters in engine_parameters(every, topology)]
    found = engine_weights(every, topology)
    assert found.total - found.derived == ranks[0] == max(ranks)
    kv_b = sum(prod(kind.param.shape) * len(kind.layers) for kind in every if kind.hf.endswith("kv_b_proj.weight"))
    assert found.derived == kv_b * 2 // (topology.tp // topology.attention_dp)


def test_fp8_halves_what_is_quantised() -> None:
    spec = FAMILIES["deepseek_v3"].spec({**CONFIGS["deepseek_v3"], "hidden_size": 256, "moe_intermediate_size": 256})
    sizes = [engine_weights(wire_kinds(spec, one), one).experts for one in (EngineTopology(), EngineTopology(fp8_block=(128, 128)))]
    assert sizes[1] == sizes[0] // 2 + sizes[0] // 2 // 128**2 * 4


@pytest.mark.parametrize(
    ("config", "layers", "ranks", "expected"),
    [
        # DeepSeek-V3: (512 + 64) elements in 61 layers, on every rank; Qwen3-30B: 4 key-value heads of 128, key and value, in 48
        ("mla", 61, 16, 576 * 61 * 2),
        ("gqa", 48, 1, 2 * 4 * 128 * 48 * 2),
        ("gqa", 48, 4, 2 * 1 * 128 * 48 * 2),
        ("gqa", 48, 8, 2 * 1 * 128 * 48 * 2),
    ],
)
def test_cache_per_token(config: str, layers: int, ranks: int, expected: int) -> None:
    mla = replace(shape_of(spec_of("deepseek_v3")), latent=576, rotary=64)
    gqa = replace(shape_of(spec_of("qwen3_moe")), key_value_heads=4, key=128, value=128)
    assert kv_token_bytes({"mla": mla, "gqa": gqa}[config], layers, ranks, 2) == expected
