"""Plans executed in numpy against layouts that were cut naively; coverage, balance, buckets, determinism, scale."""

import itertools
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard.balance import Demand, choose_senders, level, lower_bound
from moerl.reshard.boxes import kinds
from moerl.reshard.engine_boxes import EngineTopology, engine_parameters
from moerl.reshard.plan import decode_plan, make_plan
from moerl.reshard.summary import pair_bytes
from moerl.reshard.trainer_layout import TrainerTopology, expected_shards
from tests.unit.reshard.layouts import (
    deepseek_spec,
    engine_rank,
    engines,
    execute,
    layer_stages,
    models,
    qwen3_spec,
    random_tensors,
    trainer_rank,
    trainers,
)

SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def planned(spec, trainer, engine, *, bucket_bytes=1 << 20, ranks_per_node=8, nodes=None):
    return make_plan(spec, trainer, engine, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node, nodes=nodes)


@given(st.data())
@SLOW
def test_the_transfer_fills_every_engine_parameter_bit_for_bit(data):
    spec = data.draw(models())
    trainer = data.draw(trainers(spec))
    engine = data.draw(engines(spec, trainer))
    bucket_bytes = data.draw(st.sampled_from([256, 1000, 1 << 20]))
    plan = planned(spec, trainer, engine, bucket_bytes=bucket_bytes, ranks_per_node=data.draw(st.integers(1, 8)))
    tensors, stages = random_tensors(spec, engine.dtype), layer_stages(spec, trainer)
    senders = [trainer_rank(spec, tensors, trainer, rank, stages) for rank in range(trainer.world)]
    wanted = [engine_rank(spec, tensors, engine, rank) for rank in range(engine.tp)] * engine.count
    receivers = [{name: np.zeros_like(array) for name, array in held.items()} for held in wanted]

    writes = execute(plan, senders, receivers)

    for rank, held in enumerate(wanted):
        for name, array in held.items():
            assert np.array_equal(receivers[rank][name], array), f"engine rank {rank}: {name}"
            assert np.array_equal(writes[rank][name], (array != 0).astype(np.uint8)), f"engine rank {rank}: {name} not written exactly once"
    needed = [sum(np.count_nonzero(array) * array.itemsize for array in held.values()) for held in wanted]
    assert pair_bytes(plan).sum(axis=0).tolist() == needed
    assert plan.summary().bytes_ratio == 1.0
    assert plan.buckets["nbytes"].max() <= bucket_bytes


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_result_equals_the_compatible_ways_layout(spec, tensors, engine_tensors, tp):
    trainer, engine = TrainerTopology(world=4, tp=2, ep=2, pp=2), EngineTopology(tp=tp, dtype="float32")
    bits = {name: tensor.numpy().view(np.uint32) for name, tensor in tensors.items()}
    senders = [trainer_rank(spec, bits, trainer, rank, layer_stages(spec, trainer)) for rank in range(4)]
    golden = [
        {name: tensor.contiguous().numpy().view(np.uint32) for name, tensor in held.items() if not name.endswith(("w_kc", "w_vc"))}
        for held in engine_tensors(tensors, torch.float32, tp)
    ]
    receivers = [{name: np.zeros_like(array) for name, array in held.items()} for held in golden]
    execute(planned(spec, trainer, engine), senders, receivers)
    for rank, held in enumerate(golden):
        for name, array in held.items():
            assert np.array_equal(receivers[rank][name], array), f"engine rank {rank}: {name}"


@given(st.data())
@SLOW
def test_the_layouts_name_what_each_side_holds(data):
    spec = data.draw(models())
    trainer = data.draw(trainers(spec))
    engine = data.draw(engines(spec, trainer))
    tensors, stages = random_tensors(spec, engine.dtype), layer_stages(spec, trainer)
    for rank in range(trainer.world):
        held = trainer_rank(spec, tensors, trainer, rank, stages)
        assert expected_shards(spec, trainer, rank) == {name: array.shape for name, array in held.items()}
    names = {np.uint16: "bfloat16", np.uint32: "float32"}
    for rank, parameters in enumerate(engine_parameters(kinds(spec, mtp=engine.draft), engine)):
        held = engine_rank(spec, tensors, engine, rank)
        assert {name: (p.shape, p.dtype) for name, p in parameters.items()} == {
            name: (array.shape, names[array.dtype.type]) for name, array in held.items()
        }


@given(st.data())
@SLOW
def test_senders_carry_as_even_a_load_as_their_replicas_allow(data):
    spec = data.draw(st.sampled_from([deepseek_spec(hidden_size=64), qwen3_spec(hidden=64)]))
    trainer, engine = data.draw(trainers(spec)), data.draw(engines(spec))
    summary = planned(spec, trainer, engine, ranks_per_node=data.draw(st.integers(1, 8))).summary()
    assert summary.sender_max_over_mean <= 1.1 * summary.sender_bound_over_mean


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (TrainerTopology(world=4, tp=1), EngineTopology(tp=1)),
        (TrainerTopology(world=4, tp=2, ep=2), EngineTopology(tp=4)),
        (TrainerTopology(world=8, tp=2, ep=4, etp=2), EngineTopology(count=2, tp=2, ep=2)),
        (TrainerTopology(world=6, tp=2, ep=2), EngineTopology(count=3, tp=1)),
        (TrainerTopology(world=12, tp=2, ep=4, transformer_engine=True), EngineTopology(tp=8, attention_dp=4)),
    ],
)
def test_the_load_is_level_where_every_rank_has_its_share(trainer, engine):
    spec = deepseek_spec(vocab_size=64, hidden_size=64)
    assert planned(spec, trainer, engine).summary().sender_max_over_mean <= 1.1


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 1000)), min_size=1, max_size=6))
def test_levelling_reaches_the_best_possible_load(found):
    groups, demand = [np.array(sorted(ranks)) for ranks, _ in found], np.array([amount for _, amount in found])
    quotas = level(groups, demand, 6)
    load = np.zeros(6, dtype=np.int64)
    for ranks, quota, amount in zip(groups, quotas, demand, strict=True):
        assert quota.sum() == amount
        assert (quota >= 0).all()
        load[ranks] += quota
    # Hall's condition, over all sets of ranks: the ranks of a set must send what nobody else holds.
    subsets = [{rank for rank in range(6) if bits >> rank & 1} for bits in range(1, 64)]
    best = max(sum(int(a) for g, a in zip(groups, demand, strict=True) if set(g.tolist()) <= s) / len(s) for s in subsets)
    assert load.max() <= best * 1.02 + 6
    assert lower_bound(groups, demand, 6) <= np.ceil(best)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.tuples(*[st.integers(1, 5)] * 3)), min_size=1, max_size=4),
    st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=2, max_size=2),
    st.lists(st.integers(0, 2), min_size=13, max_size=13),
)
def test_cut_blocks_stay_whole_and_go_to_ranks_that_hold_them(found, groups, nodes):
    boxes = np.array([[(3, 3 + size) for size in sizes] for _, _, sizes in found], dtype=np.int64)
    receiver, group = (np.array([row[n] for row in found]) for n in (0, 1))
    demand = Demand(group, receiver, boxes, np.full(len(found), 2))
    ranks, node = [np.array(sorted(members)) for members in groups], np.array(nodes)
    rows, parts, senders = choose_senders(demand, ranks, 10, node[:10], node[10:])
    for number, box in enumerate(boxes):
        points = Counter(p for part in parts[rows == number] for p in itertools.product(*(range(*axis) for axis in part.tolist())))
        assert points == Counter(itertools.product(*(range(*axis) for axis in box.tolist())))
    assert all(sender in groups[group[row]] for row, sender in zip(rows, senders, strict=True))


def test_receivers_are_served_from_their_own_node_where_it_costs_no_balance():
    spec, trainer, engine = deepseek_spec(), TrainerTopology(world=4), EngineTopology(count=4, tp=1)
    plan = planned(spec, trainer, engine, nodes=[0, 1, 2, 3, 3, 2, 1, 0])
    assert plan.summary().same_node_share == 1.0
    assert plan.summary().sender_max_over_mean == 1.0
    assert sorted(map(tuple, plan.buckets[["sender", "receiver"]].tolist())) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert planned(spec, trainer, engine, ranks_per_node=4).summary().same_node_share == 0.0


def test_balance_comes_before_the_node():
    plan = planned(deepseek_spec(), TrainerTopology(world=2), EngineTopology(count=2, tp=1), nodes=[0, 1, 0, 0])
    assert plan.summary().sender_max_over_mean <= 1.05
    assert plan.summary().same_node_share == pytest.approx(0.5, abs=0.05)


def test_uneven_pipeline_stages_are_reported_as_such():
    summary = planned(deepseek_spec(), TrainerTopology(world=2, pp=2, stages=(1, 2)), EngineTopology()).summary()
    assert summary.sender_max_over_mean == pytest.approx(summary.sender_bound_over_mean)
    assert summary.sender_bound_over_mean > 1.2


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (TrainerTopology(world=6, tp=2, ep=2), EngineTopology(count=2, tp=4)),
        (TrainerTopology(world=8, tp=2, ep=4), EngineTopology(count=2, tp=2)),
    ],
)
def test_in_each_step_a_rank_takes_part_in_one_transfer(trainer, engine):
    plan = planned(deepseek_spec(), trainer, engine, bucket_bytes=512)
    buckets = plan.buckets
    assert len(buckets) > 100
    assert (np.diff(buckets["step"]) >= 0).all()
    for side in ("sender", "receiver"):
        assert max(Counter(zip(buckets["step"].tolist(), buckets[side].tolist(), strict=True)).values()) == 1
    turns = Counter()
    for sender, receiver, step in buckets[["sender", "receiver", "step"]].tolist():
        assert step // 8 == turns[sender, receiver]
        turns[sender, receiver] += 1


def test_wider_elements_come_first_so_that_all_are_aligned():
    spec = deepseek_spec(hidden_size=5, vocab_size=37, kv_lora_rank=3)
    plan = planned(spec, TrainerTopology(world=2, ep=2), EngineTopology(), bucket_bytes=1000)
    copies = [copy for number in range(len(plan.buckets)) for copy in plan.copies_in(number)]
    assert any(copy.at % 4 for copy in copies), "sizes are odd enough to matter"
    assert all(copy.at % 4 == 0 for copy in copies if copy.dtype == "float32")


def test_one_ranks_part_of_a_plan_is_that_rank_s_buckets_in_order():
    plan = planned(deepseek_spec(), TrainerTopology(world=4, tp=2, ep=2), EngineTopology(tp=2), bucket_bytes=2048)
    for side, method in (("sender", "copies_out"), ("receiver", "copies_in")):
        for rank in range(2):
            part = plan.only(**{side: rank})
            numbers = np.nonzero(plan.buckets[side] == rank)[0]
            assert len(numbers) == len(part.buckets) > 1
            assert len(part.blocks) < len(plan.blocks)
            for number, original in enumerate(numbers):
                assert getattr(part, method)(number) == getattr(plan, method)(int(original))
    pair = plan.only(sender=2, receiver=1).buckets
    assert len(pair) == np.count_nonzero((plan.buckets["sender"] == 2) & (plan.buckets["receiver"] == 1)) > 0
    assert set(pair[["sender", "receiver"]].tolist()) == {(2, 1)}
    assert not len(plan.only(sender=4).buckets)


def test_parameters_with_derived_forms_name_every_bucket_that_brings_a_part():
    plan = planned(deepseek_spec(), TrainerTopology(world=4, tp=4), EngineTopology(), bucket_bytes=512)
    units = plan.commit_units(0)
    assert {name.rpartition(".self_attn.")[2] for name in units} == {"fused_qkv_a_proj_with_mqa.weight", "kv_b_proj.weight"}
    assert len(units) == 6
    for name, numbers in units.items():
        touched = [n for n in range(len(plan.buckets)) if any(copy.parameter == name for copy in plan.copies_in(n))]
        assert list(numbers) == touched
        assert len(touched) > 1


def test_a_plan_survives_the_wire_and_says_when_it_is_none():
    plan = planned(deepseek_spec(), TrainerTopology(world=2, tp=2), EngineTopology())
    assert decode_plan(plan.encode()) == plan
    with pytest.raises(ReshardError, match="expected an encoded transfer plan"):
        decode_plan(b"\x00junk")


def test_every_process_derives_the_same_plan():
    trainer, engine = TrainerTopology(world=12, tp=2, ep=2, pp=2), EngineTopology(count=2, tp=2)
    digest = planned(deepseek_spec(), trainer, engine, bucket_bytes=4096).digest()
    script = (
        "from moerl.reshard.plan import make_plan\n"
        "from tests.unit.reshard.layouts import *\n"
        f"plan = make_plan(deepseek_spec(), TrainerTopology(**{asdict(trainer)}), EngineTopology(**{asdict(engine)}),"
        " bucket_bytes=4096, ranks_per_node=8)\n"
        "print(plan.digest())"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert run.stdout.split() == [digest]
    other = planned(deepseek_spec(), trainer, engine, bucket_bytes=8192)
    assert other.digest() != digest


def test_planning_needs_no_torch():
    script = "import sys, moerl.reshard.plan; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False"]


def test_a_bucket_that_holds_no_row_is_refused():
    with pytest.raises(ReshardError, match="a bucket of 8 bytes cannot hold a row of 96 bytes"):
        planned(deepseek_spec(), TrainerTopology(world=1), EngineTopology(), bucket_bytes=8)


def test_the_summary_counts_what_the_plan_does():
    plan = planned(deepseek_spec(), TrainerTopology(world=2, ep=2), EngineTopology(tp=2), bucket_bytes=4096)
    summary = plan.summary()
    assert summary.nbytes == plan.minimum_bytes == int(plan.buckets["nbytes"].sum())
    assert summary.launches == 2 * summary.buckets == 2 * len(plan.buckets)
    assert summary.launches_per_rank == max(Counter(plan.buckets["sender"].tolist()).values())
    assert summary.pair_bytes_max == pair_bytes(plan).max()
    for words in ("2 trainer → 2 engine, 4 pairs", "1.000 of the minimum", "max/mean 1.0", "launches"):
        assert words in str(summary)


def test_deepseek_v3_on_384_ranks_is_planned_in_closed_form():
    """61 layers, 256 experts, published sizes: PP16·EP16 to four engines of TP32."""
    spec = deepseek_spec(
        hidden_size=7168,
        vocab_size=129280,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    plan = planned(spec, TrainerTopology(world=256, pp=16, ep=16), EngineTopology(count=4, tp=32), bucket_bytes=256 << 20)
    summary = plan.summary()
    assert summary.bytes_ratio == 1.0
    assert summary.sender_max_over_mean <= 1.1
    expert_blocks = 58 * 3 * 16 * 128  # layers × projections × EP ranks × engine ranks
    assert (plan.blocks["box"][:, 0, 1] - plan.blocks["box"][:, 0, 0] == 16).sum() == expert_blocks
    assert len(plan.encode()) < 64 << 20


def test_engines_that_draft_need_a_trainer_that_holds_the_layer_for_it():
    spec = deepseek_spec(num_nextn_predict_layers=1)
    with pytest.raises(ReshardError, match="which the trainer does not hold"):
        planned(spec, TrainerTopology(world=1), EngineTopology(draft=True))
    with pytest.raises(ReshardError, match="the model has no layer for multi-token prediction"):
        planned(deepseek_spec(), TrainerTopology(world=1, mtp=True), EngineTopology())
    with_mtp, without = (planned(spec, TrainerTopology(world=1, mtp=True), EngineTopology(draft=draft)) for draft in (True, False))
    own = sum(int(np.prod(entry.param.part_shape(part))) for entry in spec.mtp_entries() for part in range(len(entry.hf)))
    assert with_mtp.minimum_bytes - without.minimum_bytes >= 2 * own
    assert {kind.engine for kind in with_mtp.kinds} - {kind.engine for kind in without.kinds} == {
        "draft." + param.engine for param in spec.mtp_params
    }
