"""Block-quantised engines: SGLang's bits, its refusals and its shapes; plans that move weights and scales once, to the right place."""

import dataclasses
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.models import ModelSpec
from moerl.reshard import fp8
from moerl.reshard.boxes import kinds
from moerl.reshard.engine_boxes import SCALE, EngineTopology, Parameter, check_topology, engine_parameters
from moerl.reshard.fp8 import block_scales, dequantise_blocks, quantise_blocks, sources
from moerl.reshard.fp8_layout import check_blocks, wire_kinds
from moerl.reshard.pack import Box, build, pack, unpack
from moerl.reshard.plan import Copy, make_plan
from moerl.reshard.summary import pair_bytes
from moerl.reshard.trainer_layout import TrainerTopology
from tests.unit.reshard.by_sglang import Cut, Experts, ask
from tests.unit.reshard.layouts import (
    UNSIGNED,
    deepseek_spec,
    divisors,
    engine_rank,
    engines,
    execute,
    layer_stages,
    qwen3_spec,
    trainer_rank,
    trainers,
)

F8, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
LINEAR = ("proj.weight", "proj_with_mqa.weight")
SIZES = (64, 128, 192, 256, 384, 512, 576)
BLOCK = (128, 128)


def tiny():
    """A DeepSeek whose sizes fit blocks of 128 on two ranks of either side; keys and values are ragged where they are whole."""
    return deepseek_spec(
        hidden_size=320,
        vocab_size=100,
        num_hidden_layers=2,
        intermediate_size=512,
        moe_intermediate_size=256,
        n_routed_experts=4,
        num_attention_heads=4,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    )


def checkpoint() -> dict[str, torch.Tensor]:
    """HF name -> random bf16, with magnitudes that differ from block to block."""
    found, generator = {}, torch.Generator().manual_seed(5)
    for entry in tiny().entries():
        for part, name in enumerate(entry.hf):
            shape = entry.param.part_shape(part)
            exponents = torch.randint(-12, 4, shape, generator=generator).float()
            found[name] = (torch.randn(shape, generator=generator) * 2**exponents).to(F32 if entry.param.fp32 else BF16)
    return found


def special_cases() -> dict[str, torch.Tensor]:
    """Ragged edges, blocks of zeros, halves of subnormals, values that are not finite; bf16 and fp32."""
    found, generator = {}, torch.Generator().manual_seed(7)
    for rows, cols in [(1, 1), (128, 128), (127, 129), (300, 200), (129, 513)]:
        values = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-20, 20, (rows, cols), generator=generator)
        zeros, tiny_values, broken = values.clone(), values * 1e-7, values.clone()
        zeros[:128, :128] = 0
        broken[0, 0], broken[-1, -1], broken[rows // 2, cols // 2] = torch.inf, torch.nan, -torch.inf
        for name, tensor in {"plain": values, "zeros": zeros, "tiny": tiny_values, "broken": broken}.items():
            for dtype in (BF16, F32):
                found[f"{name} {rows} x {cols} {dtype}"] = tensor.to(dtype)
    # Multiples of half the spacing between fp8 numbers: every one is a tie.
    ties = torch.arange(128 * 128).reshape(128, 128).remainder(129).float() / 2
    ties[0, 0] = 448
    return {**found, "ties": ties.to(BF16)}


def small(**changes):
    return deepseek_spec(**{"num_attention_heads": 4, "hidden_size": 256, "q_lora_rank": 256, **changes})


def linear_layers() -> list[tuple[str, Cut, ModelSpec, EngineTopology]]:
    """(end of the HF name, how SGLang builds it, the model it is of, the engines)."""
    found = []
    for tp in (1, 2, 4):
        engine = EngineTopology(tp=tp, fp8_block=BLOCK)
        for size in SIZES:
            heads, part, gated = size * 4 // tp, size // tp, small(intermediate_size=size)
            found += [
                ("q_b_proj.weight", Cut(tp, 256, 256, size * 4, (heads,)), small(qk_nope_head_dim=size - 4), engine),
                ("o_proj.weight", Cut(tp, size * 4, heads, 256, (256,)), small(v_head_dim=size), engine),
                ("mlp.gate_proj.weight", Cut(tp, 256, 256, 2 * size, (part, part)), gated, engine),
                ("mlp.down_proj.weight", Cut(tp, size, part, 256, (256,)), gated, engine),
            ]
    return found


def expert_layers() -> list[tuple[Experts, ModelSpec, EngineTopology]]:
    return [
        (Experts(tp, 2, 320, size // tp), small(hidden_size=320, moe_intermediate_size=size, n_routed_experts=2 * ep), engine)
        for tp, ep in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
        for engine in [EngineTopology(tp=tp * ep, ep=ep, fp8_block=BLOCK)]
        for size in SIZES
    ]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """SGLang's answers to everything that this file asks it."""
    linear = {f"checkpoint {name}": tensor for name, tensor in checkpoint().items() if quantises(name)}
    return ask(
        tmp_path_factory.mktemp("fp8"),
        {**special_cases(), **linear},
        [row[1] for row in linear_layers()],
        [row[0] for row in expert_layers()],
    )


def quantises(name: str) -> bool:
    return name.endswith(LINEAR)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_quantising_gives_sglangs_bits(answer):
    for name, tensor in special_cases().items():
        values, scales = quantise_blocks(tensor)
        assert same_bits(values, answer.blocks[name][0]), name
        assert same_bits(scales, answer.blocks[name][1]), name
        assert same_bits(block_scales(tensor), scales), name
        assert same_bits(dequantise_blocks(values, scales), answer.back[name]), name
        if tensor.dtype == BF16:
            values, scales = quantise_blocks(tensor, power_of_two=True)
            assert same_bits(values, answer.powers[name][0]), name
            assert same_bits(scales, answer.powers[name][1]), name
            assert same_bits(block_scales(tensor, power_of_two=True), scales), name


def test_zeros_stay_zero_and_have_a_finite_scale():
    values, scales = quantise_blocks(torch.zeros(130, 5))
    assert not values.float().any()
    assert scales.tolist() == [[pytest.approx(1e-4 / 448)]] * 2
    assert quantise_blocks(torch.zeros(0, 5))[1].shape == (0, 1)


@given(
    st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.booleans(),
    st.integers(1, 300),
    st.integers(0, 2**32),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_block_is_quantised_by_itself(monkeypatch, shape, block, power_of_two, strip, seed):
    monkeypatch.setattr("moerl.numerics.fp8._STRIP_ELEMENTS", strip)
    weight = torch.randn((2, *shape[1:]) if shape[0] else shape[1:], generator=torch.Generator().manual_seed(seed))
    values, scales = quantise_blocks(weight, block, power_of_two=power_of_two)
    assert scales.shape == (*weight.shape[:-2], ceil(shape[1] / block[0]), ceil(shape[2] / block[1]))
    for row, col in np.ndindex(*scales.shape[-2:]):
        part = (..., slice(row * block[0], (row + 1) * block[0]), slice(col * block[1], (col + 1) * block[1]))
        alone, scale = quantise_blocks(weight[part], block, power_of_two=power_of_two)
        assert same_bits(values[part], alone)
        assert same_bits(scales[..., row, col, None], scale[..., 0])
        largest = weight[part].abs().amax((-2, -1))
        assert (scale[..., 0, 0] >= largest / 448).all()
        assert (scale[..., 0, 0] <= largest / 448 * (2 if power_of_two else 1) + 1e-6).all()
    back = dequantise_blocks(values, scales, block, F32)
    spacing = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[1], : shape[2]] * 2**-10
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, spacing) * 1.0001).all()
    with pytest.raises(ReshardError, match="expected scales"):
        dequantise_blocks(values, scales[..., None], block)


def blocks_refused(spec, trainer, engine) -> list[str]:
    try:
        check_blocks(wire_kinds(spec, engine), trainer, engine)
    except ReshardError as error:
        return str(error).splitlines()[1:]
    return []


def test_engines_are_refused_where_sglang_refuses_them(answer):
    layers = [(end, spec, engine, why) for (end, _, spec, engine), (why, _) in zip(linear_layers(), answer.linear, strict=True)]
    layers += [
        ("experts.{expert}.", spec, engine, why) for (_, spec, engine), (why, _) in zip(expert_layers(), answer.experts, strict=True)
    ]
    for end, spec, engine, why in layers:
        ours = [line for line in blocks_refused(spec, TrainerTopology(world=1), engine) if end in line]
        assert bool(ours) == bool(why), f"{end} {engine}: SGLang says {why!r}, we say {ours!r}"
    assert 20 < sum(bool(why) for *_, why in layers) < len(layers) - 20


def test_parameters_have_sglangs_shapes(answer):
    built = [
        ("model.layers.0." + ("" if end.startswith("mlp.") else "self_attn.") + end.replace("gate_", "gate_up_"), spec, engine, shapes)
        for (end, _, spec, engine), (_, shapes) in zip(linear_layers(), answer.linear, strict=True)
    ]
    built += [
        ("model.layers.1.mlp.experts.weight", spec, engine, shapes)
        for (_, spec, engine), (_, shapes) in zip(expert_layers(), answer.experts, strict=True)
    ]
    for module, spec, engine, shapes in built:
        held = engine_parameters(wire_kinds(spec, engine), engine)[-1]
        for name, shape in shapes.items():
            expected = Parameter(shape, "float32" if name.endswith(SCALE) else "float8_e4m3fn")
            assert held[module.removesuffix("weight") + name] == expected, f"{module}: {name}"
    assert sum(len(shapes) for *_, shapes in built) > 100


def test_what_engines_hold_quantised():
    engine = EngineTopology(tp=2, ep=2, fp8_block=BLOCK)
    held = engine_parameters(wire_kinds(tiny(), engine), engine)[0]
    scales = {name.removesuffix(SCALE) for name in held if name.endswith(SCALE)}
    assert {name for name, parameter in held.items() if parameter.dtype == "float8_e4m3fn"} == scales
    plain = {
        name.rpartition("layers.0.")[2] for name in held if name not in scales and not name.endswith(SCALE) and "layers.1." not in name
    }
    assert plain == {
        "model.embed_tokens.weight",
        "input_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    moe = "model.layers.1.mlp."
    assert held[moe + "gate.weight"].dtype == "bfloat16"
    assert held[moe + "experts.w13_weight"] == Parameter((2, 512, 320), "float8_e4m3fn")
    assert held[moe + "experts.w13_weight_scale_inv"] == Parameter((2, 4, 3), "float32")
    assert held[moe + "experts.w2_weight_scale_inv"] == Parameter((2, 3, 2), "float32")
    fused = "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"
    assert held[fused] == Parameter((448, 320), "float8_e4m3fn")
    assert held[fused + SCALE] == Parameter((4, 3), "float32")
    assert wire_kinds(tiny(), EngineTopology(tp=2)) == kinds(tiny())


def test_every_cut_through_a_block_is_listed_with_the_sizes_that_fit():
    spec = tiny()
    trainer = TrainerTopology(world=4, tp=4, etp=4)
    engine = EngineTopology(tp=4, fp8_block=BLOCK)
    with pytest.raises(ReshardError) as caught:
        make_plan(spec, trainer, engine, bucket_bytes=1 << 20, ranks_per_node=8)
    text = str(caught.value)
    assert text.splitlines()[0].endswith("cuts go through the blocks of 128 × 128 that share a scale:")
    for line in (
        "self_attn.q_a_proj.weight: 256 rows are cut into 4 of 64 by the trainer, not a multiple of 128; tp = 1, 2 would fit",
        "self_attn.kv_a_proj_with_mqa.weight: 192 rows are cut into 4 of 48 by the trainer, not a multiple of 128; tp = 1 would fit",
        "self_attn.o_proj.weight: 256 columns are cut into 4 of 64 by engines, not a multiple of 128; tp / attention_dp = 1, 2 would fit",
        "experts.{expert}.down_proj.weight: 256 columns are cut into 4 of 64 by the trainer, not a multiple of 128; etp = 1, 2 would fit",
        "experts.{expert}.down_proj.weight: 256 columns are cut into 4 of 64 by engines, not a multiple of 128; tp / ep = 1, 2 would fit",
        "shared_experts.down_proj.weight: 256 columns are cut into 4 of 64 by engines, not a multiple of 128; tp = 1, 2 would fit",
    ):
        assert line in text
    assert "q_b_proj" not in text, "512 rows are cut into 4 of 128"
    one = TrainerTopology(world=1)
    (only,) = blocks_refused(deepseek_spec(**{**tiny().hf_config, "q_lora_rank": 200}), one, EngineTopology(fp8_block=BLOCK))
    assert "q_a_proj.weight: 200 rows are fused with others by engines, not a multiple of 128; no size fits" in only
    grouped = blocks_refused(qwen3_spec(heads=4, kv_heads=2, head=64, hidden=128, width=128), one, EngineTopology(fp8_block=BLOCK))
    assert [line.split(": ")[0].rpartition(".self_attn.")[2] for line in grouped] == ["k_proj.weight", "v_proj.weight"]
    assert "128 rows lie in 2 groups of 64 at the trainer" in grouped[0]


def test_engines_on_cpu_are_refused():
    with pytest.raises(ReshardError, match="engines on CPU repack fp8 weights"):
        check_topology(tiny(), kinds(tiny()), EngineTopology(cpu=True, fp8_block=BLOCK))


@st.composite
def quantised_models(draw, block):
    """Most sizes are whole blocks, but for those that neither side cuts."""
    rows, cols = block
    each = rows * cols
    hidden, width = draw(st.integers(1, 3 * cols)), draw(st.sampled_from([each, 3, 4]))
    if draw(st.booleans()):
        return qwen3_spec(
            kv_heads=draw(st.sampled_from([2, 4])),
            head=each * draw(st.integers(1, 2)),
            hidden=hidden,
            layers=draw(st.integers(1, 2)),
            experts=4,
            width=8 * width,
            vocab=draw(st.integers(1, 100)),
        )
    return deepseek_spec(
        hidden_size=hidden,
        vocab_size=draw(st.integers(1, 100)),
        num_hidden_layers=draw(st.integers(1, 3)),
        intermediate_size=8 * width,
        moe_intermediate_size=8 * width,
        n_routed_experts=4,
        n_shared_experts=draw(st.integers(0, 1)),
        q_lora_rank=draw(st.sampled_from([None, 4 * each])),
        kv_lora_rank=3 * each if draw(st.booleans()) else 5,
        qk_rope_head_dim=each,
        qk_nope_head_dim=each,
        v_head_dim=each,
    )


def whole_tensors(spec, block) -> tuple[dict, dict]:
    """HF name -> random non-zero patterns: what engines hold of each weight, and (elsewhere zero) the scales of linear weights."""
    rng = np.random.default_rng(0)
    values, scales = {}, {}
    for entry in spec.entries():
        for part, name in enumerate(entry.hf):
            shape, linear = entry.param.part_shape(part), quantises(name)
            dtype = np.uint8 if linear else UNSIGNED["float32" if entry.param.fp32 else "bfloat16"]
            values[name] = rng.integers(1, np.iinfo(dtype).max, shape, dtype=dtype)
            grid = tuple(ceil(size / edge) for size, edge in zip(shape, block, strict=True)) if linear else shape
            scales[name] = rng.integers(1, 2**32, grid, dtype=np.uint32)
    return values, scales


def with_scales(held: dict, scales: dict, linear) -> dict:
    return {**held, **{name + SCALE: array for name, array in scales.items() if linear(name)}}


@given(st.data())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_weights_and_scales_fill_every_engine_parameter_once(data):
    block = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 3)]))
    spec = data.draw(quantised_models(block))
    trainer = data.draw(trainers(spec))
    engine = dataclasses.replace(data.draw(engines(spec)), cpu=False, dtype="bfloat16", fp8_block=block)
    assume(not blocks_refused(spec, trainer, engine))
    bucket_bytes = data.draw(st.sampled_from([1000, 1 << 20]))
    plan = make_plan(spec, trainer, engine, bucket_bytes=bucket_bytes, ranks_per_node=data.draw(st.integers(1, 8)))
    values, scales = whole_tensors(spec, block)
    stages = layer_stages(spec, trainer)

    def sent(name):
        return any(part in name for part in ("linear_q", "linear_kv", "linear_proj", "linear_fc")) and "norm" not in name

    def received(name):
        return name.endswith(("proj.weight", "with_mqa.weight", "w13_weight", "w2_weight"))

    senders = [
        with_scales(*(trainer_rank(spec, tensors, trainer, rank, stages) for tensors in (values, scales)), sent)
        for rank in range(trainer.world)
    ]
    each = [with_scales(*(engine_rank(spec, tensors, engine, rank) for tensors in (values, scales)), received) for rank in range(engine.tp)]
    wanted = each * engine.count
    receivers = [{name: np.zeros_like(array) for name, array in held.items()} for held in wanted]

    writes = execute(plan, senders, receivers)

    for rank, held in enumerate(wanted):
        for name, array in held.items():
            assert np.array_equal(receivers[rank][name], array), f"engine rank {rank}: {name}"
            assert np.array_equal(writes[rank][name], (array != 0).astype(np.uint8)), f"engine rank {rank}: {name} not written exactly once"
    assert pair_bytes(plan).sum(axis=0).tolist() == [sum(np.count_nonzero(a) * a.itemsize for a in held.values()) for held in wanted]
    assert plan.summary().bytes_ratio == 1.0
    names = {np.uint8: "float8_e4m3fn", np.uint16: "bfloat16", np.uint32: "float32"}
    for rank, parameters in enumerate(engine_parameters(wire_kinds(spec, engine), engine)):
        assert parameters == {name: Parameter(array.shape, names[array.dtype.type]) for name, array in each[rank].items()}
    for number in range(len(plan.buckets)):
        assert all(copy.at % {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[copy.dtype] == 0 for copy in plan.copies_in(number))


def test_a_weight_is_committed_with_its_scales():
    plan = make_plan(tiny(), TrainerTopology(world=1), EngineTopology(fp8_block=BLOCK), bucket_bytes=60000, ranks_per_node=8)
    units = plan.commit_units(0)
    name = "model.layers.1.mlp.experts.w2_weight"
    touched = [n for n in range(len(plan.buckets)) if any(copy.parameter in (name, name + SCALE) for copy in plan.copies_in(n))]
    assert list(units[name]) == touched
    assert {copy.parameter for copy in plan.copies_in(touched[0])} >= {name + SCALE}, "scales come first"
    assert not [unit for unit in units if unit.endswith(SCALE)]
    assert plan.fp8_block == BLOCK


def moved(copies: list[Copy], tensors: dict[str, torch.Tensor], bucket: torch.Tensor, move) -> None:
    """Pack or unpack one bucket with the kernel that a transfer uses."""
    names = list(dict.fromkeys(copy.parameter for copy in copies))
    held = [tensors[name] for name in names]
    boxes = [
        Box(names.index(c.parameter), c.start, c.counts, (*c.strides, 1), tensors[c.parameter].dtype, c.at, getattr(torch, c.dtype))
        for c in copies
    ]
    table = build(boxes, held, len(bucket))
    move(table, held, bucket) if move is pack else move(table, bucket, held)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bucket_bytes", [20000, 1 << 24])
def test_engines_hold_what_sglang_makes_of_the_checkpoint(answer, power_of_two, bucket_bytes):
    """TP2 with EP2 to TP2: bit for bit the slices of what SGLang's own function makes of every whole tensor."""
    spec, whole = tiny(), checkpoint()
    trainer = TrainerTopology(world=2, tp=2, ep=2, transformer_engine=True)
    engine = EngineTopology(tp=2, fp8_block=BLOCK, fp8_power_of_two=power_of_two)
    plan = make_plan(spec, trainer, engine, bucket_bytes=bucket_bytes, ranks_per_node=8)
    assert plan.summary().bytes_ratio == 1.0
    bits = {name: tensor.view(torch.int32 if tensor.dtype == F32 else torch.int16).numpy() for name, tensor in whole.items()}
    senders = [
        {name: torch.from_numpy(array).view(F32 if array.itemsize == 4 else BF16) for name, array in held.items()}
        for held in (trainer_rank(spec, bits, trainer, rank, [0] * spec.layers) for rank in range(2))
    ]
    asked = answer.powers if power_of_two else answer.blocks
    quantised = {name: asked[f"checkpoint {name}"] for name in whole if quantises(name)}
    values = {**bits, **{name: pair[0].view(torch.uint8).numpy() for name, pair in quantised.items()}}
    scales = {**bits, **{name: pair[1].view(torch.int32).numpy() for name, pair in quantised.items()}}

    def is_quantised(name: str) -> bool:
        return name.endswith(("proj.weight", "with_mqa.weight", "w13_weight", "w2_weight"))

    wanted = [with_scales(*(engine_rank(spec, t, engine, rank) for t in (values, scales)), is_quantised) for rank in range(2)]
    held = [
        {name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for name, p in parameters.items()}
        for parameters in engine_parameters(wire_kinds(spec, engine), engine)
    ]

    for number, head in enumerate(plan.buckets):
        bucket = torch.empty(int(head["nbytes"]), dtype=torch.uint8)
        copies = plan.copies_out(number)
        moved(copies, sources(copies, senders[head["sender"]].__getitem__, plan.fp8_block, power_of_two=power_of_two), bucket, pack)
        moved(plan.copies_in(number), held[head["receiver"]], bucket, unpack)

    for rank in range(2):
        assert held[rank].keys() == wanted[rank].keys()
        for name, array in wanted[rank].items():
            got = held[rank][name].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.itemsize])
            assert np.array_equal(got.numpy(), array), f"engine rank {rank}: {name}"


def test_sources_make_only_what_a_bucket_touches(monkeypatch):
    weight, plain = torch.randn(512, 384, dtype=BF16), torch.randn(4, dtype=BF16)
    tensors = {"w": weight, "norm": plain}.__getitem__
    part = Copy("w", "float8_e4m3fn", 300 * 384 + 130, (1, 5, 7), (0, 384), 0)
    scale, whole = Copy("w" + SCALE, "float32", 0, (1, 4, 3), (0, 3), 40), Copy("norm", "bfloat16", 0, (1, 1, 4), (0, 4), 200)
    calls = []
    monkeypatch.setattr(
        fp8, "quantise_blocks", lambda window, *rest, **more: calls.append(tuple(window.shape)) or quantise_blocks(window, *rest, **more)
    )
    found = sources([scale, part, whole], tensors, BLOCK)
    assert calls == [(128, 128)]
    values, scales = quantise_blocks(weight)
    assert same_bits(found["w"][300:305, 130:137], values[300:305, 130:137])
    assert same_bits(found["w" + SCALE], scales)
    assert found["norm"] is plain
    assert sources([whole], tensors, None)["norm"] is plain


def test_the_sizes_that_fit_are_the_divisors():
    """Of a size in blocks, exactly the divisors are suggested."""
    for blocks in range(1, 30):
        spec = deepseek_spec(**{**tiny().hf_config, "intermediate_size": 128 * blocks})
        engine = EngineTopology(tp=4 * blocks + 1, fp8_block=BLOCK)
        line = next(line for line in blocks_refused(spec, TrainerTopology(world=1), engine) if ".mlp.gate_proj" in line)
        shown = line.partition("; tp = ")[2].partition(" would")[0].removesuffix(", …")
        assert [int(n) for n in shown.split(", ")] == divisors(blocks)[:8]
