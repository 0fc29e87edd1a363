"""The algebra of boxes against sets of coordinates, and both layouts against shapes that were counted by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard.boxes import cut, elements, intersect, kinds, pieces
from moerl.reshard.engine_boxes import (
    EngineTopology,
    Parameter,
    check_engine,
    check_topology,
    commit_unit,
    engine_parameters,
    engine_shares,
    padded_vocabulary,
)
from moerl.reshard.trainer_layout import (
    TrainerTopology,
    check_shards,
    check_trainer,
    expected_shards,
    stages_of,
    trainer_shares,
)
from tests.unit.reshard.layouts import deepseek_spec, qwen3_spec

intervals = st.tuples(st.integers(0, 4), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))
boxes = st.tuples(intervals, intervals, intervals)
filled = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))] * 3)


def array(found):
    return np.array(found, dtype=np.int64).reshape(-1, 3, 2)


def points(box):
    return list(itertools.product(*(range(first, last) for first, last in box)))


@given(st.lists(boxes, max_size=4), st.lists(boxes, max_size=4))
def test_overlaps_are_the_common_points(a, b):
    i, j, found = intersect(array(a), array(b))
    for (one, p), (other, q) in itertools.product(enumerate(a), enumerate(b)):
        common = set(points(p)) & set(points(q))
        hits = [set(points(box)) for x, y, box in zip(i, j, found, strict=True) if (x, y) == (one, other)]
        assert hits == ([common] if common else [])
    assert elements(found).tolist() == [len(points(box)) for box in found]


@given(filled, st.integers(-2, 70))
def test_a_cut_keeps_every_point_in_order_and_is_at_the_nearest_row(box, position):
    before, after = cut(np.array(box), position)
    assert [p for part in (*before, *after) for p in points(part)] == points(box)
    assert len(before) <= 2
    assert len(after) <= 2
    (_, (c0, c1)) = box[1:]
    wanted = min(max(position, 0), len(points(box)))
    assert abs(sum(len(points(part)) for part in before) - wanted) * 2 <= c1 - c0


@given(filled, st.integers(1, 70))
def test_pieces_cover_a_box_and_respect_the_limit(box, limit):
    found = list(pieces(np.array(box), limit))
    assert sorted(p for part in found for p in points(part)) == points(box)
    width = box[2][1] - box[2][0]
    assert all(len(points(part)) <= max(limit, width) for part in found)


def test_kinds_stand_for_every_tensor_of_the_checkpoint():
    for spec in (deepseek_spec(), qwen3_spec()):
        names = [
            kind.hf.format(layer=layer, expert=expert) for kind in kinds(spec) for layer in kind.layers for expert in range(kind.experts)
        ]
        assert sorted(names) == sorted(name for entry in spec.entries() for name in entry.hf)


def test_a_tied_output_layer_does_not_travel():
    assert not [kind for kind in kinds(deepseek_spec(tie_word_embeddings=True)) if kind.hf == "lm_head.weight"]


def test_layers_are_numbered_around_what_lies_outside_them():
    found = {kind.hf: kind.layers for kind in kinds(deepseek_spec())}
    assert found["model.embed_tokens.weight"] == (-1,)
    assert found["model.norm.weight"] == found["lm_head.weight"] == (3,)
    assert found["model.layers.{layer}.mlp.gate.weight"] == (1, 2)


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_compressed_projections_are_cut_by_local_layers_only(transformer_engine):
    topology = TrainerTopology(world=4, tp=2, transformer_engine=transformer_engine)
    kind = next(kind for kind in kinds(deepseek_spec()) if "q_a_proj" in kind.hf)
    held = trainer_shares(kind, topology)
    assert held.ranks == (((0, 1, 2, 3),) if transformer_engine else ((0, 2), (1, 3)))
    assert held.boxes[:, 1].tolist() == ([[0, 8]] if transformer_engine else [[0, 4], [4, 8]])


def test_experts_lie_on_their_own_ranks():
    kind = next(kind for kind in kinds(deepseek_spec()) if "experts.{expert}.up_proj" in kind.hf)
    held = trainer_shares(kind, TrainerTopology(world=8, tp=2, ep=2, etp=2))
    assert held.ranks == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert held.boxes[:, 0].tolist() == [[0, 4], [0, 4], [4, 8], [4, 8]]
    assert held.boxes[:, 1].tolist() == [[0, 8], [8, 16]] * 2
    assert held.offsets.tolist() == [8 * 16] * 4, "up lies behind this rank's half of gate"


def test_groups_of_heads_interleave_queries_keys_and_values():
    query, key, value = (kind for kind in kinds(qwen3_spec(heads=4, kv_heads=2, head=3, hidden=5)) if kind.param.head_rows)
    topology = TrainerTopology(world=1)
    # Rows of linear_qkv: q q k v (of 3 rows each) for head 0, then for head 1.
    assert trainer_shares(query, topology).offsets.tolist() == [0, 12 * 5]
    assert trainer_shares(key, topology).offsets.tolist() == [6 * 5, 18 * 5]
    assert trainer_shares(value, topology).offsets.tolist() == [9 * 5, 21 * 5]


def test_key_value_heads_are_repeated_where_an_engine_has_more_ranks():
    every = kinds(qwen3_spec(heads=8, kv_heads=2, head=3))
    number = next(n for n, kind in enumerate(every) if kind.hf.endswith("k_proj.weight"))
    held = engine_shares(every, EngineTopology(tp=8))[number]
    assert held.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert held.boxes[:, 1].tolist() == [[0, 3], [3, 6]]


@pytest.mark.parametrize(
    ("pp", "vpp", "stages", "expected"),
    [
        (2, 1, (), [0, 0, 0, 1, 1, 1]),
        (2, 3, (), [0, 1, 0, 1, 0, 1]),
        (4, 1, (), [0, 1, 1, 2, 2, 3]),
        (2, 2, (0, 1, 2, 3), [1, 0, 0, 1, 1, 1]),
    ],
)
def test_layers_are_spread_over_virtual_stages(pp, vpp, stages, expected):
    found = stages_of(deepseek_spec(num_hidden_layers=6), TrainerTopology(world=pp, pp=pp, vpp=vpp, stages=stages))
    assert [found[layer] for layer in range(6)] == expected
    assert (found[-1], found[6]) == (0, pp - 1)


def test_expected_shards_name_a_ranks_parameters_and_shapes():
    found = expected_shards(deepseek_spec(), TrainerTopology(world=4, tp=2, pp=2, ep=2, stages=(2, 1)), 1)
    assert found["embedding.word_embeddings.weight"] == (18, 16), "19 rows per rank, of which the last is padding"
    assert found["decoder.layers.1.mlp.router.expert_bias"] == (8,)
    assert found["decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"] == (32, 16)
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == (16, 16)
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight" not in found
    assert not [name for name in found if ".layers.2." in name or name.startswith("output")]


def test_every_difference_from_what_a_trainer_rank_holds_is_listed():
    spec, local = deepseek_spec(), TrainerTopology(world=2, tp=2)
    held = expected_shards(spec, local, 0)
    check_shards(held, dict(reversed(held.items())), 0)
    engine_like = expected_shards(spec, TrainerTopology(world=2, tp=2, transformer_engine=True), 0)
    other = {**engine_like, "surplus": (1,)}
    del other["decoder.final_layernorm.weight"]
    with pytest.raises(ReshardError) as caught:
        check_shards(held, other, 0)
    text = str(caught.value)
    assert "8 weights of trainer rank 0" in text, "two compressed projections of three layers, one missing, one surplus"
    assert "decoder.layers.2.self_attention.linear_q_down_proj.weight is [8, 16], expected [4, 16]" in text
    assert "decoder.final_layernorm.weight is missing, expected [16]" in text
    assert "surplus [1] is not part of" in text


def test_parameters_of_an_engine_rank():
    every = kinds(deepseek_spec())
    first, last = engine_parameters(every, EngineTopology(tp=2, ep=2, attention_dp=2, cpu=True))
    assert first == last
    assert first["model.layers.0.self_attn.q_b_proj.weight"] == Parameter((80, 8), "bfloat16"), "attention is not cut"
    assert first["model.layers.0.mlp.gate_up_proj.weight"] == Parameter((64, 16), "bfloat16"), "48 padded to 64"
    assert first["model.layers.1.mlp.experts.w13_weight"] == Parameter((4, 128, 16), "bfloat16"), "16 padded to 64"
    assert first["model.layers.1.mlp.gate.e_score_correction_bias"] == Parameter((8,), "float32")
    assert first["lm_head.weight"] == Parameter((32, 16), "bfloat16")
    assert first["model.embed_tokens.weight"] == Parameter((64, 16), "bfloat16")


@pytest.mark.parametrize(
    ("size", "ranks", "padded"), [(16, 1, 64), (64, 1, 64), (65, 1, 128), (129280, 8, 129280), (16, 3, 192), (200, 5, 320)]
)
def test_the_vocabulary_is_padded_until_ranks_can_share_it(size, ranks, padded):
    assert padded_vocabulary(size, ranks) == padded


def test_every_difference_from_what_an_engine_reports_is_listed():
    want = {"a": Parameter((2, 3), "bfloat16"), "b": Parameter((4,), "float32"), "c": Parameter((1,), "bfloat16")}
    check_engine([want], [{**want, "layers.0.w_kc": Parameter((9,), "bfloat16")}], ["w_kc"])
    with pytest.raises(ReshardError) as caught:
        check_engine([want], [{"a": Parameter((3, 2), "bfloat16"), "b": Parameter((4,), "bfloat16"), "d": want["c"]}], [])
    text = str(caught.value)
    assert "4 parameters" in text
    assert "a is bfloat16[3, 2], expected bfloat16[2, 3]" in text
    assert "b is bfloat16[4], expected float32[4]" in text
    assert "c is missing" in text
    assert "d bfloat16[1] is in the engine" in text
    with pytest.raises(ReshardError, match="2 ranks, the plan is for 1"):
        check_engine([want], [want, want], [])


def test_what_must_be_committed_together():
    every = kinds(deepseek_spec())
    units = {kind.hf.rpartition("self_attn.")[2]: commit_unit(kind, every).rpartition("self_attn.")[2] for kind in every}
    fused = "fused_qkv_a_proj_with_mqa.weight"
    assert {name: unit for name, unit in units.items() if unit} == {
        "q_a_proj.weight": fused,
        "kv_a_proj_with_mqa.weight": fused,
        "kv_b_proj.weight": "kv_b_proj.weight",
    }


def test_a_trainer_that_does_not_fit_is_refused_with_every_reason():
    with pytest.raises(ReshardError) as caught:
        check_trainer(deepseek_spec(), TrainerTopology(world=9, tp=3, pp=2, ep=3, stages=(3,)))
    for reason in ("9 ranks are not a multiple of tp", "9 ranks are not a multiple of etp", "8 experts", "stages (3,)", "q_a_proj"):
        assert reason in str(caught.value)
    with pytest.raises(ReshardError, match="2 key-value heads cannot be cut into 4 parts"):
        check_trainer(qwen3_spec(kv_heads=2), TrainerTopology(world=4, tp=4))
    with pytest.raises(ReshardError, match="3 layers are fewer than"):
        check_trainer(deepseek_spec(), TrainerTopology(world=2, pp=2, vpp=2))


@pytest.mark.parametrize(
    ("spec", "topology", "reason"),
    [
        (deepseek_spec(), EngineTopology(tp=2, ep=4), "tp = 2 is not a multiple of ep = 4"),
        (deepseek_spec(), EngineTopology(tp=2, attention_dp=4), "tp = 2 is not a multiple of attention_dp = 4"),
        (deepseek_spec(), EngineTopology(tp=16, ep=16), "8 experts cannot be spread over ep = 16"),
        (deepseek_spec(), EngineTopology(tp=3), "8 attention heads cannot be cut into tp / attention_dp = 3 parts"),
        (deepseek_spec(moe_intermediate_size=12), EngineTopology(tp=8), "down_proj.weight: 12 elements cannot be cut into 8 parts"),
        (qwen3_spec(kv_heads=2), EngineTopology(tp=4, cpu=True), "engines on CPU pad heads"),
    ],
)
def test_engines_that_do_not_fit_are_refused(spec, topology, reason):
    with pytest.raises(ReshardError, match=reason):
        check_topology(spec, kinds(spec), topology)
