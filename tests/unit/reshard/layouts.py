"""Both sides' layouts, built in the plainest way from whole tensors, and a transfer executed step by step in numpy.

Elements are random bit patterns of the right width without zeros: uint16 for bfloat16, uint32 for float32. Zeros are padding.
"""

import numpy as np
from hypothesis import strategies as st

from moerl.models import ModelSpec, deepseek, glm4, qwen3
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.plan import ITEMSIZE
from moerl.reshard.trainer_layout import TrainerTopology

UNSIGNED = {"bfloat16": np.uint16, "float32": np.uint32, "float8_e4m3fn": np.uint8}


def deepseek_spec(**changes) -> ModelSpec:
    return deepseek.spec(
        {
            "hidden_size": 16,
            "vocab_size": 37,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "num_attention_heads": 8,
            "q_lora_rank": 8,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
        }
        | changes
    )


def qwen3_spec(heads=8, kv_heads=2, head=6, hidden=16, layers=3, experts=8, width=16, vocab=37) -> ModelSpec:
    """Grouped-query attention with fused q, k, v; no shared experts, no dense layers, no correction bias."""
    return qwen3.spec(
        {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_hidden_layers": layers,
            "intermediate_size": 2 * width,
            "moe_intermediate_size": width,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        }
    )


def glm4_spec(heads=8, kv_heads=2, head=6, hidden=16, layers=3, experts=8, width=16, vocab=37, **changes) -> ModelSpec:
    """As Qwen3-MoE, with biases of q, k, v, dense layers first, shared experts, a correction bias, and a router in float32."""
    return glm4.spec(
        {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_hidden_layers": layers,
            "first_k_dense_replace": 1,
            "intermediate_size": 2 * width,
            "moe_intermediate_size": width,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "attention_bias": True,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        }
        | changes
    )


def random_tensors(spec: ModelSpec, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """HF name -> whole tensor, without zeros."""
    rng = np.random.default_rng(seed)
    found = {}
    for entry in (*spec.entries(), *spec.mtp_entries()):
        kind = UNSIGNED["float32" if entry.param.fp32 else dtype]
        for part, name in enumerate(entry.hf):
            found[name] = rng.integers(1, np.iinfo(kind).max, entry.param.part_shape(part), dtype=kind)
    return found


def trainer_rank(spec: ModelSpec, tensors: dict, t: TrainerTopology, rank: int, layer_stages: list[int]) -> dict[str, np.ndarray]:
    """Megatron name -> what a trainer rank holds, without vocabulary padding."""
    stage, local = divmod(rank, t.world // t.pp)
    tp, etp, ep = local % t.tp, local % t.etp, local // t.etp % t.ep
    held = {}
    for entry in (*spec.entries(), *(spec.mtp_entries() if t.mtp else ())):
        param, inside = entry.param, entry.layer is not None and entry.layer < spec.layers
        where = layer_stages[entry.layer] if inside else 0 if "embedding" in param.megatron else t.pp - 1
        if where != stage or (param.expert and entry.expert // (spec.experts // t.ep) != ep):
            continue
        parts = [tensors[name] for name in entry.hf]
        index, count = (etp, t.etp) if param.expert else (tp, t.tp)
        if param.tp_axis is None or (t.transformer_engine and param.engine_replicated and "eh_proj" not in param.megatron):
            slices = parts
        elif param.layers == "once":
            rows = -(-spec.vocab_size // count)
            slices = [parts[0][index * rows : (index + 1) * rows]]
        elif param.head_rows:
            groups = spec.hf_config["num_key_value_heads"]
            fused = np.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], axis=1)
            slices = [np.split(fused, count)[index].reshape(-1, *parts[0].shape[1:])]
        else:
            slices = [np.split(part, count, axis=param.tp_axis)[index] for part in parts]
        held[entry.megatron] = np.ascontiguousarray(np.concatenate(slices))
    return held


def engine_rank(spec: ModelSpec, tensors: dict, e: EngineTopology, rank: int) -> dict[str, np.ndarray]:
    """SGLang's parameters of one rank, padding included."""
    attention, ahead = e.tp // e.attention_dp, f"model.layers.{spec.layers}."

    def vocabulary(tensor, ranks):
        multiple = 64 if -(-spec.vocab_size // 64) * 64 % ranks == 0 else 64 * ranks
        return cut(tensor, 0, ranks, rank, -(-spec.vocab_size // multiple) * multiple)

    held = {
        "model.embed_tokens.weight": vocabulary(tensors["model.embed_tokens.weight"], attention),
        "lm_head.weight": vocabulary(tensors["lm_head.weight"], attention if e.dp_output_layer else e.tp),
    }
    whole = ("norm.weight", "gate.weight", "e_score_correction_bias", "eh_proj.weight")
    held |= {name: tensor for name, tensor in tensors.items() if name.endswith(whole) and (e.draft or not name.startswith(ahead))}
    for layer in range(spec.layers + e.draft):
        held |= _attention(spec, tensors, f"model.layers.{layer}.self_attn.", attention, rank)
        held |= _mlp(tensors, f"model.layers.{layer}.mlp.", layer in (*spec.moe_layers, spec.layers) and spec.experts, e, rank)
    # The layer for multi-token prediction is a model of its own; its decoder layer is one in it.
    outside = tuple(ahead + name for name in ("enorm", "hnorm", "eh_proj", "shared_head"))
    return {
        name.replace(ahead, "draft.model." if name.startswith(outside) else "draft.model.decoder."): tensor for name, tensor in held.items()
    }


def cut(tensor: np.ndarray, axis: int, ranks: int, rank: int, size: int = 0) -> np.ndarray:
    size = size or tensor.shape[axis]
    missing = [(0, size - tensor.shape[a]) if a == axis else (0, 0) for a in range(tensor.ndim)]
    return np.split(np.pad(tensor, missing), ranks, axis)[rank % ranks]


def _attention(spec: ModelSpec, tensors: dict, at: str, ranks: int, rank: int) -> dict[str, np.ndarray]:
    held = {at + "o_proj.weight": cut(tensors[at + "o_proj.weight"], 1, ranks, rank)}
    if not spec.latent_attention:
        heads = spec.hf_config["num_key_value_heads"]
        for what in ("weight", "bias"):
            if at + f"q_proj.{what}" in tensors:
                query, *others = (tensors[at + f"{part}_proj.{what}"] for part in "qkv")
                rest = query.shape[1:]
                repeated = [np.repeat(part.reshape(heads, -1, *rest), max(ranks // heads, 1), axis=0).reshape(-1, *rest) for part in others]
                held[at + f"qkv_proj.{what}"] = np.concatenate([cut(part, 0, ranks, rank) for part in (query, *repeated)])
        return held
    for name in ("q_b_proj", "q_proj", "kv_b_proj"):
        if at + f"{name}.weight" in tensors:
            held[at + f"{name}.weight"] = cut(tensors[at + f"{name}.weight"], 0, ranks, rank)
    down = tensors[at + "kv_a_proj_with_mqa.weight"]
    if at + "q_a_proj.weight" in tensors:
        return held | {at + "fused_qkv_a_proj_with_mqa.weight": np.concatenate([tensors[at + "q_a_proj.weight"], down])}
    return held | {at + "kv_a_proj_with_mqa.weight": down}


def _mlp(tensors: dict, mlp: str, experts: int, e: EngineTopology, rank: int) -> dict[str, np.ndarray]:
    def gated(prefix, ranks):
        gate, up, down = (tensors[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
        multiple = 32 * e.tp if e.cpu else 1
        rows, cols = (-(-size // multiple) * multiple for size in (gate.shape[0], down.shape[1]))
        return np.concatenate([cut(gate, 0, ranks, rank, rows), cut(up, 0, ranks, rank, rows)]), cut(down, 1, ranks, rank, cols)

    def named(prefix, ranks):
        return dict(zip((f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"), gated(prefix, ranks), strict=True))

    if not experts:
        return named(mlp, 1 if e.replicated_dense else e.tp)
    shared = mlp + "shared_experts."
    held = named(shared, 1 if e.replicated_shared else e.tp) if shared + "gate_proj.weight" in tensors else {}
    each, ranks = experts // e.ep, e.tp // e.ep
    pairs = [gated(mlp + f"experts.{expert}.", ranks) for expert in range(rank // ranks * each, (rank // ranks + 1) * each)]
    fused, down = (np.stack(parts) for parts in zip(*pairs, strict=True))
    return held | {mlp + "experts.w13_weight": fused, mlp + "experts.w2_weight": down}


def strided(array: np.ndarray, copy) -> np.ndarray:
    """The box that a `Copy` names inside a contiguous parameter, as a view."""
    flat = array.reshape(-1)
    last = copy.start + sum((n - 1) * s for n, s in zip(copy.counts, (*copy.strides, 1), strict=True))
    assert 0 <= copy.start <= last < flat.size, f"{copy} lies outside {array.shape}"
    steps = tuple(step * flat.itemsize for step in (*copy.strides, 1))
    return np.lib.stride_tricks.as_strided(flat[copy.start :], copy.counts, steps)


def execute(plan, senders: list[dict], receivers: list[dict]) -> list[dict]:
    """Move everything through the buckets; returns how often each element of each receiver's parameters was written."""
    writes = [{name: np.zeros(array.shape, dtype=np.uint8) for name, array in held.items()} for held in receivers]
    for number, bucket in enumerate(plan.buckets):
        wire = np.zeros(bucket["nbytes"], dtype=np.uint8)
        for copy in plan.copies_out(number):
            box = strided(senders[bucket["sender"]][copy.parameter], copy)
            assert box.dtype == UNSIGNED[copy.dtype]
            packed = wire[copy.at : copy.at + box.size * ITEMSIZE[copy.dtype]]
            assert not packed.any(), f"{copy} overlaps another in its bucket"
            packed[:] = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
        for copy in plan.copies_in(number):
            target = strided(receivers[bucket["receiver"]][copy.parameter], copy)
            content = wire[copy.at : copy.at + target.size * ITEMSIZE[copy.dtype]].view(UNSIGNED[copy.dtype])
            target[:] = content.reshape(target.shape)
            strided(writes[bucket["receiver"]][copy.parameter], copy)[:] += 1
    return writes


def divisors(*numbers: int) -> list[int]:
    return [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]


@st.composite
def models(draw) -> ModelSpec:
    if grouped := draw(st.sampled_from([None, qwen3_spec, glm4_spec])):
        return grouped(
            kv_heads=draw(st.sampled_from([2, 4, 8])),
            head=draw(st.integers(1, 5)),
            hidden=draw(st.integers(1, 20)),
            layers=draw(st.integers(1, 4)),
            experts=draw(st.sampled_from([4, 8])),
            width=8 * draw(st.integers(1, 3)),
            vocab=draw(st.integers(1, 150)),
            **({"num_nextn_predict_layers": draw(st.integers(0, 1))} if grouped is glm4_spec else {}),
        )
    layers = draw(st.integers(1, 4))
    return deepseek_spec(
        hidden_size=draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(1, 150)),
        num_hidden_layers=layers,
        first_k_dense_replace=draw(st.integers(0, layers)),
        moe_layer_freq=draw(st.integers(1, 2)),
        intermediate_size=8 * draw(st.integers(1, 4)),
        moe_intermediate_size=8 * draw(st.integers(1, 3)),
        n_routed_experts=draw(st.sampled_from([4, 8])),
        n_shared_experts=draw(st.integers(0, 2)),
        q_lora_rank=draw(st.sampled_from([None, 4, 8])),
        kv_lora_rank=draw(st.sampled_from([2, 6])),
        qk_rope_head_dim=2,
        qk_nope_head_dim=draw(st.integers(1, 4)),
        num_nextn_predict_layers=draw(st.integers(0, 1)),
    )


@st.composite
def trainers(draw, spec: ModelSpec) -> TrainerTopology:
    narrowest = min([*(kv for kv in [spec.hf_config.get("num_key_value_heads")] if kv), spec.hf_config.get("q_lora_rank") or 4, 4])
    if "kv_lora_rank" in spec.hf_config:
        narrowest = min(narrowest, max(divisors(4, spec.hf_config["kv_lora_rank"] + spec.hf_config["qk_rope_head_dim"])))
    mtp = bool(spec.mtp_layers) and draw(st.booleans())
    sizes = divisors(narrowest, *([spec.hidden_size] if mtp else []))  # the rows of eh_proj
    tp, cp, dp = draw(st.sampled_from(sizes)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    pp = draw(st.integers(1, min(spec.layers, 3)))
    vpp = draw(st.integers(1, spec.layers // pp)) if pp > 1 else 1
    per_stage = tp * cp * dp
    ep = draw(st.sampled_from(divisors(per_stage, spec.experts)))
    etp = draw(st.sampled_from(divisors(per_stage // ep, 8)))
    cuts = sorted(draw(st.lists(st.integers(0, spec.layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, spec.layers], strict=True))
    stages = draw(st.sampled_from([(), uneven]))
    return TrainerTopology(per_stage * pp, tp, pp, vpp, cp, ep, etp, draw(st.booleans()), stages, mtp)


@st.composite
def engines(draw, spec: ModelSpec, trainer: TrainerTopology | None = None) -> EngineTopology:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    cpu = draw(st.booleans())
    attention_dp = draw(st.sampled_from(divisors(tp)))
    if cpu and not spec.latent_attention:
        attention_dp = max(attention_dp, tp // spec.hf_config["num_key_value_heads"])
    return EngineTopology(
        count=draw(st.integers(1, 2)),
        tp=tp,
        ep=draw(st.sampled_from(divisors(tp, spec.experts))),
        attention_dp=attention_dp,
        dp_output_layer=draw(st.booleans()),
        replicated_shared=draw(st.booleans()),
        replicated_dense=draw(st.booleans()),
        cpu=cpu,
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        draft=trainer is not None and trainer.mtp and draw(st.booleans()),
    )


def layer_stages(spec: ModelSpec, t: TrainerTopology) -> list[int]:
    """Pipeline rank of each layer, from the sizes of the virtual stages."""
    counts = list(t.stages)
    if not counts:
        stages = t.pp * t.vpp
        counts = [spec.layers // stages] * stages
        for number in [*range(1, stages - 1), 0, stages - 1][: spec.layers % stages]:
            counts[number] += 1
    return [number % t.pp for number, count in enumerate(counts) for _ in range(count)]
