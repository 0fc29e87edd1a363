"""What packing and unpacking mean, in torch: one copy per box. The kernels give the same bits."""

from collections.abc import Sequence

import torch

from moerl.reshard.pack.table import Box, Table


def problem(device: torch.device) -> str:
    """Why it cannot be used on a device; it always can."""
    return ""


def move(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, pack: bool, threads: int) -> int:
    """Into the bucket if `pack`, else out of it; `threads` are torch's. Returns the number of copies."""
    for box in table.boxes:
        flat, inside = bucket[box.at : box.end], _view(tensors[box.tensor].detach(), box)
        if pack:
            dense = _cast(inside, box.bucket_dtype).clone(memory_format=torch.contiguous_format)
            flat.copy_(dense.view(-1).view(torch.uint8))
        else:
            inside.copy_(_cast(flat.clone().view(box.bucket_dtype), box.dtype).view(box.sizes))
    return len(table.boxes)


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor.as_strided(box.sizes, box.strides, tensor.storage_offset() + box.offset)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To nearest, ties to even. Narrowing makes every NaN 0x7fc0: torch's own choice differs between its loops."""
    if dtype == torch.bfloat16 and values.dtype == torch.float32:
        return values.to(dtype).masked_fill(values.isnan(), torch.nan)
    return values.to(dtype)
