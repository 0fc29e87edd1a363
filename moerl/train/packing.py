"""What attention needs to know of a packed microbatch: Megatron's boundaries, and which rows are attended together.

    cu_seqlens --pack--> Packing (once per microbatch) --> every layer

A packed row order is what everything here agrees on; under context parallelism it is that of `routing.shard`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from moerl.routing.shard import context_rows


@dataclass(frozen=True)
class Block:
    """Sequences of similar length, attended as one padded batch.

    Attributes:
        queries: int64[b, lq] local rows; padding repeats a sequence's last row.
        keys: int64[b, lk] rows of the gathered keys; without context parallelism the same as `queries`.
        mask: bool[b, 1, lq, lk] or None for plain causal (padding keys come after every real query).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Packing(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our layers need, computed once per microbatch.

    Attributes:
        microbatch: its number within the step; how replayed routes find their microbatch.
        local_rows: int64[n_local] rows of the whole microbatch that this context-parallel rank holds, in order.
        local_positions: int64[n_local] position of each within its sequence.
        blocks: attention work.
        scatter: int64[n_local] row of the concatenated block outputs for each local row.
        rotary: (cos, sin), each [n_local, 1, dim / 2]; filled by the first layer.
    """

    microbatch: int = 0
    local_rows: torch.Tensor | None = None
    local_positions: torch.Tensor | None = None
    blocks: tuple[Block, ...] = ()
    scatter: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)


def pack(cu_seqlens: np.ndarray, *, rank: int, size: int, microbatch: int, device: torch.device) -> Packing:
    """Everything attention needs to know about one packed microbatch.

    Args:
        cu_seqlens: int[s + 1] boundaries of the padded sequences of the whole microbatch.
        rank, size: context-parallel position.
    """
    cu = cu_seqlens.astype(np.int64)
    lengths = np.diff(cu)
    if (lengths <= 0).any():
        raise ValueError(f"packed sequences must have at least one row each, got lengths {lengths[:8].tolist()}")
    rows = [context_rows(cu, (other, size)) for other in range(size)]
    mine = rows[rank]
    positions = mine - np.repeat(cu[:-1], lengths // size)
    gathered = np.empty(int(cu[-1]), np.int64)
    gathered[np.concatenate(rows)] = np.arange(int(cu[-1]))
    blocks, scatter = _blocks(cu, lengths, size, positions, gathered)
    boundaries = torch.as_tensor(cu_seqlens.astype(np.int32)).to(device)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(device)

    longest = int(lengths.max()) if len(lengths) else 0
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        microbatch=microbatch,
        local_rows=put(mine),
        local_positions=put(positions),
        blocks=tuple(Block(put(q), put(k), None if m is None else put(m)) for q, k, m in blocks),
        scatter=put(scatter),
    )


def _blocks(
    cu: np.ndarray, lengths: np.ndarray, size: int, positions: np.ndarray, gathered: np.ndarray
) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray | None]], np.ndarray]:
    """Group sequences by the power of two above their length, so that padding at most doubles the work.

    Returns:
        (queries, keys, mask) per block, and the row of the concatenated outputs for each local row.
    """
    blocks, scatter, offset = [], np.empty(len(positions), np.int64), 0
    buckets = np.ceil(np.log2(lengths)).astype(int)
    for bucket in np.unique(buckets):
        chosen = np.flatnonzero(buckets == bucket)
        starts, long = cu[chosen, None], lengths[chosen, None]
        keys = gathered[starts + np.minimum(np.arange(long.max())[None], long - 1)]
        width = int(long.max()) // size
        slot = np.arange(width)[None]
        queries = starts // size + np.minimum(slot, long // size - 1)
        mask = None
        if size > 1:
            mask = (positions[queries][:, :, None] >= np.arange(keys.shape[1])[None, None])[:, None]
        real = slot < long // size
        scatter[queries[real]] = offset + np.flatnonzero(real.reshape(-1))
        offset += queries.size
        blocks.append((queries, keys, mask))
    return blocks, scatter
