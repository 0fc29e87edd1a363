"""Where every element of every HF tensor lives on the trainer's ranks.

    TrainerTopology + Kind --trainer_shares--> Shares within one pipeline stage; `stage_of` tells which stage a layer is in

Ranks follow Megatron's default order (tp, cp, ep, dp, pp: the first varies fastest), with two factorisations of the same stage:

    dense weights:   rank = tp  + TP  * (cp + CP * (dp + DP * pp))
    routed experts:  rank = etp + ETP * (ep + EP * (edp + EDP * pp))

All ranks of a stage that differ in the other coordinates hold the same bytes. Every parameter is named by its canonical Megatron
name with global layer and expert numbers, as in `Shard.entry`, whatever the layout calls it locally.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.errors import ReshardError
from moerl.models.shard import cut_units, windows
from moerl.models.spec import ModelSpec, Param
from moerl.models.stages import pipeline_stages
from moerl.reshard.boxes import Box, Kind, Shares, kinds, shares

if TYPE_CHECKING:
    from moerl.config.schema import Parallel


@dataclass(frozen=True)
class TrainerTopology:
    """How the trainer cuts the model.

    Attributes:
        world: ranks in total.
        tp, pp, vpp, cp, ep, etp: sizes, as in `[parallel]`.
        transformer_engine: whether the layers are Transformer Engine's, which keep the compressed MLA projections whole on every
            tensor-parallel rank; the local layers cut them.
        stages: decoder layers of each virtual pipeline stage in the order of the layers (pp * vpp numbers); empty: as
            `pipeline_stages` spreads them.
        mtp: whether the layer for multi-token prediction is held too, by the last stage.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    transformer_engine: bool = False
    stages: tuple[int, ...] = ()
    mtp: bool = False

    @property
    def per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp


def trainer_topology(parallel: "Parallel", world: int, *, transformer_engine: bool, stages: tuple[int, ...] = ()) -> TrainerTopology:
    """The topology of `[parallel]` over `world` ranks."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    return TrainerTopology(world, **sizes, transformer_engine=transformer_engine, stages=stages)


def stages_of(spec: ModelSpec, topology: TrainerTopology) -> dict[int, int]:
    """Pipeline rank of every layer, and of what comes before (-1) and after (`spec.layers`) them."""
    counts = topology.stages or pipeline_stages(spec.layers, topology.pp * topology.vpp)
    found = {-1: 0, spec.layers: topology.pp - 1}
    layer = 0
    for number, count in enumerate(counts):
        for _ in range(count):
            found[layer] = number % topology.pp
            layer += 1
    return found


def check_trainer(spec: ModelSpec, topology: TrainerTopology) -> None:
    """Check that the topology can hold the model.

    Raises:
        ReshardError: with every size that does not fit.
    """
    t, wrong = topology, []
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        sizes = [getattr(t, name) for name in names]
        if t.world % (sizes[0] * sizes[1] * sizes[2]):
            wrong.append(f"{t.world} ranks are not a multiple of {' * '.join(names)} = {' * '.join(map(str, sizes))}")
    if spec.experts % t.ep:
        wrong.append(f"{spec.experts} experts cannot be spread over ep = {t.ep}")
    if spec.layers < t.pp * t.vpp:
        wrong.append(f"{spec.layers} layers are fewer than pp * vpp = {t.pp * t.vpp} stages")
    if t.stages and (len(t.stages) != t.pp * t.vpp or sum(t.stages) != spec.layers):
        wrong.append(f"stages {t.stages} are not pp * vpp = {t.pp * t.vpp} numbers that add up to {spec.layers} layers")
    if t.mtp and not spec.mtp_layers:
        wrong.append("mtp is set, but the model has no layer for multi-token prediction")
    for kind in kinds(spec, mtp=t.mtp):
        parts, units = trainer_parts(kind.param, topology), cut_units(kind.param)
        if not kind.is_vocabulary and units % parts:
            wrong.append(f"{kind.hf}: {units} {'key-value heads' if kind.param.head_rows else 'elements'} cannot be cut into {parts} parts")
    if wrong:
        raise ReshardError("the trainer's topology does not fit the model:\n" + "\n".join(f"  - {line}" for line in wrong))


def trainer_shares(kind: Kind, topology: TrainerTopology) -> Shares:
    """Where one kind lies within a pipeline stage that has it; ranks count from the stage's first."""
    parts = trainer_parts(kind.param, topology)
    row_stride = kind.cols // parts if kind.param.tp_axis == 1 else kind.cols
    held: list[tuple[Box, int, range]] = []
    for experts, index, ranks in _holders(kind, topology, parts):
        mine = (window for window in windows(kind.param, index, parts) if window.part == kind.part)
        held += [((experts, window.rows, window.cols), window.at * row_stride, ranks) for window in mine]
    return shares(held, (0, row_stride))


def _holders(kind: Kind, topology: TrainerTopology, parts: int) -> Iterator[tuple[tuple[int, int], int, range]]:
    """(experts, slice, ranks of the stage that hold it)."""
    t = topology
    if not kind.param.expert:
        for index in range(parts):
            yield (0, 1), index, range(index, t.per_stage, parts)
        return
    each = kind.experts // t.ep
    for ep in range(t.ep):
        for etp in range(t.etp):
            yield (ep * each, (ep + 1) * each), etp if parts > 1 else 0, range(ep * t.etp + etp, t.per_stage, t.etp * t.ep)


def expected_shards(spec: ModelSpec, topology: TrainerTopology, rank: int) -> dict[str, tuple[int, ...]]:
    """Megatron name -> shape of everything that trainer rank `rank` must hold, without vocabulary padding."""
    stages, local, found = stages_of(spec, topology), rank % topology.per_stage, {}
    for kind in kinds(spec, mtp=topology.mtp):
        if kind.part:
            continue
        param = kind.param
        where = trainer_shares(kind, topology)
        mine = [box for box, ranks in zip(where.boxes, where.ranks, strict=True) if local in ranks]
        shape = _shard_shape(kind, topology, sum(int(box[1, 1] - box[1, 0]) for box in mine))
        for layer in kind.layers:
            if stages[layer] != rank // topology.per_stage:
                continue
            for expert in range(*(int(n) for n in mine[0][0])) if mine else (0,):
                found[param.megatron.format(layer=layer, expert=expert)] = shape
    return found


def shard_differences(expected: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One sentence for each weight (Megatron name -> shape) that is missing, is too much, or has another shape than expected."""
    wrong = [f"{name} is missing, expected {list(expected[name])}" for name in expected if name not in held]
    wrong += [f"{name} {list(held[name])} is not part of this rank's layout" for name in held if name not in expected]
    return wrong + [
        f"{name} is {list(held[name])}, expected {list(shape)}" for name, shape in expected.items() if name in held and held[name] != shape
    ]


def check_shards(expected: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]], rank: int) -> None:
    """Compare what trainer rank `rank` holds (Megatron name -> shape) with `expected_shards`.

    Raises:
        ReshardError: listing every difference.
    """
    if wrong := shard_differences(expected, held):
        raise ReshardError(
            f"{len(wrong)} weights of trainer rank {rank} are not where the plan expects them; check that the topology it was made for "
            "(parallel sizes, pipeline stages, Transformer Engine or local layers) is the trainer's:\n"
            + "\n".join(f"  - {line}" for line in wrong)
        )


def _shard_shape(kind: Kind, topology: TrainerTopology, rows: int) -> tuple[int, ...]:
    """Shape of the parameter, of whose first HF part a rank holds `rows` rows."""
    param, parts = kind.param, trainer_parts(kind.param, topology)
    if param.tp_axis == 1:
        return (rows * len(param.hf), kind.cols // parts)
    total = rows * sum(param.part_shape(part)[0] for part in range(len(param.hf))) // kind.rows
    return (total, *param.shape[1:])


def is_compressed(param: Param) -> bool:
    """Whether it projects down to MLA's latent vectors, which Transformer Engine's layers keep whole and the local ones cut."""
    return param.engine_replicated and ".self_attn" in param.hf[0] and param.tp_axis is not None


def trainer_parts(param: Param, topology: TrainerTopology) -> int:
    """Into how many slices Megatron cuts a weight."""
    if param.tp_axis is None or (topology.transformer_engine and is_compressed(param)):
        return 1
    return topology.etp if param.expert else topology.tp
