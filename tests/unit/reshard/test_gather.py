"""Gathering in one process: casting, names, order, and every way in which shards can fail to be the model."""

from dataclasses import replace

import pytest
import torch

from moerl.errors import ReshardError
from moerl.models.shard import Shard
from moerl.reshard.bucket import units
from moerl.reshard.gather import gather_hf, plan_gather


def without(shards, name):
    return [shard for shard in shards if shard.entry.megatron != name]


@pytest.mark.parametrize("mib", [1e-6, 0.02, 100])
def test_all_weights_come_out_cast_and_in_order(spec, tensors, shards_of, mib):
    gathered = list(gather_hf(shards_of(tensors), spec, dtype=torch.bfloat16, bucket_mib=mib))
    assert {name for name, _ in gathered} == set(tensors)
    for name, tensor in gathered:
        wanted = tensors[name] if name.endswith("e_score_correction_bias") else tensors[name].to(torch.bfloat16)
        assert tensor.dtype == wanted.dtype, name
        assert torch.equal(tensor, wanted), name
    if mib == 1e-6:
        assert [name for name, _ in gathered] == [name for unit in units(spec) for entry in unit for name in entry.hf]


def test_live_parameters_that_require_gradients_are_accepted(spec, tensors, shards_of):
    shards = [replace(shard, tensor=torch.nn.Parameter(shard.tensor)) for shard in shards_of(tensors)]
    gathered = dict(gather_hf(shards, spec, dtype=torch.float32))
    assert all(torch.equal(gathered[name], tensors[name]) and not gathered[name].requires_grad for name in tensors)


def test_a_vocabulary_that_ranks_cannot_share_evenly(spec, tensors, shards_of):
    def thirds(shard):
        return [replace(shard, tensor=rows, index=index, parts=3) for index, rows in enumerate(shard.tensor.split(6))]

    whole = shards_of(tensors)
    cut = [part for shard in whole for part in (thirds(shard) if shard.entry.param.is_vocabulary else [shard])]
    plan = plan_gather(cut, spec)
    assert [source.shape[0] for source in plan.sources["output_layer.weight"]] == [6, 6, 4]
    uneven = [replace(shard, tensor=shard.tensor[:5]) if (shard.index, shard.parts) == (1, 3) else shard for shard in cut]
    with pytest.raises(ReshardError, match=r"output_layer\.weight: 3 slices of shapes \(6, 32\), \(5, 32\), \(4, 32\)"):
        plan_gather(uneven, spec)


def test_missing_weights_are_all_named(spec, tensors, shards_of):
    gone = ["decoder.final_layernorm.weight", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    shards = [shard for shard in shards_of(tensors) if shard.entry.megatron not in gone]
    with pytest.raises(ReshardError) as error:
        plan_gather(shards, spec)
    assert all(f"{name}: missing" in str(error.value) for name in gone)
    assert "2 weights are wrong" in str(error.value)


def test_a_surplus_weight_is_named(spec, tensors, shards_of):
    shards = shards_of(tensors)
    other = replace(shards[0].entry.param, megatron="mtp.layers.0.eh_proj.weight")
    shards.append(Shard(replace(shards[0].entry, param=other), torch.zeros(2, 2), 0, 1))
    with pytest.raises(ReshardError, match=r"mtp\.layers\.0\.eh_proj\.weight: surplus"):
        plan_gather(shards, spec)


@pytest.mark.parametrize(
    ("index", "parts", "rows", "message"),
    [
        (1, 2, None, r"slices \[1\] of 2"),
        (0, 1, 31, r"do not make up \(32,\)"),
    ],
)
def test_incomplete_or_misshapen_slices_are_refused(spec, tensors, shards_of, index, parts, rows, message):
    shards = shards_of(tensors)
    last = next(shard for shard in shards if shard.entry.megatron == "decoder.final_layernorm.weight")
    shards = [*without(shards, last.entry.megatron), Shard(last.entry, last.tensor[:rows], index, parts)]
    with pytest.raises(ReshardError, match=message):
        plan_gather(shards, spec)


def test_a_replicated_weight_cannot_come_in_slices(spec, tensors, shards_of):
    shards = shards_of(tensors)
    norm = next(shard for shard in shards if shard.entry.megatron == "decoder.final_layernorm.weight")
    shards = without(shards, norm.entry.megatron) + [Shard(norm.entry, norm.tensor[16 * i : 16 * i + 16], i, 2) for i in range(2)]
    with pytest.raises(ReshardError, match="no axis to cut along"):
        plan_gather(shards, spec)


def test_ranks_that_disagree_on_the_number_of_slices_are_refused(spec, tensors, shards_of):
    shards = shards_of(tensors)
    embed = shards[0]
    with pytest.raises(ReshardError, match=r"disagree on how often it is cut: \[1, 2\]"):
        plan_gather([*shards, Shard(embed.entry, embed.tensor[:8], 0, 2)], spec)
