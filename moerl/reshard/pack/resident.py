"""A table's descriptors on a device, kept with the table, so that a launch copies nothing to it unless tensors moved."""

from collections.abc import Sequence

import numpy as np
import torch

from moerl.reshard.pack.table import Table


def descriptors(table: Table, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`table.rows` and `table.owners` on a device."""
    if (key := ("descriptors", device)) not in table.cache:
        table.cache[key] = tuple(torch.from_numpy(array).to(device) for array in (table.rows, table.owners))
    return table.cache[key]


def addresses(table: Table, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64[tensor] on a device: where each tensor lies. The last answer is kept for tensors that stay."""
    found = tuple(tensor.data_ptr() for tensor in tensors)
    key = ("addresses", device)
    if key not in table.cache or table.cache[key][0] != found:
        table.cache[key] = found, torch.from_numpy(np.array(found, np.int64)).to(device)
    answer = table.cache[key][1]
    if device.type == "cuda":
        answer.record_stream(torch.cuda.current_stream(device))  # it may be replaced while a kernel of this stream still reads it
    return answer
