"""Block-wise fp8 quantisation, bit for bit SGLang's.

A block's scale is the largest magnitude in it by the largest that float8_e4m3fn holds, 448; elements are divided by it and rounded to the
nearest, ties to even. Two variants, each equal to one function of SGLang 0.5 on the same kind of device (a GPU may round a scale
otherwise than a CPU):

- float32 scales: `mxfp8_block_convert.bf16_to_block_fp8_128`, the contract of DeepSeek-V3's checkpoints;
- powers of two (`ue8m0`), rounded up: `fp8_utils.quant_weight_ue8m0`, with which SGLang requantises.

A block of zeros has the scale of 1e-4 and stays zero. An infinity makes its block's other elements zero and itself NaN (448 with powers
of two); a NaN makes all NaN (only itself with powers of two): whoever quantises weights must have refused those before.
"""

from collections.abc import Iterator

import torch

from moerl.errors import ReshardError

Block = tuple[int, int]
"""(rows, columns) that share a scale."""

MAX = 448.0
_LEAST_AMAX = 1e-4
_STRIP_ELEMENTS = 1 << 24
"""Elements that are quantised together, roughly: scratch memory is some 12 bytes for each."""


def quantise_blocks(weight: torch.Tensor, block: Block = (128, 128), *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise bf16 or fp32 [..., rows, cols], with blocks counted from the first row and column.

    Returns:
        (float8_e4m3fn [..., rows, cols], scales float32 [..., ceil(rows / block rows), ceil(cols / block cols)]), so that
        fp8 * scale is about the weight.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device), _no_scales(weight, block)
    for rows, tiles in _strips(weight, block):
        scale = _scale_of(tiles, power_of_two)
        scaled = tiles * (1.0 / scale) if power_of_two else tiles / scale
        values[..., rows, :] = _untiled(scaled.to(torch.float8_e4m3fn), weight[..., rows, :].shape)
        scales[..., _block_rows(rows, block), :] = scale[..., 0, :, 0]
    return values, scales


def block_scales(weight: torch.Tensor, block: Block = (128, 128), *, power_of_two: bool = False) -> torch.Tensor:
    """The scales of `quantise_blocks` alone."""
    scales = _no_scales(weight, block)
    for rows, tiles in _strips(weight, block):
        scales[..., _block_rows(rows, block), :] = _scale_of(tiles, power_of_two)[..., 0, :, 0]
    return scales


def dequantise_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: Block = (128, 128), dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Inverse of `quantise_blocks` but for rounding: [..., rows, cols].

    Raises:
        ReshardError: the scales are not those of such a tensor.
    """
    expected = _no_scales(values, block).shape
    if scales.shape != expected:
        raise ReshardError(f"expected scales {list(expected)} for {list(values.shape)} in blocks of {block}, got {list(scales.shape)}")
    found = torch.empty(values.shape, dtype=dtype, device=values.device)
    for rows, tiles in _strips(values, block):
        scaled = tiles * scales[..., _block_rows(rows, block), None, :, None]
        found[..., rows, :] = _untiled(scaled, values[..., rows, :].shape).to(dtype)
    return found


def _no_scales(weight: torch.Tensor, block: Block) -> torch.Tensor:
    *outer, rows, cols = weight.shape
    return torch.empty((*outer, -(-rows // block[0]), -(-cols // block[1])), dtype=torch.float32, device=weight.device)


def _strips(weight: torch.Tensor, block: Block) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, float32 [..., block row, row, block column, column]) of strips that hold whole blocks, zeros where a block is ragged."""
    *_, rows, cols = weight.shape
    height = max(_STRIP_ELEMENTS * rows // max(weight.numel(), 1) // block[0], 1) * block[0]
    for first in range(0, rows, height):
        strip = weight[..., first : first + height, :].float()
        missing = -strip.shape[-2] % block[0], -cols % block[1]
        if any(missing):
            strip = torch.nn.functional.pad(strip, (0, missing[1], 0, missing[0]))
        yield slice(first, min(first + height, rows)), strip.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))


def _untiled(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tiles.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]


def _block_rows(rows: slice, block: Block) -> slice:
    return slice(rows.start // block[0], -(-rows.stop // block[0]))


def _scale_of(tiles: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """float32 [..., block row, 1, block column, 1]"""
    scale = tiles.abs().amax(dim=(-3, -1), keepdim=True).clamp(_LEAST_AMAX) / MAX
    return _rounded_up(scale) if power_of_two else scale


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The next power of two; 2**127 for what is not finite."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
