"""Bounds on speed. None is a prediction: communication, stragglers, sampling, scheduling and kernels' shortfall come on top.

Generation: a decoding step reads every weight that its batch uses and the whole KV cache of its batch, and computes two FLOPs per
active parameter and token; the slower of both bounds it (the roofline model, doi 10.1145/1498765.1498785). Training: six FLOPs per
active parameter and token (arXiv 2001.08361) and causal attention, at a stated share of the peak.
"""

from dataclasses import dataclass
from math import prod

from moerl.config.schema import Config
from moerl.models import ModelSpec
from moerl.plan.assumptions import Assumptions, Shape, shape_of
from moerl.plan.engine import EngineWeights
from moerl.plan.trainer import RECOMPUTE, Training, microbatches
from moerl.reshard.trainer_layout import TrainerTopology


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token multiplies: all but the embedding's rows, and topk of the routed experts. A tied output layer counts."""
    moe = len(spec.moe_layers)
    times = {"once": 1, "all": spec.layers, "dense": spec.layers - moe, "moe": moe}
    total = 0
    for param in spec.params:
        if param.megatron.startswith("embedding") and not spec.tied_embeddings:
            continue
        each = sum(prod(param.part_shape(part)) for part in range(len(param.hf)))
        total += each * times[param.layers] * (spec.topk if param.expert else 1)
    return total


def experts_read(experts: int, topk: int, tokens: float) -> float:
    """Expected number of different experts that `tokens` tokens choose in one layer, each `topk` at random: E (1 - (1 - k/E)^n)."""
    return experts * (1 - (1 - topk / experts) ** tokens)


def attention_flops(shape: Shape, layers: int, context: float) -> float:
    """FLOPs of scores and values for one token that attends to `context` others: 2 (key + value) per head and pair."""
    return 2 * layers * shape.heads * (shape.key + shape.value) * context


def absorbed_flops(shape: Shape, layers: int, context: float) -> float:
    """The same while decoding. Multi-latent attention then works on the latent, absorbed (arXiv 2405.04434): it is key and value."""
    if not shape.latent:
        return attention_flops(shape, layers, context)
    return 2 * layers * shape.heads * (2 * shape.latent - shape.rotary) * context


@dataclass(frozen=True)
class Generation:
    """One engine at steady state.

    Attributes:
        batch: sequences that run at once.
        step_s: bound of one decoding step; `memory_s` and `compute_s` are its two sides.
        tokens_per_s: of one engine, the prompts' share of the time included.
    """

    batch: int
    memory_s: float
    compute_s: float
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        return max(self.memory_s, self.compute_s)


def generation(
    spec: ModelSpec, weights: EngineWeights, token_bytes: int, tp: int, batch: int, assumptions: Assumptions, group_size: int
) -> Generation:
    """Bound of one engine with `batch` sequences of mean length. A group's prompt is computed once (its prefix is cached)."""
    shape, prompt, response = shape_of(spec), assumptions.prompt_tokens, assumptions.response_tokens
    context = prompt + response / 2
    share = experts_read(spec.experts, spec.topk, batch) / spec.experts
    read = weights.rest + weights.experts * share + batch * context * token_bytes
    memory = read / (assumptions.hbm_tb_s * 1e12)
    peak = tp * assumptions.tflops * 1e12
    flops = 2 * active_parameters(spec)
    compute = batch * (flops + absorbed_flops(shape, spec.layers, context)) / peak
    prefill = prompt * (flops + attention_flops(shape, spec.layers, prompt / 2)) / peak / group_size
    sample_s = response * max(memory, compute) / batch + prefill
    return Generation(batch, memory, compute, response / sample_s)


@dataclass(frozen=True)
class TrainingTime:
    """Attributes:
    flops_per_token: forward and backward, recomputation and further passes included.
    microbatches: per data-parallel rank.
    bubble: share of a step that the pipeline leaves a stage idle: (pp - 1) / (microbatches * vpp + pp - 1) (arXiv 2104.04473).
    step_s: bound of one step.
    """

    flops_per_token: float
    microbatches: int
    bubble: float
    step_s: float


def passes(config: Config) -> float:
    """Forward passes' worth of work per step: 1 forward, 2 backward, 1 of full recomputation, and the further passes there are: old
    logprobs, reference, and the measurement of the mismatch every so many steps. Epochs repeat all but those.
    """
    native, diagnostics = RECOMPUTE | config.megatron, config.diagnostics
    full = native["recompute_granularity"] == "full"
    further = (config.old_logprobs_mode is not None) + (config.objective.kl_coef > 0)
    measured = 1 / diagnostics.mismatch_every_steps if diagnostics.mismatch_every_steps else 0.0
    return config.objective.epochs_per_batch * (3 + full) + further + measured


def training_time(
    spec: ModelSpec, topology: TrainerTopology, training: Training, assumptions: Assumptions, forward_passes: float
) -> TrainingTime:
    """Bound of one step's training on all samples."""
    shape = shape_of(spec)
    attention = attention_flops(shape, spec.layers, training.sample_tokens / 2)
    flops = forward_passes * (2 * active_parameters(spec) + attention)
    count = microbatches(training, topology)
    bubble = (topology.pp - 1) / (count * topology.vpp + topology.pp - 1)
    work = training.samples * training.sample_tokens * flops / (topology.world * assumptions.tflops * 1e12 * assumptions.mfu)
    return TrainingTime(flops, count, bubble, work / (1 - bubble))
