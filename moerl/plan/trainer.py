"""Memory of trainer ranks, part by part. Ranks of one pipeline stage hold the same, so everything is per stage.

    ModelSpec, TrainerTopology --stage_elements--> Elements --weights, gradients, optimizer--> bytes
    Training (settings) -----------------------------------> activations, head, routes, buckets

Weights, gradients and optimizer are counts; Megatron pads its buffers by less than 1 % on top. Activations are an estimate: what
autograd keeps, without what lives only inside one kernel.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from moerl.config.schema import Config
from moerl.models import ModelSpec, Param
from moerl.plan.assumptions import Assumptions, Shape, shape_of
from moerl.reshard.trainer_layout import TrainerTopology, stages_of, trainer_parts

RECOMPUTE = {"recompute_granularity": None, "recompute_num_layers": 1, "recompute_modules": ("core_attn",)}
"""What Megatron does where `[megatron]` is silent."""


@dataclass(frozen=True)
class Elements:
    """What one rank of a pipeline stage holds.

    Attributes:
        dense: elements of parameters that tensor parallelism alone cuts.
        expert: elements of routed experts.
        buffers: float32 elements without gradient: the router's correction bias and the count of tokens beside it, tables of yarn.
    """

    dense: int
    expert: int
    buffers: int


@dataclass(frozen=True)
class Training:
    """What of the settings decides memory.

    Attributes:
        itemsize: bytes of a weight, 2 or 4.
        rows: packed tokens per microbatch and data-parallel rank.
        samples, sample_tokens: of one step, over all ranks.
        granularity: "full", "selective" or None; `modules` that the selective one recomputes, `block` layers per checkpoint of the full.
        replay: routes are kept on the GPU.
        fp32_head: the output layer is computed in float32.
        bucket: bytes of a sync bucket.
        reference: a frozen copy of the weights is kept.
        imbalance: see `Assumptions`.
        mtp: `train.mtp`; where the layer is built, the topology holds it (`TrainerTopology.mtp`).
        distributed: the optimizer's state is cut over data-parallel ranks, as `train.megatron` always does.
    """

    itemsize: int
    rows: int
    samples: int
    sample_tokens: float
    granularity: str | None
    modules: tuple[str, ...]
    block: int
    replay: bool
    fp32_head: bool
    bucket: int
    reference: bool
    imbalance: float
    mtp: Literal["passed_through", "frozen", "trained"] = "passed_through"
    distributed: bool = True


def training_of(config: Config, assumptions: Assumptions) -> Training:
    """What the settings say; Megatron's own defaults where `[megatron]` leaves recomputation open."""
    native = RECOMPUTE | config.megatron
    return Training(
        itemsize=2 if config.train.dtype == "bfloat16" else 4,
        rows=config.train.tokens_per_microbatch,
        samples=config.rollout.prompts_per_step * config.rollout.group_size,
        sample_tokens=assumptions.prompt_tokens + assumptions.response_tokens,
        granularity=native["recompute_granularity"],
        modules=tuple(native["recompute_modules"]),
        block=native["recompute_num_layers"] or 1,
        replay=config.replays,
        fp32_head=config.train.fp32_head,
        bucket=int(config.sync.bucket_mib * 2**20),
        reference=config.objective.kl_coef > 0,
        imbalance=assumptions.imbalance,
        mtp=config.train.mtp,
    )


def stage_layers(spec: ModelSpec, topology: TrainerTopology) -> list[tuple[int, int]]:
    """(dense layers, MoE layers) of each pipeline stage, virtual stages taken together."""
    where, moe = stages_of(spec, topology), set(spec.moe_layers)
    mine = [[layer for layer in range(spec.layers) if where[layer] == stage] for stage in range(topology.pp)]
    return [(sum(layer not in moe for layer in layers), sum(layer in moe for layer in layers)) for layers in mine]


def stage_elements(spec: ModelSpec, topology: TrainerTopology) -> list[Elements]:
    """Elements per rank of each stage.

    A weight that is cut over n ranks counts 1/n of its elements; routed experts are spread over ep besides. The vocabulary is padded to
    a multiple of tp. The first stage has the embedding, the last one the output layer, or again the embedding where both are one, and the
    layer for multi-token prediction where the topology holds it.
    """
    found = []
    for stage, (dense_layers, moe_layers) in enumerate(stage_layers(spec, topology)):
        ahead = int(topology.mtp and stage == topology.pp - 1)
        times = {"all": dense_layers + moe_layers, "dense": dense_layers, "moe": moe_layers, "mtp": ahead}
        dense, expert, buffers = 0, 0, (dense_layers + moe_layers + ahead) * yarn_elements(spec, topology.cp)
        for param in (*spec.params, *spec.mtp_params):
            count = _once(param, stage, topology.pp, spec.tied_embeddings) if param.layers == "once" else times[param.layers]
            each = param_elements(param, topology)
            if param.megatron.endswith("router.expert_bias"):
                buffers += 2 * each * count
            elif param.expert:
                expert += each * count * (spec.experts // topology.ep)
            else:
                dense += each * count
        found.append(Elements(dense, expert, buffers))
    return found


def without_mtp(held: Elements, spec: ModelSpec, topology: TrainerTopology) -> Elements:
    """What is left of a last stage that holds the layer for multi-token prediction."""
    each = [(param.expert, param_elements(param, topology)) for param in spec.mtp_params if not param.megatron.endswith("expert_bias")]
    biases = sum(param_elements(param, topology) for param in spec.mtp_params if param.megatron.endswith("expert_bias"))
    return Elements(
        held.dense - sum(count for expert, count in each if not expert),
        held.expert - sum(count for expert, count in each if expert) * (spec.experts // topology.ep),
        held.buffers - 2 * biases - yarn_elements(spec, topology.cp),
    )


def yarn_elements(spec: ModelSpec, cp: int) -> int:
    """Of the sines and cosines that Megatron's YarnRotaryEmbedding keeps in every layer of multi-latent attention; cp cuts them."""
    m = spec.megatron
    is_yarn = spec.latent_attention and m["rope_type"] == "yarn"
    return 2 * m["original_max_position_embeddings"] * m["qk_pos_emb_head_dim"] // cp if is_yarn else 0


def param_elements(param: Param, topology: TrainerTopology) -> int:
    """Elements that a rank holds of one weight (of one expert's, where there are experts)."""
    parts = trainer_parts(param, topology)
    if param.is_vocabulary:
        return ceil(param.shape[0] / parts) * param.shape[1]
    return sum(prod(param.part_shape(part)) for part in range(len(param.hf))) // parts


def _once(param: Param, stage: int, stages: int, tied: bool) -> int:
    if param.megatron.startswith(("decoder.final", "output")):
        return int(stage == stages - 1)
    return int(stage == 0) + int(tied and stage == stages - 1 > 0)


def weight_bytes(held: Elements, itemsize: int) -> int:
    """Parameters in `itemsize` bytes each, buffers in float32."""
    return (held.dense + held.expert) * itemsize + held.buffers * 4


def gradient_bytes(held: Elements) -> int:
    """One float32 per parameter, in a buffer of its own (`grad_reduce_in_fp32`); that of data parallelism is not cut."""
    return (held.dense + held.expert) * 4


def optimizer_bytes(held: Elements, topology: TrainerTopology, itemsize: int, *, distributed: bool = True) -> int:
    """Adam: two float32 moments per parameter, and a float32 master copy where the parameter is bfloat16: 12 or 8 bytes.

    Distributed (ZeRO-1, arXiv 1910.02054; Megatron's `use_distributed_optimizer`): cut over the ranks that hold the same weights, which
    are dp * cp for dense ones, and world / (etp * ep * pp) for routed experts.
    """
    each = 12 if itemsize == 2 else 8
    if not distributed:
        return each * (held.dense + held.expert)
    dense, expert = topology.per_stage // topology.tp, topology.per_stage // (topology.etp * topology.ep)
    return each * (ceil(held.dense / dense) + ceil(held.expert / expert))


def in_flight(stage: int, pp: int, vpp: int, microbatches: int) -> float:
    """Microbatches, in units of the stage's whole depth, whose activations a stage holds at once at most.

    One-forward-one-backward: pp - stage. Interleaved: 2 * (pp - stage - 1) + (vpp - 1) * pp + 1 chunks of 1/vpp of the depth each
    (arXiv 2104.04473 and Megatron's schedules). Never more than there are.
    """
    if vpp == 1:
        return min(pp - stage, microbatches)
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, microbatches * vpp) / vpp


def attention_elements(shape: Shape, tp: int, recomputed: frozenset[str]) -> float:
    """Elements per token that one layer's attention keeps for its backward pass, with sequence parallelism.

    After arXiv 2205.05198, for memory-efficient attention, which keeps no scores: the layer's input, the norm's output, then (divided by
    tp, as they lie on the heads' ranks) queries, keys and values before and after rotation, and the output, which is the next linear's
    input; recomputing core attention therefore saves nothing. Multi-latent attention adds compressed queries and key-values before and
    after their norms, which tp does not cut but for sequence parallelism.
    """
    norm = 0 if "layernorm" in recomputed else shape.hidden
    heads = shape.heads * shape.key + shape.key_value_heads * (shape.key + shape.value)
    out = shape.heads * shape.value
    if shape.latent:
        up = 0 if "mla_up_proj" in recomputed else 2 * heads
        return (shape.hidden + norm + 2 * (shape.q_lora + shape.latent) + up + out) / tp
    return (shape.hidden + norm + 2 * heads + out) / tp


def moe_elements(shape: Shape, topk: int, experts: int, topology: TrainerTopology, recomputed: frozenset[str], imbalance: float) -> float:
    """Elements per token that one MoE layer's MLP keeps.

    The block's input and the norm's output; scores in float32, before and after the gate function; of the topk copies that each token is
    dispatched as, `imbalance` times the mean of these on the busiest rank: the copy (gathered over etp), the up-projection (gate and up),
    and the activation, which etp cuts; the rows that come back; of shared experts the up-projection and the activation.
    """
    if "moe" in recomputed:
        return 2 * shape.hidden / topology.tp
    norm = 0 if "layernorm" in recomputed else shape.hidden
    scores = 4 * experts
    act = 0 if "moe_act" in recomputed else shape.width
    rows = topk * imbalance / topology.tp
    routed = rows * (shape.hidden * (1 + topology.etp) + 2 * shape.width + act)
    shared = 0 if "shared_experts" in recomputed else 3 * shape.shared_width
    return (shape.hidden + norm + scores + shared) / topology.tp + routed


def dense_elements(shape: Shape, tp: int, recomputed: frozenset[str]) -> float:
    """Elements per token that a dense layer's gated MLP keeps: input, norm's output, gate and up, activation."""
    norm = 0 if "layernorm" in recomputed else shape.hidden
    return (shape.hidden + norm + (0 if "mlp" in recomputed else 3 * shape.dense_width)) / tp


def activation_bytes(spec: ModelSpec, topology: TrainerTopology, training: Training, stage: int, layers: tuple[int, int]) -> int:
    """Activations that a rank of `stage` keeps at most, all of its microbatches in flight together.

    Full recomputation keeps the input of every block of layers, and while it works backwards through one block, that block's own; so
    does selective recomputation of whole MoE layers.
    """
    shape, rows = shape_of(spec), training.rows / topology.cp
    recomputed = frozenset(training.modules) if training.granularity == "selective" else frozenset()
    attention = attention_elements(shape, topology.tp, recomputed)
    moe = attention + moe_elements(shape, spec.topk, spec.experts, topology, recomputed, training.imbalance)
    dense = attention + dense_elements(shape, topology.tp, recomputed)
    depth = in_flight(stage, topology.pp, topology.vpp, microbatches(training, topology))
    itemsize = training.itemsize
    if training.granularity == "full":
        inputs = shape.hidden / topology.tp * ceil(sum(layers) / training.block)
        largest = max(moe if layers[1] else 0, dense if layers[0] else 0) * training.block
        return int(rows * itemsize * (inputs * depth + largest))
    again = moe_elements(shape, spec.topk, spec.experts, topology, frozenset(), training.imbalance) if "moe" in recomputed else 0
    return int(rows * itemsize * (depth * (layers[0] * dense + layers[1] * moe) + again))


def microbatches(training: Training, topology: TrainerTopology) -> int:
    """Of one step, per data-parallel rank, where sequences fill them; a multiple of pp in the interleaved schedule."""
    replicas = topology.world // (topology.tp * topology.pp * topology.cp)
    count = max(ceil(training.samples * training.sample_tokens / replicas / training.rows), 1)
    return ceil(count / topology.pp) * topology.pp if topology.vpp > 1 else count


def head_bytes(spec: ModelSpec, topology: TrainerTopology, training: Training) -> int:
    """Output layer and loss of one microbatch: logits, and what `train.vocabulary` keeps of them, probabilities and logprobs, and their
    gradient, float32 [rows, vocabulary / tp] each; in float32 the output layer's weights and their gradient once more. Training
    multi-token prediction has all but that gradient twice, and a copy of the embedding where that is on another stage.
    """
    columns = ceil(spec.vocab_size / topology.tp)
    matrix, trains = columns * spec.hidden_size, training.mtp == "trained"
    weights = (3 if trains else 2) * matrix * 4 if training.fp32_head else 0
    copied = matrix * training.itemsize if trains and topology.pp > 1 and not spec.tied_embeddings else 0
    return int(training.rows / topology.cp * (columns * 4 * 4 + spec.hidden_size * 4)) * (2 if trains else 1) + weights + copied


def route_bytes(spec: ModelSpec, topology: TrainerTopology, training: Training, moe_layers: int) -> int:
    """Recorded routes of a whole step, which are on the GPU before it starts (`train.forward.localise`): topk ids of one byte (two above
    256 experts) per token and MoE layer of this stage; cp and sequence parallelism cut the tokens.
    """
    if not training.replay:
        return 0
    tokens = training.samples * training.sample_tokens / (topology.per_stage)
    return int(tokens * moe_layers * spec.topk * (1 if spec.experts <= 256 else 2))


def stage_memory(
    spec: ModelSpec, topology: TrainerTopology, training: Training, held: list[Elements] | None = None
) -> list[dict[str, int]]:
    """Bytes of one rank of each stage, by part.

    Args:
        held: from `stage_elements`, where it is known already.
    """
    held = held or stage_elements(spec, topology)
    found = []
    for stage, (mine, layers) in enumerate(zip(held, stage_layers(spec, topology), strict=True)):
        ahead = topology.mtp and stage == topology.pp - 1
        decoder = without_mtp(mine, spec, topology) if ahead else mine
        trains = ahead and training.mtp == "trained"
        learning, run = (mine, (layers[0], layers[1] + 1)) if trains else (decoder, layers)
        found.append(
            {
                "weights": weight_bytes(mine, training.itemsize),
                "gradients": gradient_bytes(learning),
                "optimizer": optimizer_bytes(learning, topology, training.itemsize, distributed=training.distributed),
                "activations": activation_bytes(spec, topology, training, stage, run),
                "head": head_bytes(spec, topology, training) if stage == topology.pp - 1 else 0,
                "routes": route_bytes(spec, topology, training, layers[1]),
                "sync_buckets": 2 * training.bucket,
                "reference": weight_bytes(decoder, training.itemsize) if training.reference else 0,
            }
        )
    return found


def worst_stage(stages: list[dict[str, int]]) -> int:
    """The stage whose ranks need most."""
    return max(range(len(stages)), key=lambda stage: sum(stages[stage].values()))
