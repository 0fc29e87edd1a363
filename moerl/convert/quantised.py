"""Weights of a Hugging Face folder as they count: plain ones as they are stored, fp8 ones times their scales.

    Stored weight [+ Stored scales] --weight--> Weight --fill--> rows, in `Weight.dtype`

Two published forms of fp8 are known, both float8_e4m3fn: one scale per block (`weight_scale_inv`, DeepSeek's and Qwen's), blocks counted
from the first row and column and smaller at the ends; and one scale per row (`weight_scale` [rows, 1], GLM's). A product is taken in
float32 and rounded to bfloat16 once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moerl.convert.folder import DTYPES, Stored, read_rows
from moerl.numerics.fp8 import Block, dequantise_blocks

_SCALE_TYPES = ("F32", "BF16")
_STRIP_ELEMENTS = 1 << 22
"""Elements that are dequantised together, roughly: 50 MiB of scratch memory."""


@dataclass(frozen=True)
class Weight:
    """One tensor that a conversion reads.

    Attributes:
        scales: None unless it is quantised.
        block: (rows, columns) that share a scale.
    """

    stored: Stored
    scales: Stored | None = None
    block: Block = (1, 1)

    @property
    def dtype(self) -> torch.dtype:
        """What `fill` gives."""
        return torch.bfloat16 if self.scales else DTYPES[self.stored.dtype]


def weight_block(hf: Mapping[str, Any]) -> Block | None:
    """(rows, columns) that share a scale by `config.json`; None where it says nothing of blocks."""
    block = (hf.get("quantization_config") or {}).get("weight_block_size")
    return tuple(block) if block else None


def weight(stored: Stored, scales: Mapping[str, Stored], name: str, block: Block | None) -> tuple[Weight | None, str]:
    """(the weight, nothing), or (None, what is wrong with it).

    Args:
        scales: the folder's scales by name.
        block: what `config.json` says.
    """
    inverse, row = scales.get(f"{name}_scale_inv"), scales.get(f"{name}_scale")
    if stored.dtype not in DTYPES:
        return None, f"{name}: type {stored.dtype}, expected {', '.join(DTYPES)}"
    if stored.dtype != "F8_E4M3":
        return (None, f"{name}: has scales, but is {stored.dtype}, not F8_E4M3") if inverse or row else (Weight(stored), "")
    if (inverse is None) == (row is None) or len(stored.shape) != 2:
        return None, f"{name}: F8_E4M3 of shape {list(stored.shape)} needs two axes and one of {name}_scale_inv, {name}_scale beside it"
    if inverse and not block:
        return None, f"{name}: has {name}_scale_inv, but config.json has no quantization_config.weight_block_size"
    found, edges = (inverse, block) if inverse else (row, (1, stored.shape[1]))
    expected = tuple(-(-size // edge) for size, edge in zip(stored.shape, edges, strict=True))
    if found.shape != expected and not (row and found.shape == (stored.shape[0],)):
        return None, f"{name}: scales {list(found.shape)}, expected {list(expected)} for {list(stored.shape)} in blocks of {list(edges)}"
    if found.dtype not in _SCALE_TYPES:
        return None, f"{name}: scales of type {found.dtype}, expected {' or '.join(_SCALE_TYPES)}"
    return Weight(stored, found, edges), ""


def fill(source: Weight, first: int, last: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous and of `source.dtype`, with rows `first` to `last` - 1."""
    if source.scales is None:
        read_rows(source.stored, first, last, out)
        return
    (edge, _), columns = source.block, source.stored.shape[1]
    step = max(_STRIP_ELEMENTS // max(columns, 1) // edge, 1) * edge
    for row in range(first // edge * edge, last, step):
        end = min(row + step, source.stored.shape[0], -(-last // edge) * edge)
        values = torch.empty((end - row, columns), dtype=torch.float8_e4m3fn)
        read_rows(source.stored, row, end, values)
        scales = torch.empty((-(-end // edge) - row // edge, *source.scales.shape[1:]), dtype=DTYPES[source.scales.dtype])
        read_rows(source.scales, row // edge, row // edge + len(scales), scales)
        found = dequantise_blocks(values, scales.view(len(scales), -1), source.block)
        kept = slice(max(row, first), min(end, last))
        out[kept.start - first : kept.stop - first] = found[kept.start - row : kept.stop - row]
