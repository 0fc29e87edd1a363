"""From scored samples to packed microbatches: numpy only, the same on every rank, before any parallel cut.

A sequence of n tokens gives n - 1 positions: input token i, label token i + 1, routes row i. Sequences are laid one after
another and each is padded to a multiple that context and sequence parallelism can cut.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Microbatch:
    """Packed positions of some sequences (THD).

    Attributes:
        tokens: int64[n] inputs.
        labels: int64[n] the next token of each.
        positions: int64[n] position within the sequence.
        cu_seqlens: int32[s + 1] boundaries of the padded sequences.
        loss_mask: float32[n] 1 where the label is a trained response token.
        routes: uint8|uint16[n, moe_layer, k] or None; padding rows hold distinct, balanced experts.
        real: bool[n] False at padding.
        columns: further float32[n] arrays by name, zero where they don't apply: advantages, engine_logprobs, ...
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    routes: np.ndarray | None
    real: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.tokens)
