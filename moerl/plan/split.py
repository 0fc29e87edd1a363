"""How many of N GPUs should train, and how the two pools should be cut: a search over legal sizes that fit, by the bounds of `rates`.

Every number of trainer GPUs (in whole machines of 8 from 16 GPUs on) is tried with its best layout, and every engine size with the GPUs
that are left. The best is the split with the most response tokens per second, which is where neither pool waits for the other. Sizes
that only communication would tell apart are ordered by how much of it they cause: smaller tp first, then smaller ep.
"""

from dataclasses import dataclass, replace

from moerl.errors import ConfigError
from moerl.plan import fit
from moerl.plan.estimate import Job, generation_of, plan_engine, response_tokens, step_s
from moerl.plan.rates import passes, training_time
from moerl.plan.trainer import Elements, Training, stage_elements, stage_memory, training_of
from moerl.reshard.boxes import Kind
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.fp8_layout import wire_kinds
from moerl.reshard.trainer_layout import TrainerTopology

_TP, _PP = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)
_EP = (1, 2, 4, 8, 16, 32, 64)
_ENGINE = (1, 2, 4, 8, 16, 32, 64, 72)
_NODE = 8


@dataclass(frozen=True)
class Split:
    """Attributes:
    rollout_s, training_s: bounds of one step of each pool; equal if they are balanced.
    tokens_per_s: response tokens, as bound, without weight updates.
    """

    trainer: TrainerTopology
    engine: EngineTopology
    rollout_s: float
    training_s: float
    tokens_per_s: float

    @property
    def gpus(self) -> int:
        return self.trainer.world + self.engine.world


def splits(job: Job, gpus: int) -> list[Split]:
    """The best split of `gpus` GPUs for each number of trainer GPUs that can hold the model, best first.

    Raises:
        ConfigError: no split of so many GPUs holds trainer and engine.
    """
    kinds = wire_kinds(job.spec, job.engine)
    engines = [option for tp in _sizes(job) for option in _engines(job, kinds, tp) if tp < gpus]
    layouts, found = _Layouts(job, kinds), []
    unit = _NODE if gpus >= 2 * _NODE else 1
    for world in range(unit, gpus, unit):
        options = [replace(option, count=(gpus - world) // option.tp) for option in engines if option.tp <= gpus - world]
        if not options or (best := layouts.best(world)) is None:
            continue
        found.append(max((_evaluate(job, kinds, *best, option) for option in options), key=lambda one: (one.tokens_per_s, -one.engine.tp)))
    if not found:
        raise ConfigError(_why_not(job, layouts, engines, gpus, unit))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _sizes(job: Job) -> list[int]:
    """GPUs of an engine: of one machine."""
    return [tp for tp in _ENGINE if tp <= job.ranks_per_node]


def _engines(job: Job, kinds: tuple[Kind, ...], tp: int) -> list[EngineTopology]:
    """Engines of tp ranks that are legal and hold one sequence of mean length."""
    options = [replace(job.engine, count=1, tp=tp, ep=ep) for ep in sorted({1, tp})]
    longest, whole = job.assumptions.prompt_tokens + job.assumptions.response_tokens, TrainerTopology(1)
    legal = [one for one in options if not fit.engine_problems(job.spec, kinds, one) and not fit.block_problems(kinds, whole, one)]
    return [option for option in legal if plan_engine(job, kinds, option)[2] >= longest]


class _Layouts:
    """The trainer's best layout for each number of ranks; what ranks hold is counted once for each way to cut the model."""

    def __init__(self, job: Job, kinds: tuple[Kind, ...]):
        self._job, self._kinds, self._training = job, kinds, training_of(job.config, job.assumptions)
        self._passes = passes(job.config)
        self._held: dict[tuple[int, int, int], list[Elements] | None] = {}

    def best(self, world: int) -> tuple[TrainerTopology, float] | None:
        """(sizes, seconds of a step) of the fastest that fits; None if none does."""
        job, found = self._job, []
        for pp in _PP:
            for tp in _TP:
                for ep in _EP:
                    if world % (tp * pp * job.trainer.cp) or world % (ep * pp):
                        continue
                    sizes = replace(job.trainer, world=world, tp=tp, pp=pp, vpp=1, ep=ep, etp=1, stages=())
                    if (held := self._elements(sizes)) is None or not self._fits(sizes, self._training, held):
                        continue
                    seconds = training_time(job.spec, sizes, self._training, job.assumptions, self._passes).step_s
                    found.append((float(f"{seconds:.2g}"), tp, ep, pp, sizes, seconds))
        if not found:
            return None
        *_, sizes, seconds = min(found, key=lambda one: one[:4])
        return sizes, seconds

    def _elements(self, sizes: TrainerTopology) -> list[Elements] | None:
        key = (sizes.tp, sizes.pp, sizes.ep)
        if key not in self._held:
            whole = replace(self._job.engine, count=1, tp=1, ep=1)
            wrong = fit.trainer_problems(self._job.spec, sizes) or fit.block_problems(self._kinds, sizes, whole)
            self._held[key] = None if wrong else stage_elements(self._job.spec, sizes)
        return self._held[key]

    def _fits(self, sizes: TrainerTopology, training: Training, held: list[Elements]) -> bool:
        budget = self._job.assumptions.budget
        # Weights and gradients alone, which no further rank takes away.
        if 6 * (held[0].dense + held[0].expert) > budget:
            return False
        return all(sum(parts.values()) <= budget for parts in stage_memory(self._job.spec, sizes, training, held))


def _evaluate(job: Job, kinds: tuple[Kind, ...], trainer: TrainerTopology, training_s: float, engine: EngineTopology) -> Split:
    tokens = plan_engine(job, kinds, engine)[1]
    rollout_s = generation_of(job, kinds, engine, tokens)[1]
    return Split(trainer, engine, rollout_s, training_s, response_tokens(job) / step_s(job.config, rollout_s, training_s, 0.0))


def _why_not(job: Job, layouts: _Layouts, engines: list[EngineTopology], gpus: int, unit: int) -> str:
    smallest = next((world for world in range(unit, max(8 * gpus, 1024), unit) if layouts.best(world)), None)
    trainer = f"the trainer needs at least {smallest} GPUs" if smallest else "no trainer size that was tried fits"
    engine = (
        f"an engine at least {min(option.tp for option in engines)}"
        if engines
        else f"no engine of up to {_sizes(job)[-1]} GPUs (--ranks-per-node) fits"
    )
    return f"{gpus} GPUs of {job.assumptions.gpu_gib:g} GiB cannot hold both pools: {trainer}, {engine}"
