"""Which parallel sizes can work: what is wrong with those that were asked for, and the nearest that are right.

sizes --trainer_problems, engine_problems--> sentences
      --nearest_trainer, nearest_engine----> legal sizes for as many ranks, by the least sum of |log2| of the changes
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import log2, prod

from moerl.errors import ReshardError
from moerl.models import ModelSpec
from moerl.models.shard import cut_units
from moerl.plan.assumptions import GIB, shape_of
from moerl.reshard.boxes import Kind
from moerl.reshard.engine_boxes import EngineTopology, check_topology
from moerl.reshard.fp8_layout import check_blocks
from moerl.reshard.trainer_layout import TrainerTopology, trainer_parts

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_CP = (1, 2, 4, 8, 16)


def trainer_problems(spec: ModelSpec, topology: TrainerTopology) -> list[str]:
    """Everything in a trainer's sizes that the model, or the number of ranks, does not allow.

    As `trainer_layout.check_trainer`, and what Megatron asks for besides; quick enough for a search.
    """
    t, found, heads = topology, [], shape_of(spec).heads
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        sizes = [getattr(t, name) for name in names]
        if t.world % prod(sizes):
            found.append(f"{t.world} ranks are not a multiple of {' * '.join(names)} = {' * '.join(map(str, sizes))} = {prod(sizes)}")
    if spec.experts % t.ep:
        found.append(f"{spec.experts} experts cannot be spread over ep = {t.ep}")
    if spec.layers < t.pp * t.vpp:
        found.append(f"{spec.layers} layers are fewer than pp * vpp = {t.pp} * {t.vpp} = {t.pp * t.vpp} stages")
    if t.vpp > 1 and t.pp == 1:
        found.append(f"vpp = {t.vpp} needs pipeline stages, but pp is 1")
    if heads % t.tp:
        found.append(f"{heads} attention heads cannot be split over tp = {t.tp}")
    for param in spec.params:
        parts, units = trainer_parts(param, t), cut_units(param)
        if not param.is_vocabulary and units % parts:
            what = "key-value heads" if param.head_rows else "elements"
            found.append(f"{param.hf[0]}: {units} {what} cannot be cut into {'etp' if param.expert else 'tp'} = {parts} parts")
    return found


def engine_problems(spec: ModelSpec, kinds: tuple[Kind, ...], topology: EngineTopology) -> list[str]:
    """Everything in the engines' sizes that the model does not allow."""
    return _problems(lambda: check_topology(spec, kinds, topology))


def block_problems(kinds: tuple[Kind, ...], trainer: TrainerTopology, engine: EngineTopology) -> list[str]:
    """Everything in both sides' sizes that would cut through fp8 blocks; nothing where engines serve another dtype."""
    return _problems(lambda: check_blocks(kinds, trainer, engine))


def _problems(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ReshardError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []


def trainer_choices(spec: ModelSpec, asked: TrainerTopology) -> Iterator[TrainerTopology]:
    """Legal sizes for `asked.world` ranks, nearest to `asked` first."""
    world, shape = asked.world, shape_of(spec)
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    heads = [n for n in divisors if shape.heads % n == 0 and shape.key_value_heads % n == 0]
    experts = [n for n in divisors if spec.experts % n == 0]
    stages = [n for n in divisors if n <= spec.layers]
    found = []
    for tp, pp, cp, ep, etp in product(heads, stages, sorted({*_CP, asked.cp}), experts, sorted({1, asked.etp})):
        if world % (tp * pp * cp) or world % (ep * etp * pp):
            continue
        vpp = asked.vpp if pp > 1 and pp * asked.vpp <= spec.layers else 1
        choice = replace(asked, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, stages=())
        found.append((sum(abs(log2(getattr(choice, name) / getattr(asked, name))) for name in SIZES), choice))
    for _, choice in sorted(found, key=lambda pair: pair[0]):
        if not trainer_problems(spec, choice):
            yield choice


def nearest_trainer(
    spec: ModelSpec, asked: TrainerTopology, fits: Callable[[TrainerTopology], bool] = lambda _: True, *, tries: int = 2000
) -> TrainerTopology | None:
    """The nearest legal sizes for as many ranks that also pass `fits`; None if none of the `tries` nearest does."""
    return next((choice for _, choice in zip(range(tries), trainer_choices(spec, asked), strict=False) if fits(choice)), None)


def nearest_engine(
    spec: ModelSpec,
    kinds: tuple[Kind, ...],
    asked: EngineTopology,
    fits: Callable[[EngineTopology], bool] = lambda _: True,
) -> EngineTopology | None:
    """The nearest legal tp and ep of an engine that also pass `fits`, with at least one engine in as many GPUs or more."""
    heads = shape_of(spec).heads
    sizes = [n for n in range(1, heads + 1) if heads % n == 0]
    choices = [(tp, ep) for tp in sizes for ep in {1, tp, asked.ep} if tp % ep == 0 and spec.experts % ep == 0]
    for tp, ep in sorted(choices, key=lambda pair: (abs(log2(pair[0] / asked.tp)) + abs(log2(pair[1] / asked.ep)), pair)):
        choice = replace(asked, tp=tp, ep=ep, count=max(asked.world // tp, 1))
        if not engine_problems(spec, kinds, choice) and fits(choice):
            return choice
    return None


def words(topology: TrainerTopology | EngineTopology) -> str:
    """Sizes as one would give them."""
    if isinstance(topology, TrainerTopology):
        return f"{topology.world} ranks as " + " ".join(f"{name}={getattr(topology, name)}" for name in SIZES)
    return f"{topology.count} engine(s) of tp={topology.tp} ep={topology.ep}"


def too_large(who: str, parts: dict[str, int], gpu_gib: float, reserve_gib: float) -> str:
    """One sentence that shows what a rank needs of its GPU, part by part."""
    need = sum(parts.values()) / GIB + reserve_gib
    shown = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size / GIB >= 0.05)
    return f"{who} needs {need:.1f} GiB of {gpu_gib:g}: {shown} + reserve {reserve_gib:g}"
