"""What ranks of a model that was really built hold, against what the plan says they hold.

built ranks, as Holdings --check_holdings--> nothing, or one error with every difference of every rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moerl.errors import ReshardError
from moerl.models import ModelSpec
from moerl.plan.trainer import Elements, stage_elements, weight_bytes
from moerl.reshard.trainer_layout import TrainerTopology, expected_shards, shard_differences


@dataclass(frozen=True)
class Holding:
    """One rank's model.

    Attributes:
        transformer_engine: whether its layers are Transformer Engine's.
        layers: decoder layers of each of its virtual pipeline stages.
        shapes: Megatron name, with global layer and expert numbers -> shape without vocabulary padding.
        elements: of all its tensors, vocabulary padding and the last stage's copy of a tied embedding among them.
        nbytes: of the same tensors.
    """

    rank: int
    transformer_engine: bool
    layers: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    elements: Elements
    nbytes: int

    @property
    def parameters(self) -> int:
        return self.elements.dense + self.elements.expert


def spread_of(holdings: Sequence[Holding], topology: TrainerTopology) -> tuple[int, ...]:
    """Decoder layers of each virtual pipeline stage in the order of the layers, from one holding of every pipeline rank."""
    layers = {holding.rank // topology.per_stage: holding.layers for holding in holdings}
    return tuple(layers[stage][number] for number in range(topology.vpp) for stage in range(topology.pp))


def check_holdings(spec: ModelSpec, topology: TrainerTopology, itemsize: int, holdings: Sequence[Holding]) -> None:
    """Compare names, shapes, numbers of elements and bytes.

    Args:
        topology: the plan's, for the kind of layers that were built.
        itemsize: bytes of a weight.

    Raises:
        ReshardError: listing every difference.
    """
    planned = stage_elements(spec, topology)
    wrong = [
        f"rank {holding.rank}: {text}"
        for holding in holdings
        for text in _differences(holding, spec, topology, planned[holding.rank // topology.per_stage], itemsize)
    ]
    if wrong:
        raise ReshardError(
            f"Megatron builds another model than the plan counts on, in {len(wrong)} points; memory and weight updates cannot be "
            "planned with these settings, so change what [megatron] says of the model, or report this:\n"
            + "\n".join(f"  - {line}" for line in wrong)
        )


def _differences(holding: Holding, spec: ModelSpec, topology: TrainerTopology, planned: Elements, itemsize: int) -> Iterator[str]:
    yield from shard_differences(expected_shards(spec, topology, holding.rank), holding.shapes)
    for name, what in (("dense", "elements outside routed experts"), ("expert", "elements of routed experts"), ("buffers", "buffers")):
        built, expected = getattr(holding.elements, name), getattr(planned, name)
        if built != expected:
            yield f"{what}: {built:,}, expected {expected:,}"
    if holding.nbytes != (expected := weight_bytes(planned, itemsize)):
        yield f"weights take {holding.nbytes:,} bytes, expected {expected:,}"
