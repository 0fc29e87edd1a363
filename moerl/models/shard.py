"""`Shard`: one rank's part of one weight, as the trainer holds it. What `train` hands to `reshard`.

`index`/`parts` count along `entry.param.tp_axis`: by tensor parallelism, or expert tensor parallelism for experts. A shard
with several HF parts (gate, up) stacks the parts' own shards along dim 0.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.models.spec import Entry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """Attributes:
    tensor: the live parameter (or its fp32 master), not a copy.
    index, parts: which of how many slices this is; 0 of 1 when replicated.
    """

    entry: Entry
    tensor: "torch.Tensor"
    index: int
    parts: int
