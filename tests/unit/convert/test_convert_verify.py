"""Verification finds every kind of mistake that a conversion could make, also in the table that conversions are built on."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.convert import layout
from moerl.convert.carry import RECORD
from moerl.convert.names import Model, parts_of, runs
from moerl.convert.verify import rounded_to_fp8, verify
from moerl.errors import CheckpointError
from moerl.models import read_spec
from moerl.models.shard import windows
from moerl.numerics.fp8 import quantise_blocks
from tests.unit.convert.folders import CONFIGS, make, read, to_megatron, write


@pytest.fixture(scope="module")
def glm4(tmp_path_factory):
    root = tmp_path_factory.mktemp("glm4")
    folder = make(root / "hf", "glm4 mtp")
    return folder, to_megatron(folder, root / "megatron")


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", lambda one: one.flip(0), r"of expert 3, .*values differ"),
        ("model.layers.0.self_attn.k_proj.bias", lambda one: one + 1, r"linear_qkv.bias, model.layers.0.self_attn.k_proj.bias: .*differ"),
        ("model.layers.2.mlp.gate.e_score_correction_bias", lambda one: -one, "router.expert_bias"),
        ("model.layers.3.eh_proj.weight", lambda one: one.roll(48, 1), "mtp.layers.0.eh_proj.weight"),
        ("model.layers.3.embed_tokens.weight", lambda one: one + 1, "repeats model.embed_tokens.weight"),
        ("model.norm.weight", lambda one: one[:-1], "have others"),
        ("model.norm.weight", None, "surplus, the folder has no model.norm.weight"),
        ("model.layers.3.hnorm.weight", None, "surplus, the folder has no model.layers.3.hnorm.weight"),
        ("model.surprise.weight", lambda _: torch.zeros(3), "model.surprise.weight: missing, the checkpoint has nothing of it"),
    ],
)
def test_a_difference_in_the_folder_is_found(glm4, tmp_path, name, change, match):
    folder, tensors = shutil.copytree(glm4[0], tmp_path / "hf"), read(glm4[0])
    changed = {name: change(tensors.get(name))} if change else {}
    write(folder, {key: one for key, one in tensors.items() if key != name} | changed)
    with pytest.raises(CheckpointError, match=match):
        verify(folder, glm4[1])


def test_a_damaged_file_is_found_by_its_checksum(glm4, tmp_path):
    checkpoint = shutil.copytree(glm4[1], tmp_path / "megatron")
    victim = checkpoint / "__0_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: damaged since it was written|cannot be read"):
        verify(glm4[0], checkpoint)
    (checkpoint / RECORD).unlink()
    with pytest.raises(CheckpointError):
        verify(glm4[0], checkpoint)


def wrong_order(windows_of):
    """Gate and up, or queries and keys, in the wrong order."""

    def swapped(param, index, parts):
        held = list(windows_of(param, index, parts))
        return [replace(one, part=(len(param.hf) - 1 - one.part) if len(param.hf) == 2 else one.part) for one in held]

    return swapped


def stacked(windows_of):
    """Grouped-query attention as one part after the other, not interleaved."""

    def plain(param, index, parts):
        held = sorted(windows_of(param, index, parts), key=lambda one: one.part)
        at, found = 0, []
        for one in held:
            found.append(replace(one, at=at))
            at += one.rows[1] - one.rows[0]
        return found

    return plain


@pytest.mark.parametrize(("mistake", "where"), [(wrong_order, "linear_fc1.weight"), (stacked, "linear_qkv")])
def test_a_mistake_of_the_shared_table_is_found(glm4, tmp_path, monkeypatch, mistake, where):
    monkeypatch.setattr(layout, "windows", mistake(windows))
    checkpoint = to_megatron(glm4[0], tmp_path / "out")
    with pytest.raises(CheckpointError, match=where):
        verify(glm4[0], checkpoint)


def test_experts_in_the_wrong_order_are_found(glm4, tmp_path, monkeypatch):
    original = layout._chunk

    def shifted(entry, *rest):
        found = original(entry, *rest)
        return replace(found, offset=((found.offset[0] + 1) % 4, *found.offset[1:])) if entry.expert is not None else found

    monkeypatch.setattr(layout, "_chunk", shifted)
    checkpoint = to_megatron(glm4[0], tmp_path / "out")
    with pytest.raises(CheckpointError, match="of expert"):
        verify(glm4[0], checkpoint)


@given(st.integers(0, 2**32), st.sampled_from([1e-3, 0.02, 1.0]), st.integers(0, 127), st.integers(0, 511))
@settings(deadline=None, max_examples=25)
def test_a_rounding_to_fp8_is_told_from_the_next_number(seed, spread, row, column):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(128, 512, generator=generator) * torch.rand(128, 512, generator=generator) ** 8 * spread).to(torch.bfloat16)
    values, scales = quantise_blocks(weight)
    whole = scales.repeat_interleave(128, 1).expand(128, 512)
    product = (values.float() * whole).to(torch.bfloat16)
    assert bool(rounded_to_fp8(product, weight, whole).all())
    bits = values.view(torch.uint8)
    magnitude = int(bits[row, column]) & 0x7F
    bits[row, column] += 2 if magnitude < 120 else -2  # two numbers further
    wrong = rounded_to_fp8((values.float() * whole).to(torch.bfloat16), weight, whole)
    assert int((~wrong).sum()) == 1
    assert not bool(wrong[row, column])


@pytest.mark.parametrize("family", CONFIGS)
def test_the_second_table_agrees_with_the_families(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    spec, model = read_spec(tmp_path), Model.of(CONFIGS[family])
    for entry in (*spec.entries(), *spec.mtp_entries()):
        for key in layout.keys(entry):
            assert parts_of(key, entry.expert, model) == entry.hf
        held = list(windows(entry.param, 0, 1))
        rows = held[-1].at + held[-1].rows[1] - held[-1].rows[0]
        found = [(run.name, run.first, run.at, run.count) for run in runs(entry.hf, rows, 0, rows, model)]
        assert found == [(entry.hf[one.part], one.rows[0], one.at, one.rows[1] - one.rows[0]) for one in held]
