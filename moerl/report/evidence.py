"""What rules look at and what they answer with, and how they put figures in words."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Severity = Literal["error", "warning", "note", "good"]


@dataclass(frozen=True)
class Finding:
    """Attributes:
    severity: error: the recording or the set-up is wrong. warning: it works, and loses something. note: worth knowing. good.
    id: a stable word for scripts.
    title: one plain sentence. evidence: the figures behind it. advice: what to change.
    """

    severity: Severity
    id: str
    title: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Evidence:
    """Attributes:
    report: the report so far (see docs/report.md).
    moved_layers: (engine layer, trainer layer that it fits).
    offsets: how many samples' routes fit another position, by how far it is away. shifted: (step, prompt_id, sample, offset) of
        some of them. samples: all samples that were judged.
    swapped: (layer, expert, in its place, how often).
    layer_flips: int[layer]: experts of the trainer that the engine lacks, of generated tokens.
    sample_flips: float64[m, 2]: flips and decisions of each sample.
    """

    report: dict[str, Any]
    moved_layers: list[tuple[int, int]]
    offsets: dict[int, int]
    shifted: list[tuple[int, int, int, int]]
    samples: int
    swapped: list[tuple[int, int, int, float]]
    layer_flips: np.ndarray
    sample_flips: np.ndarray


def percent(share: float) -> str:
    """0.123 as "12 %", small shares with more digits."""
    if share and share < 0.001:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.1f} %" if share < 0.0995 or 0.9 < share < 1 else f"{100 * share:.0f} %"


def name_layers(layers: list[int]) -> str:
    """ "layer 3" or "layers 3, 4"."""
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {name_some(layers)}"


def name_some(values: list[int]) -> str:
    """The first few, and how many there are."""
    return ", ".join(map(str, values[:8])) + (f" … ({len(values)})" if len(values) > 8 else "")
