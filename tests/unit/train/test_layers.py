"""Packing and packed attention: the cut over context-parallel ranks, and attention against a dense reference."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.routing.shard import context_rows
from moerl.train import megatron

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """The module under test, importable once Megatron's platform is ready."""
    folder = tmp_path_factory.mktemp("layers")
    write_tiny(folder, tiny_config(hidden=32, layers=2, experts=4, topk=2, groups=2, group_topk=1), seed=0)
    config = Config(model={"path": str(folder)}, train={"device": "cpu"})
    megatron.initialise(config.parallel, config.train, seed=1)
    from moerl.train import layers as module

    yield module
    megatron.shutdown()


def ends(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def pack(lengths: list[int], rank: int, size: int):
    from moerl.train import packing  # imports Megatron

    return packing.pack(ends(lengths), rank=rank, size=size, microbatch=0, device=CPU)


def group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def dense(query, key, value, lengths, scale):
    """Causal attention of each sequence by itself, written out."""
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", query[rows], key[rows]) * scale
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[rows]))
        start += length
    return torch.cat(outputs)


def test_zigzag_gives_each_rank_a_front_and_a_back_piece(layers):
    assert context_rows(ends([8, 4]), (0, 2)).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_rows(ends([8, 4]), (1, 2)).tolist() == [2, 3, 4, 5, 9, 10]
    assert context_rows(ends([3, 2]), (0, 1)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lengths", [[1], [5, 1, 16, 3, 17, 2], [9] * 6, [64, 1, 1, 1]])
def test_attention_equals_dense(layers, lengths):
    total = sum(lengths)
    query, key, value = (torch.randn(total, 2, 8, requires_grad=True) for _ in range(3))
    packing = pack(lengths, 0, 1)
    attention = layers.PackedAttention(None, softmax_scale=0.3, pg_collection=SimpleNamespace(cp=group(0, 1)))
    got, expected = attention(query, key, value, None, packed_seq_params=packing), dense(query, key, value, lengths, 0.3)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(got)
    for mine, reference in zip(
        torch.autograd.grad(got, (query, key, value), upstream), torch.autograd.grad(expected, (query, key, value), upstream), strict=True
    ):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)


def test_context_parallel_ranks_together_equal_dense(layers, monkeypatch):
    """The gather is played by hand: every rank is given all keys in rank order."""
    lengths, size = [8, 24, 4], 2
    query, key, value = (torch.randn(sum(lengths), 2, 8) for _ in range(3))
    held = [context_rows(ends(lengths), (rank, size)) for rank in range(size)]
    gathered = torch.cat([key, value], dim=-1)[np.concatenate(held)]
    monkeypatch.setattr(layers, "gather_from_sequence_parallel_region", lambda tensor, group: gathered)
    expected = dense(query, key, value, lengths, 0.3)
    for rank in range(size):
        packing = pack(lengths, rank, size)
        assert np.array_equal(packing.local_rows, held[rank])
        assert np.array_equal(packing.local_positions, np.concatenate([np.arange(n) for n in lengths])[held[rank]])
        attention = layers.PackedAttention(None, softmax_scale=0.3, pg_collection=SimpleNamespace(cp=group(rank, size)))
        got = attention(query[held[rank]], key[held[rank]], value[held[rank]], None, packed_seq_params=packing)
        torch.testing.assert_close(got, expected[held[rank]])


def test_padding_at_most_doubles_the_rows(layers):
    lengths = np.random.default_rng(0).integers(1, 300, size=200).tolist()
    packing = pack(lengths, 0, 1)
    assert sum(block.queries.numel() for block in packing.blocks) <= 2 * sum(lengths)
    assert len(packing.blocks) <= 10


def test_an_empty_sequence_is_refused(layers):
    with pytest.raises(ValueError, match="at least one row"):
        pack([3, 0], 0, 1)


@pytest.mark.parametrize(
    ("count", "pp", "vpp", "expected"),
    [(4, 2, 1, None), (5, 2, 1, [3, 2]), (5, 3, 1, [2, 2, 1]), (5, 2, 2, [1, 2, 1, 1]), (7, 4, 1, [2, 2, 2, 1])],
)
def test_layers_spread_over_stages(count, pp, vpp, expected):
    layout = megatron._uneven_layout(count, SimpleNamespace(pp=pp, vpp=vpp))
    assert (layout and [stage.count("decoder") for stage in layout]) == expected


def test_more_stages_than_layers_is_a_config_error():
    with pytest.raises(megatron.ConfigError, match=r"3 layers, fewer than pp \* vpp = 2 \* 2 = 4 stages"):
        megatron._uneven_layout(3, SimpleNamespace(pp=2, vpp=2))
