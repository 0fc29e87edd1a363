"""Lanes carry a plan out on real tensors: what is packed and unpacked everywhere is the engine's layout, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError
from moerl.reshard import orders
from moerl.reshard.boxes import kinds
from moerl.reshard.checksum import checksum
from moerl.reshard.engine_boxes import EngineTopology, engine_parameters
from moerl.reshard.lanes import digest, lanes_in, lanes_out
from moerl.reshard.plan import make_plan
from moerl.reshard.trainer_layout import TrainerTopology


def carried_out(plan, sources, targets):
    """(checksums as sent, as received) by receiver, after every bucket was packed and unpacked."""
    sent = {}
    for sender, held in enumerate(sources):
        for lane in lanes_out(plan, sender):
            bucket = torch.full((lane.nbytes,), 255, dtype=torch.uint8)
            assert lane.pack_with_checksum(held.__getitem__, bucket) == checksum(bucket)
            sent[sender, lane.peer - plan.senders, lane.step] = bucket
    found = []
    for receiver, held in enumerate(targets):
        lanes = lanes_in(plan.only(receiver=receiver))
        checks = []
        for lane in lanes:
            bucket = sent.pop((lane.peer, receiver, lane.step))
            assert len(bucket) == lane.nbytes
            lane.unpack(bucket, held.__getitem__)
            checks.append(checksum(bucket))
        found.append(checks)
    assert not sent, "every bucket has its receiver"
    return found


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(tp=st.sampled_from([1, 2]), engine_tp=st.sampled_from([1, 2]), bucket_bytes=st.sampled_from([1 << 11, 1 << 14, 1 << 20]))
def test_a_plan_carried_out_is_the_engines_layout(spec, tensors, engine_tensors, shards_of, tp, engine_tp, bucket_bytes):
    trainer = TrainerTopology(tp, tp=tp)
    engine = EngineTopology(1, engine_tp, cpu=True)
    plan = make_plan(spec, trainer, engine, bucket_bytes=bucket_bytes, ranks_per_node=8)
    sources = [cut_for(spec, shards_of(tensors), rank, tp) for rank in range(tp)]
    targets = [
        {name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for name, each in rank.items()}
        for rank in engine_parameters(kinds(spec), engine)
    ]
    carried_out(plan, sources, targets)
    for held, want in zip(targets, engine_tensors(tensors, torch.bfloat16, engine_tp), strict=True):
        for name, parameter in held.items():
            assert torch.equal(parameter, want[name]), name


def cut_for(spec, shards, rank, tp):
    """What a rank of a tensor-parallel trainer with local layers holds, as its expert weights are whole on every rank."""
    held = {}
    for shard in shards:
        param = shard.entry.param
        if param.tp_axis is None or param.expert or tp == 1:
            held[shard.entry.megatron] = shard.tensor
            continue
        parts = shard.tensor.chunk(len(param.hf)) if param.tp_axis == 0 else [shard.tensor]
        held[shard.entry.megatron] = torch.cat([part.chunk(tp, param.tp_axis)[rank] for part in parts]).contiguous()
    return held


def test_tables_are_built_once_and_again_when_a_tensor_looks_different(spec, tensors, shards_of):
    plan = make_plan(spec, TrainerTopology(1), EngineTopology(cpu=True), bucket_bytes=1 << 14, ranks_per_node=8)
    lane = lanes_out(plan, 0)[0]
    held = cut_for(spec, shards_of(tensors), 0, 1)
    bucket = torch.zeros(lane.nbytes, dtype=torch.uint8)
    lane.pack(held.__getitem__, bucket)
    table = lane.table
    lane.pack(held.__getitem__, bucket)
    assert lane.table is table
    before = bucket.clone()
    lane.pack(lambda name: held[name] if name.endswith("expert_bias") else held[name].to(torch.bfloat16), bucket)
    assert lane.table is not table
    assert torch.equal(bucket, before), "the engine's dtype is the same wherever the cast happens"


def test_a_plan_for_several_receivers_is_no_receivers_plan(spec):
    plan = make_plan(spec, TrainerTopology(1), EngineTopology(tp=2, cpu=True), bucket_bytes=1 << 14, ranks_per_node=8)
    with pytest.raises(ReshardError, match="one of 2; use Plan.only"):
        lanes_in(plan)


def test_a_digest_sees_every_checksum_and_whose_it_is():
    assert digest([[1, 2], [3]]) == digest([[1, 2], [3]])
    assert len({digest([[1, 2], [3]]), digest([[1], [2, 3]]), digest([[2, 1], [3]]), digest([[1, 2], [3], []]), digest([[1, 2], [4]])}) == 5


def test_orders_survive_their_encoding():
    join = orders.Join("host", 1, "name", "gloo", 2, 3, [b"\x00\xff", b""], [0, 0, 1], "auto", 1.5)
    alone = (orders.Describe(), orders.Close(), orders.Verify(), orders.Commit(4), orders.Leave(), orders.Read(["a"]))
    for order in (*alone, join, orders.Receive(3, None, 2.0)):
        assert orders.decode(orders.encode(order)) == order


@pytest.mark.parametrize("text", ["", "{}", '{"order":"sing"}', '{"order":"commit"}', "\xff"])
def test_what_is_no_order_is_refused(text):
    with pytest.raises(ReshardError, match="expected an order of weight sync"):
        orders.decode(text)


def test_what_is_no_answer_is_refused():
    with pytest.raises(ReshardError, match="is not what was asked for"):
        orders.answers('[{"nbytes": 1}]', orders.Received)
