"""What a sender packs where engines serve fp8 in blocks.

    live bf16 parameters + the copies of one bucket --sources--> {name: tensor} that the bucket's copies are cut from

How a block is quantised, and what becomes of infinities and NaN, is `numerics.fp8`'s. Engines never make blocks from a bf16 checkpoint:
SGLang's `--quantization fp8` gives one scale per row or per tensor instead. To serve blocks, it needs a checkpoint whose configuration
has `weight_block_size`.
"""

from collections.abc import Callable, Iterable

import torch

from moerl.numerics.fp8 import Block, block_scales, dequantise_blocks, quantise_blocks
from moerl.reshard.engine_boxes import SCALE
from moerl.reshard.plan import Copy

__all__ = ["Block", "block_scales", "dequantise_blocks", "quantise_blocks", "sources"]


def sources(
    copies: Iterable[Copy], tensors: Callable[[str], torch.Tensor], block: Block | None, *, power_of_two: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors that one bucket's `Plan.copies_out` are cut from.

    What travels as it is, is the live parameter itself. Where a weight travels as fp8 or its scales do, the tensor is made here; outside
    the blocks that the copies touch it holds anything.

    Args:
        tensors: live parameters by canonical Megatron name.
        block, power_of_two: `fp8_block` and `fp8_power_of_two` of the plan.

    Returns:
        Name in the copies -> tensor. Memory: a byte for each element of the quantised parameters in this bucket.
    """
    found: dict[str, torch.Tensor] = {}
    for copy in copies:
        name = copy.parameter
        if copy.dtype == "float8_e4m3fn":
            weight = tensors(name)
            if name not in found:
                found[name] = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
            rows, cols = _touched(copy, weight.shape[1], block)
            found[name][rows, cols] = quantise_blocks(weight[rows, cols], block, power_of_two=power_of_two)[0]
        elif block is not None and name.endswith(SCALE):
            if name not in found:
                found[name] = block_scales(tensors(name.removesuffix(SCALE)), block, power_of_two=power_of_two)
        else:
            found[name] = tensors(name)
    return found


def _touched(copy: Copy, width: int, block: Block) -> tuple[slice, slice]:
    """Rows and columns of all blocks that a copy from a parameter of `width` columns has elements of."""
    firsts = divmod(copy.start, width)
    return tuple(
        slice(first // edge * edge, -(-(first + count) // edge) * edge)
        for first, count, edge in zip(firsts, copy.counts[1:], block, strict=True)
    )
