"""Buckets: complete, bounded, aligned, and fused weights stay together."""

from dataclasses import replace

import pytest
import torch

from moerl.convert.tiny import tiny_config
from moerl.errors import ReshardError
from moerl.models import deepseek
from moerl.reshard.bucket import cut, units


@pytest.mark.parametrize("mib", [1e-6, 0.005, 0.02, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_in_exactly_one_bucket(spec, mib, dtype):
    names = [name for bucket in cut(spec, dtype, mib) for name in bucket.names]
    assert sorted(names) == sorted(name for entry in spec.entries() for name in entry.hf)
    assert len(set(names)) == len(names)


def test_buckets_respect_the_limit_unless_one_unit_is_larger(spec):
    limit = 0.02
    for bucket in cut(spec, torch.bfloat16, limit):
        fits = bucket.nbytes <= limit * 2**20
        assert fits or len({(slot.entry.engine, slot.entry.expert) for slot in bucket.slots}) == 1


def test_smallest_buckets_hold_one_unit_each(spec):
    buckets = cut(spec, torch.bfloat16, 1e-6)
    assert len(buckets) == len(units(spec))


@pytest.mark.parametrize("mib", [1e-6, 0.005, 0.02])
def test_compressed_projections_of_a_layer_share_a_bucket(spec, mib):
    where = {name: number for number, bucket in enumerate(cut(spec, torch.bfloat16, mib)) for name in bucket.names}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}.self_attn."
        assert where[prefix + "q_a_proj.weight"] == where[prefix + "kv_a_proj_with_mqa.weight"]


@pytest.mark.parametrize("mib", [1e-6, 0.005, 100])
def test_tensors_are_aligned_and_without_gaps(spec, mib):
    for bucket in cut(spec, torch.bfloat16, mib):
        offset = 0
        for slot in bucket.slots:
            assert slot.offset == offset, slot.name
            assert offset % slot.dtype.itemsize == 0, slot.name
            offset += slot.nbytes
        assert offset == bucket.nbytes


def test_an_odd_number_of_narrow_elements_before_a_wide_one_stays_aligned(spec):
    """Three bf16 elements in front of the fp32 bias would put it at byte 6."""
    params = tuple(
        replace(param, shape=(3,)) if param.hf[0].endswith("input_layernorm.weight") else param
        for param in spec.params
        if param.fp32 or param.hf[0].endswith("input_layernorm.weight")
    )
    (bucket,) = cut(replace(spec, params=params), torch.bfloat16, 1)
    assert {slot.dtype for slot in bucket.slots} == {torch.float32, torch.bfloat16}
    assert all(slot.offset % slot.dtype.itemsize == 0 for slot in bucket.slots)


def test_views_are_the_slots(spec):
    bucket = cut(spec, torch.bfloat16, 0.02)[1]
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for number, (slot, view) in enumerate(bucket.views(flat)):
        assert tuple(view.shape) == slot.shape
        assert view.dtype == slot.dtype
        view.fill_(number + 1)
    for number, (_, view) in enumerate(bucket.views(flat)):
        assert (view == number + 1).all()


def test_the_correction_bias_travels_in_float32(spec):
    kinds = {slot.name: slot.dtype for bucket in cut(spec, torch.bfloat16, 100) for slot in bucket.slots}
    assert all((dtype is torch.float32) == name.endswith("e_score_correction_bias") for name, dtype in kinds.items())


def test_a_tied_output_layer_is_not_sent():
    tied = deepseek.spec(tiny_config() | {"tie_word_embeddings": True})
    names = [name for bucket in cut(tied, torch.bfloat16, 1) for name in bucket.names]
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


def test_bucket_size_must_be_positive(spec):
    with pytest.raises(ReshardError, match="bucket_mib must be positive"):
        cut(spec, torch.bfloat16, 0)
