"""Packed passes against transformers and against themselves; the optimizer against torch's AdamW; all in one process."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moerl.config.schema import Config
from moerl.convert.tiny import PAD, tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config, write_tiny
from moerl.errors import ConfigError, TrainError
from moerl.models import qwen3
from moerl.models.shard import windows
from moerl.models.spec import ModelSpec
from moerl.rollout.mask import of_rows
from moerl.routing.replay import RouteReplay
from moerl.routing.trace import Layout
from moerl.train import megatron, weights
from moerl.train.batch import Microbatch
from tests.passes import run_backward, run_logprobs

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
PASSES: dict[str, Any] = {"temperature": 1.0, "fp32_head": True}


class Setup(NamedTuple):
    spec: ModelSpec
    folder: Path
    ranks: megatron.Ranks

    def config(self, replay: dict[str, Any] | None = None, **train: Any) -> Config:
        train = {"dtype": "float32", "device": "cpu"} | train
        return Config(model={"path": str(self.folder)}, train=train, replay=replay or {})

    def model(self, config: Config | None = None, *, trainable: bool = True) -> list[torch.nn.Module]:
        model = megatron.build_model(self.spec, config or self.config(), self.ranks, trainable=trainable)
        weights.load_hf(model, self.spec, self.folder, self.ranks)
        return model

    def replay(self, model: list[torch.nn.Module]) -> RouteReplay:
        return RouteReplay(model, Layout(self.spec.moe_layers, self.spec.experts, self.spec.topk))


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forward")
    config = tiny_config(hidden=64, layers=4, experts=16, topk=4, groups=4, group_topk=2, expert_width=32, initializer_range=0.1)
    spec = write_tiny(folder, config | {"rope_scaling": YARN}, seed=7)
    defaults = Config(model={"path": str(folder)}, train={"device": "cpu"})
    yield Setup(spec, folder, megatron.initialise(defaults.parallel, defaults.train, seed=1))
    megatron.shutdown()


def packed(lengths: list[int], seed: int = 0) -> Microbatch:
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(ends[-1])
    return Microbatch(
        tokens=rng.integers(0, 16, total),
        labels=rng.integers(0, 16, total),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=ends,
        loss_mask=(rng.random(total) < 0.7).astype(np.float32),
        routes=None,
        real=np.ones(total, bool),
    )


def rows(microbatch: Microbatch, start: int, stop: int) -> Microbatch:
    cut = {name: getattr(microbatch, name)[start:stop] for name in ("tokens", "labels", "positions", "loss_mask", "real")}
    return replace(microbatch, cu_seqlens=np.array([0, stop - start], np.int32), **cut)


def loss(outputs, local):
    total = -(outputs.logprobs * local.loss_mask).sum()
    return total, local.loss_mask.sum(), {"loss": total}


def unsettle(folder: Path) -> None:
    """Give norms and router biases values that matter."""
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.1 * rng.standard_normal(tensor.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def gradient(model: list[torch.nn.Module]) -> torch.Tensor:
    return torch.cat([parameter.main_grad.flatten() for chunk in model for parameter in chunk.parameters()])


SMALL_SIZES: dict[str, Any] = {"hidden": 64, "layers": 4, "experts": 16, "expert_width": 32, "initializer_range": 0.1}
GQA_SIZES: dict[str, Any] = SMALL_SIZES | {"topk": 4, "heads": 6, "kv_heads": 2, "head_dim": 16}
SMALL = tiny_config(**SMALL_SIZES, topk=4, groups=4, group_topk=2)
QWEN3 = tiny_qwen3_config(**GQA_SIZES)
VARIANTS = {
    "yarn": SMALL | {"rope_scaling": YARN, "routed_scaling_factor": 2.5},
    "plain rope, uncompressed queries": SMALL | {"rope_scaling": None, "q_lora_rank": None},
    "fewer experts than two per open group": tiny_config(**SMALL_SIZES, topk=3, groups=4, group_topk=3),
    "two dense layers, one group": SMALL | {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
    "qwen3": QWEN3 | {"rope_theta": 100.0},
    "qwen3, unnormalised scores, tied": QWEN3 | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "qwen3, dense layers, a key-value head per head": QWEN3 | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_key_value_heads": 6},
    "deepseek v2": tiny_deepseek_v2_config(**SMALL_SIZES, topk=6, groups=4, group_topk=3) | {"rope_scaling": YARN},
    "deepseek v2 lite": tiny_deepseek_v2_config(**SMALL_SIZES, topk=6, groups=1, group_topk=1),
    "glm4": tiny_glm4_config(**GQA_SIZES) | {"rope_theta": 100.0},
    "glm4, no norms, no biases": tiny_glm4_config(**GQA_SIZES, qk_norm=False) | {"attention_bias": False, "num_key_value_heads": 6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(setup, tmp_path, variant):
    from transformers import AutoModelForCausalLM

    setup = setup._replace(spec=write_tiny(tmp_path, VARIANTS[variant], seed=7), folder=tmp_path)
    unsettle(tmp_path)
    model, microbatch = setup.model(trainable=False), packed([7, 40, 12, 9, 1])
    logprobs, routes = run_logprobs(model, [microbatch], setup.ranks, recorder=setup.replay(model), **PASSES)[0]
    reference = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=torch.float32, attn_implementation="eager").eval()
    chosen = {layer: [] for layer in setup.spec.moe_layers}
    for layer, seen in chosen.items():
        gate = reference.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[2].numpy()))
    expected = []
    with torch.no_grad():
        for start, stop in pairwise(microbatch.cu_seqlens):
            scores = reference(torch.tensor(microbatch.tokens[None, start:stop])).logits[0].float().log_softmax(-1)
            expected.append(scores.gather(1, torch.tensor(microbatch.labels[start:stop, None]))[:, 0].numpy())
    np.testing.assert_allclose(logprobs, np.concatenate(expected), atol=1e-5)
    for index, layer in enumerate(setup.spec.moe_layers):
        assert np.array_equal(np.sort(routes[:, index], -1), np.sort(np.concatenate(chosen[layer]), -1)), f"layer {layer}"


def test_every_pass_is_within_what_the_engine_kept(setup):
    """Against the whole distribution at temperature 0.7, read off label by label; entropy is not restricted."""
    model, microbatch, passes = setup.model(trainable=False), packed([7, 12]), PASSES | {"temperature": 0.7}
    vocab, rng = setup.spec.vocab_size, np.random.default_rng(3)
    labelled = [replace(microbatch, labels=np.full(microbatch.size, token)) for token in range(vocab)]
    table = np.stack([found for found, _ in run_logprobs(model, labelled, setup.ranks, **passes)], 1).astype(np.float64)
    np.testing.assert_allclose(np.exp(table).sum(1), 1.0, atol=1e-5)
    others = [rng.permutation(np.delete(np.arange(vocab), label)) for label in microbatch.labels]
    rows = [[label, *other[: i % 4]] if i % 3 else [] for i, (label, other) in enumerate(zip(microbatch.labels, others, strict=True))]
    expected = [table[i, microbatch.labels[i]] - np.log(np.exp(table[i, row or slice(None)]).sum()) for i, row in enumerate(rows)]
    masked = replace(microbatch, sampling_mask=of_rows(rows))
    np.testing.assert_allclose(run_logprobs(model, [masked], setup.ranks, **passes)[0][0], expected, atol=1e-5)
    entropies = []
    trainable = setup.model()

    def watched(outputs, local):
        entropies.append(outputs.entropy.detach().clone())
        return loss(outputs, local)

    (found,) = run_backward(trainable, [masked], setup.ranks, loss_fn=watched, replay=None, **passes)
    np.testing.assert_allclose(float(found["loss"]), -(np.array(expected) * masked.loss_mask).sum(), atol=1e-4)
    np.testing.assert_allclose(entropies[0], -(np.exp(table) * table).sum(1), atol=1e-4)


def test_packed_equals_one_by_one(setup):
    model, microbatch = setup.model(trainable=False), packed([5, 1, 33, 8, 8, 17])
    together = run_logprobs(model, [microbatch], setup.ranks, **PASSES)[0][0]
    alone = [rows(microbatch, start, stop) for start, stop in pairwise(microbatch.cu_seqlens)]
    apart = np.concatenate([logprobs for logprobs, _ in run_logprobs(model, alone, setup.ranks, **PASSES)])
    np.testing.assert_allclose(together, apart, atol=1e-5)


def test_split_into_microbatches_gives_the_same_gradient(setup):
    model, microbatch = setup.model(), packed([5, 9, 14, 6])
    whole = run_backward(model, [microbatch], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    expected = gradient(model)
    middle = int(microbatch.cu_seqlens[2])
    second = replace(rows(microbatch, middle, microbatch.size), cu_seqlens=microbatch.cu_seqlens[2:] - middle)
    first = replace(rows(microbatch, 0, middle), cu_seqlens=microbatch.cu_seqlens[:3])
    split = run_backward(model, [first, second], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    assert sum(float(part["loss"]) for part in split) == pytest.approx(float(whole[0]["loss"]), rel=1e-6)
    assert (gradient(model) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gradient_is_per_token(setup):
    """Against plain autograd on the mean loss."""
    model, microbatch = setup.model(), packed([6, 11])
    run_backward(model, [microbatch], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    head = megatron.unwrap(model[0]).output_layer.weight
    got, step = head.main_grad[3, 5].item(), 1e-2
    means = []
    for shift in (step, -step):
        with torch.no_grad():
            head[3, 5] += shift
        logprobs = run_logprobs(model, [microbatch], setup.ranks, **PASSES)[0][0]
        means.append(-(logprobs.astype(np.float64) * microbatch.loss_mask).sum() / microbatch.loss_mask.sum())
        with torch.no_grad():
            head[3, 5] -= shift
    assert got == pytest.approx((means[0] - means[1]) / (2 * step), rel=1e-2)


def test_the_same_step_twice_is_bit_identical(setup):
    outcomes = []
    for _ in range(2):
        model, config = setup.model(), setup.config()
        optimizer = megatron.build_optimizer(model, config)
        losses = []
        for step in range(2):
            results = run_backward(model, [packed([9, 12, 5], seed=step)], setup.ranks, loss_fn=loss, replay=None, **PASSES)
            losses += [float(results[0]["loss"]), megatron.optimizer_step(optimizer, 1e-3)]
        outcomes.append((losses, gradient(model)))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_equal_torch_adamw(setup, dtype):
    config = setup.config(dtype=dtype, weight_decay=0.1, grad_clip=0.5, adam_beta2=0.9)
    model = setup.model(config)
    optimizer = megatron.build_optimizer(model, config)
    parameters = dict(model[0].named_parameters())
    masters = {name: parameter.detach().float().clone().requires_grad_() for name, parameter in parameters.items()}
    decayed = [master for master in masters.values() if master.ndim > 1]
    plain = [master for master in masters.values() if master.ndim == 1]
    reference = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.9))
    for step, lr in enumerate((1e-3, 5e-4)):
        run_backward(model, [packed([9, 12, 5], seed=step)], setup.ranks, loss_fn=loss, replay=None, **PASSES)
        for name, master in masters.items():
            master.grad = parameters[name].main_grad.float().clone()
        for group in reference.param_groups:
            group["lr"] = lr
        expected_norm = torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
        reference.step()
        norm = megatron.optimizer_step(optimizer, lr)
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)
        assert norm > 0.5, "clipping must be active for this test to say anything"
    for name, master in masters.items():
        difference = (parameters[name].detach().float() - master.detach().to(parameters[name].dtype).float()).abs().max()
        assert difference < (2e-6 if dtype == "float32" else 1e-2), name
        if dtype == "bfloat16" and parameters[name].requires_grad and hasattr(parameters[name], "main_param"):
            torch.testing.assert_close(parameters[name].main_param, master.detach().flatten(), atol=2e-6, rtol=0)


def test_a_non_finite_gradient_is_refused_and_changes_nothing(setup):
    config = setup.config()
    model = setup.model(config)
    optimizer = megatron.build_optimizer(model, config)
    before = [parameter.detach().clone() for parameter in model[0].parameters()]

    def poisoned(outputs, local):
        total, tokens, metrics = loss(outputs, local)
        return total * float("nan"), tokens, metrics

    run_backward(model, [packed([6, 6])], setup.ranks, loss_fn=poisoned, replay=None, **PASSES)
    with pytest.raises(TrainError, match="gradient norm is nan"):
        megatron.optimizer_step(optimizer, 1e-3)
    assert all(torch.equal(old, new) for old, new in zip(before, model[0].parameters(), strict=True))
    run_backward(model, [packed([6, 6])], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    assert megatron.optimizer_step(optimizer, 1e-3) > 0


def test_temperature_flattens_the_distribution(setup):
    model, microbatch = setup.model(trainable=False), packed([8, 8])
    hot = run_logprobs(model, [microbatch], setup.ranks, temperature=100.0, fp32_head=True)[0][0]
    assert np.abs(hot + np.log(16)).max() < 0.05


def test_head_without_float32_is_close(setup):
    model, microbatch = setup.model(trainable=False), packed([8, 8])
    exact = run_logprobs(model, [microbatch], setup.ranks, temperature=0.8, fp32_head=True)[0][0]
    plain = run_logprobs(model, [microbatch], setup.ranks, temperature=0.8, fp32_head=False)[0][0]
    np.testing.assert_allclose(exact, plain, atol=1e-5)


def test_the_router_bias_moves_only_when_asked(setup):
    for bias, moves in (("frozen", False), ("native", True)):
        model = setup.model(setup.config(replay={"expert_bias": bias}))
        run_backward(model, [packed([30, 30])], setup.ranks, loss_fn=loss, replay=None, **PASSES)
        bias = megatron.unwrap(model[0]).decoder.layers[1].mlp.router.expert_bias
        assert bool(bias.abs().max() > 0) is moves


def test_no_microbatches_is_an_error(setup):
    with pytest.raises(TrainError, match="positive multiple of 1 here, got 0"):
        run_logprobs(setup.model(trainable=False), [], setup.ranks, **PASSES)


def test_lengths_that_cannot_be_cut_are_an_error(setup):
    with pytest.raises(TrainError, match=r"multiples of 8 here, got \[3, 12\]"):
        run_logprobs(setup.model(trainable=False), [packed([3, 12, 8])], replace(setup.ranks, cp=(0, 2), tp=(0, 2)), **PASSES)


def test_key_value_heads_that_ranks_do_not_divide_are_a_config_error(setup):
    config = Config(model={"path": str(setup.folder)}, train={"device": "cpu"}, parallel={"tp": 4})
    with pytest.raises(ConfigError, match=r"parallel\.tp: the model's 2 key-value heads cannot be split over 4 ranks"):
        megatron.transformer_config(qwen3.spec(QWEN3 | {"num_attention_heads": 8}), config, setup.ranks)


def test_an_option_of_other_attention_is_a_config_error(setup):
    config = Config(model={"path": str(setup.folder)}, train={"device": "cpu"}, megatron={"cache_mla_latents": True})
    assert megatron.transformer_config(setup.spec, config, setup.ranks).cache_mla_latents
    with pytest.raises(ConfigError, match=r"megatron\.cache_mla_latents is not an option of .* TransformerConfig, which qwen3 models use"):
        megatron.transformer_config(qwen3.spec(QWEN3), config, setup.ranks)


def test_gradients_of_grouped_attention_equal_transformers(setup, tmp_path):
    from transformers import AutoModelForCausalLM

    setup = setup._replace(spec=write_tiny(tmp_path, QWEN3 | {"rope_theta": 100.0}, seed=7), folder=tmp_path)
    unsettle(tmp_path)
    model, microbatch = setup.model(), packed([7, 40, 12])
    run_backward(model, [microbatch], setup.ranks, loss_fn=loss, replay=None, **PASSES)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for start, stop in pairwise(microbatch.cu_seqlens):
        scores = reference(torch.tensor(microbatch.tokens[None, start:stop])).logits[0].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(microbatch.labels[start:stop, None]))[:, 0]
        total = total - (chosen * torch.tensor(microbatch.loss_mask[start:stop])).sum()
    (total / float(microbatch.loss_mask.sum())).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if ".experts." not in name}
    found = {}
    for item in weights.placed(model, setup.spec, setup.ranks):
        for window in windows(item.entry.param, 0, 1):
            shape = item.entry.param.part_shape(window.part)
            part = found.setdefault(item.entry.hf[window.part], torch.full(shape, torch.nan))
            part[window.in_hf] = item.tensor.main_grad[window.in_shard]
    found["model.embed_tokens.weight"][PAD] = 0.0  # transformers gives its padding token no gradient
    assert len(expected) == 4 * 9 + 3
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


def test_an_unknown_megatron_option_is_a_config_error(setup):
    config = Config(model={"path": str(setup.folder)}, train={"device": "cpu"}, megatron={"hiden_dropout": 0.1, "zzz": 1})
    with pytest.raises(ConfigError) as error:
        megatron.build_model(setup.spec, config, setup.ranks)
    assert len(error.value.violations) == 2


def test_an_option_that_megatron_refuses_is_a_config_error(setup):
    config = Config(model={"path": str(setup.folder)}, train={"device": "cpu"}, megatron={"recompute_granularity": "sometimes"})
    with pytest.raises(ConfigError, match="Megatron refuses"):
        megatron.build_model(setup.spec, config, setup.ranks)


def test_overlapped_experts_need_a_last_layer_with_experts(setup):
    native = {"overlap_moe_expert_parallel_comm": True}
    config = Config(model={"path": str(setup.folder)}, train={"device": "cpu"}, parallel={"ep": 2}, megatron=native)
    assert megatron.transformer_config(setup.spec, config, setup.ranks).overlap_moe_expert_parallel_comm
    with pytest.raises(ConfigError, match="leaves out the final norm"):
        megatron.transformer_config(replace(setup.spec, moe_layers=setup.spec.moe_layers[:-1]), config, setup.ranks)


def test_a_world_that_does_not_factor_shows_the_product():
    parallel = Config(model={"path": "x"}, parallel={"tp": 2, "pp": 3, "ep": 4}).parallel
    with pytest.raises(ConfigError) as error:
        megatron.check_world(parallel, 8)
    assert "tp * pp * cp = 2 * 3 * 1 = 6" in str(error.value)
    assert "etp * ep * pp = 1 * 4 * 3 = 12" in str(error.value)
    megatron.check_world(parallel, 12)


def test_virtual_stages_need_pipeline_parallelism():
    with pytest.raises(ConfigError, match=r"parallel\.vpp = 2 needs pipeline parallelism"):
        megatron.check_world(Config(model={"path": "x"}, parallel={"vpp": 2}).parallel, 1)
