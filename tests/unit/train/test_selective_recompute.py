"""Selective recomputation with our layers: nothing but memory changes, and the chosen modules really run again."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ConfigError
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch
from tests.passes import run_backward, run_logprobs

PASSES: dict[str, Any] = {"temperature": 1.0, "fp32_head": True}
WATCHED = (
    "layers.0.mlp",
    "layers.2.input_layernorm",
    "layers.2.self_attention.linear_kv_up_proj",
    "layers.2.self_attention.core_attention",
    "layers.2.pre_mlp_layernorm",
    "layers.2.mlp.router",
    "layers.2.mlp.shared_experts",
)
AGAIN = {
    "mla_up_proj": {"layers.2.self_attention.linear_kv_up_proj": 1},
    "core_attn": {"layers.2.self_attention.core_attention": 1},
    "layernorm": {"layers.2.input_layernorm": 1, "layers.2.pre_mlp_layernorm": 1},
    "shared_experts": {"layers.2.mlp.shared_experts": 1},
    "moe": {"layers.2.mlp.router": 1, "layers.2.mlp.shared_experts": 1},
    "mlp": {"layers.0.mlp": 1},
}
"""Which forwards run once more per microbatch. Inside "moe", shared experts that are recomputed too run twice more."""


class Outcome(NamedTuple):
    losses: list[float]
    gradient: torch.Tensor
    uses: Counter[str]
    logprobs: np.ndarray


def packed(lengths: list[int], seed: int) -> Microbatch:
    rng, total = np.random.default_rng(seed), sum(lengths)
    return Microbatch(
        tokens=rng.integers(0, 16, total),
        labels=rng.integers(0, 16, total),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=(rng.random(total) < 0.7).astype(np.float32),
        routes=None,
        real=np.ones(total, bool),
    )


MICROBATCHES = [packed([9, 40, 5, 17, 1], seed=0), packed([33, 3], seed=1)]


def loss(outputs, local):
    total = -(outputs.logprobs * local.loss_mask).sum()
    return total, local.loss_mask.sum(), {"loss": total}


class Setup(NamedTuple):
    folders: dict[str, Any]
    ranks: megatron.Ranks

    def model(self, modules: list[str], variant: str = "compressed") -> list[torch.nn.Module]:
        spec, folder = self.folders[variant]
        native = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
        config = Config(model={"path": str(folder)}, train={"dtype": "float32", "device": "cpu"}, megatron=native)
        model = megatron.build_model(spec, config, self.ranks)
        weights.load_hf(model, spec, folder, self.ranks)
        return model

    def run(self, modules: list[str], variant: str = "compressed") -> Outcome:
        """A step's forward and backward over MICROBATCHES; then log-probabilities with the same model."""
        model, uses = self.model(modules, variant), Counter()
        for name in WATCHED:
            module = megatron.unwrap(model[0]).decoder.get_submodule(name)
            module.register_forward_hook(lambda *_, name=name: uses.update([name]))
        results = run_backward(model, MICROBATCHES, self.ranks, loss_fn=loss, replay=None, **PASSES)
        gradient = torch.cat([parameter.main_grad.flatten() for parameter in model[0].parameters()])
        trained = Counter(uses)
        found = run_logprobs(model, MICROBATCHES, self.ranks, **PASSES)
        return Outcome([float(one["loss"]) for one in results], gradient, trained, np.concatenate([logprobs for logprobs, _ in found]))


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    config = tiny_config(hidden=64, layers=3, experts=16, topk=4, groups=4, group_topk=2, expert_width=32, initializer_range=0.1)
    folders = {}
    for variant, change in (("compressed", {}), ("uncompressed", {"q_lora_rank": None})):
        folder = tmp_path_factory.mktemp(variant)
        folders[variant] = (write_tiny(folder, config | change, seed=7), folder)
    defaults = Config(model={"path": str(folder)}, train={"device": "cpu"})
    yield Setup(folders, megatron.initialise(defaults.parallel, defaults.train, seed=1))
    megatron.shutdown()


@pytest.fixture
def fp8_asked(setup, monkeypatch):
    """Sets the default by which Megatron's checkpoints decide whether to ask Transformer Engine for its fp8 state: None doesn't."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    return lambda default: monkeypatch.setattr(CheckpointWithoutOutput.__init__, "__defaults__", (default,))


@pytest.fixture(scope="module")
def plain(setup):
    return setup.run([])


def same(got: Outcome, expected: Outcome) -> None:
    assert got.losses == expected.losses
    assert torch.equal(got.gradient, expected.gradient), f"by up to {(got.gradient - expected.gradient).abs().max()}"
    assert np.array_equal(got.logprobs, expected.logprobs)


def test_without_recomputation_everything_runs_once(plain):
    assert plain.uses == dict.fromkeys(WATCHED, len(MICROBATCHES))
    assert plain.gradient.abs().max() > 0


@pytest.mark.parametrize("module", AGAIN)
def test_one_module(setup, plain, fp8_asked, module):
    fp8_asked(None)
    got = setup.run([module])
    same(got, plain)
    assert got.uses - plain.uses == {name: again * len(MICROBATCHES) for name, again in AGAIN[module].items()}


@pytest.mark.parametrize("variant", ["compressed", "uncompressed"])
def test_all_modules_together(setup, fp8_asked, variant):
    fp8_asked(None)
    expected, got = setup.run([], variant), setup.run(list(AGAIN), variant)
    same(got, expected)
    again = sum((Counter(one) for one in AGAIN.values()), Counter())
    assert got.uses - expected.uses == {name: count * len(MICROBATCHES) for name, count in again.items()}


@pytest.mark.parametrize(("modules", "discarded"), [(["core_attn"], False), (["core_attn", "mla_up_proj"], True)])
def test_up_projected_rows_are_discarded_until_the_backward_pass(setup, monkeypatch, modules, discarded):
    from moerl.train.layers import PackedMLA

    made, sizes, up_project = [], [], PackedMLA._up_project

    def spied(*args):
        outputs = up_project(*args)
        assert all(tensor.is_contiguous() for tensor in outputs), "attention would keep a copy"
        made.extend(tensor.untyped_storage() for tensor in outputs)
        return outputs

    def measured(outputs, local):
        sizes.extend(storage.nbytes() for storage in made)
        return loss(outputs, local)

    monkeypatch.setattr(PackedMLA, "_up_project", spied)
    run_backward(setup.model(modules), MICROBATCHES[:1], setup.ranks, loss_fn=measured, replay=None, **PASSES)
    assert [size == 0 for size in sizes] == [discarded] * 9, "three tensors in each of three layers"


def test_layernorm_is_refused_where_it_would_need_transformer_engine(setup, fp8_asked):
    fp8_asked(False)
    with pytest.raises(ConfigError, match=r"megatron\.recompute_modules: 'layernorm' needs Transformer Engine.*remove 'layernorm'"):
        setup.model(["layernorm"])


def test_moe_act_is_refused_by_megatron(setup):
    with pytest.raises(ConfigError, match="moe_act in recompute_modules is only supported with moe_grouped_gemm"):
        setup.model(["moe_act"])
