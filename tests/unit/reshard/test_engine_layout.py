"""Checksums of the engine's layout against tensors that were put together naively, and the comparison's verdicts."""

import hashlib

import numpy as np
import pytest
import torch

from moerl.errors import ReshardError
from moerl.reshard.bucket import cut
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.engine_layout import LayoutChecksums, check_layout, combine, compare, pieces
from moerl.reshard.gather import gather_bucket, plan_gather
from tests.unit.reshard.layouts import engine_rank, qwen3_spec, random_tensors


def expected(spec, shards, dtype, tp, mib=0.02):
    checksums, plan = LayoutChecksums(spec, tp), plan_gather(shards, spec)
    held = {shard.entry.megatron: shard for shard in shards}
    for bucket in cut(spec, dtype, mib):
        flat = gather_bucket(plan, bucket, held, torch.device("cpu"), Deadline("test", 10))
        for slot, view in bucket.views(flat):
            checksums.add(slot, view)
    return checksums.finish()


@pytest.fixture
def hashes():
    return lambda ranks: [
        {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            for name, tensor in rank.items()
        }
        for rank in ranks
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_those_of_the_engines_tensors(spec, tensors, shards_of, engine_tensors, hashes, tp, dtype):
    assert expected(spec, shards_of(tensors), dtype, tp) == hashes(engine_tensors(tensors, dtype, tp))


def test_pieces_concatenate_to_the_engines_tensors(spec, tensors, engine_tensors):
    built: dict = {}
    for bucket in cut(spec, torch.float32, 100):
        for slot in bucket.slots:
            for rank, name, piece in pieces(spec, slot, tensors[slot.name], 2):
                built.setdefault((rank, name), []).append(piece.reshape(-1))
    for rank, held in enumerate(engine_tensors(tensors, torch.float32, 2)):
        for name, tensor in held.items():
            assert torch.equal(torch.cat(built.pop((rank, name))), tensor.reshape(-1)), name
    assert not built


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_are_cut_and_key_value_heads_repeated(tp):
    spec, topology = qwen3_spec(heads=8, kv_heads=2, width=64), EngineTopology(tp=tp)
    arrays = {name: array.astype(np.float32) for name, array in random_tensors(spec, "bfloat16").items()}
    built: dict = {}
    for bucket in cut(spec, torch.float32, 0.01):
        for slot in bucket.slots:
            for rank, name, piece in pieces(spec, slot, torch.from_numpy(arrays[slot.name]), tp):
                built.setdefault((rank, name), []).append(piece.reshape(-1))
    for rank in range(tp):
        for name, array in engine_rank(spec, arrays, topology, rank).items():
            assert np.array_equal(torch.cat(built.pop((rank, name))).numpy(), array.reshape(-1)), name
    assert not built


def test_heads_that_an_engine_cannot_cut_or_would_pad_are_refused():
    spec = qwen3_spec(heads=8, kv_heads=2, width=128)
    check_layout(spec, 4, cpu=False)
    check_layout(spec, 2, cpu=True)
    with pytest.raises(ReshardError, match="2 heads for 4 ranks: engines on CPU pad heads"):
        check_layout(spec, 4, cpu=True)
    with pytest.raises(ReshardError, match="8 attention heads cannot be cut into tp / attention_dp = 3 parts"):
        check_layout(spec, 3, cpu=False)


def test_tensor_parallelism_that_does_not_divide_is_refused(spec, tensors, shards_of):
    with pytest.raises(ReshardError, match="cannot be cut into 3 parts"):
        expected(spec, shards_of(tensors), torch.bfloat16, 3)


def test_equal_checksums_give_no_difference_and_config_buffers_are_ignored(spec, tensors, shards_of):
    want = expected(spec, shards_of(tensors), torch.bfloat16, 2)
    got = [{**rank, "model.layers.0.self_attn.rotary_emb.cos_sin_cache": "0" * 16} for rank in want]
    assert compare(want, got) == []
    assert combine(want) == combine([dict(reversed(rank.items())) for rank in want])


def test_one_changed_element_is_found_on_the_rank_that_holds_it(spec, tensors, shards_of):
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    other = {**tensors, name: tensors[name].clone()}
    other[name][0, -1] += 1.0
    want, got = (expected(spec, shards_of(weights), torch.bfloat16, 2) for weights in (tensors, other))
    (problem,) = compare(want, got)
    assert problem.startswith("rank 1: model.layers.1.mlp.experts.w2_weight has checksum")
    assert combine(want) != combine(got)


def test_missing_and_unknown_parameters_are_all_named(spec, tensors, shards_of):
    want = expected(spec, shards_of(tensors), torch.bfloat16, 1)
    got = [{name: value for name, value in want[0].items() if not name.endswith("w_vc")} | {"model.layers.9.extra": "1" * 16}]
    problems = compare(want, got)
    assert len(problems) == spec.layers + 1
    assert any("w_vc was sent" in problem and "plugin" in problem for problem in problems)
    assert any("model.layers.9.extra is in the engine" in problem for problem in problems)


def test_another_number_of_ranks_is_a_difference(spec, tensors, shards_of):
    want = expected(spec, shards_of(tensors), torch.bfloat16, 2)
    assert compare(want, want[:1]) == ["checksums of 2 ranks were expected, the engine reported 1"]


def test_fused_shared_experts_name_the_flag(spec, tensors, shards_of):
    want = expected(spec, shards_of(tensors), torch.bfloat16, 1)
    got = [{name: value for name, value in want[0].items() if "shared_experts" not in name}]
    assert all("disable_shared_experts_fusion" in problem for problem in compare(want, got))


def test_widths_that_an_engine_on_cpu_would_pad_are_refused(spec):
    check_layout(spec, 2, cpu=True)
    check_layout(spec, 4, cpu=False)
    with pytest.raises(ReshardError, match=r"multiple of 128(?s:.*)experts\.w13_weight has width 64"):
        check_layout(spec, 4, cpu=True)
