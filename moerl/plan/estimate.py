"""One job, from its settings to all of its figures."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.models import ModelSpec
from moerl.plan import fit
from moerl.plan.assumptions import GIB, Assumptions, shape_of
from moerl.plan.engine import engine_memory, engine_weights, kv_capacity, kv_itemsize, kv_token_bytes
from moerl.plan.rates import Generation, TrainingTime, active_parameters, generation, passes, training_time
from moerl.plan.trainer import Training, stage_memory, training_of, worst_stage
from moerl.reshard.boxes import Kind
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.fp8_layout import wire_kinds
from moerl.reshard.plan import Plan, make_plan
from moerl.reshard.summary import Summary, pair_bytes
from moerl.reshard.topology import engine_topology
from moerl.reshard.trainer_layout import TrainerTopology, trainer_topology


@dataclass(frozen=True)
class Job:
    """Everything that decides the figures.

    Attributes:
        name: what tables call it.
        fill_cache: the KV cache takes what memory is left, up to what `engine.max_running_requests` sequences of mean length need,
            instead of `engine.max_total_tokens`.
    """

    name: str
    config: Config
    spec: ModelSpec
    trainer: TrainerTopology
    engine: EngineTopology
    assumptions: Assumptions
    ranks_per_node: int = 8
    fill_cache: bool = False


def job_of(config: Config, spec: ModelSpec, world: int, assumptions: Assumptions, **changes: Any) -> Job:
    """The job of some settings, on `world` trainer ranks.

    Args:
        changes: fields of the job that do not follow from the settings.
    """
    trainer = trainer_topology(config.parallel, world, transformer_engine=config.train.device != "cpu")
    trainer = replace(trainer, mtp=config.train.builds_mtp and spec.mtp_layers > 0)
    job = Job(Path(config.model.path).name, config, spec, trainer, engine_topology(config), assumptions)
    return replace(job, **changes)


@dataclass(frozen=True)
class Sync:
    """A weight update.

    Attributes:
        max_bytes_per_source, max_bytes_per_destination: of the busiest trainer and engine rank.
        floor_s: the larger of the two at the stated bandwidth; no transfer of these bytes is faster.
        plan_s: seconds that planning took here.
    """

    bytes_total: int
    bytes_minimum: int
    ratio: float
    max_bytes_per_source: int
    max_bytes_per_destination: int
    floor_s: float
    buckets: int
    plan_s: float


@dataclass(frozen=True)
class Estimate:
    """Attributes:
    stages: bytes by part of one rank of each pipeline stage; `worst` is the stage that needs most.
    engine: bytes by part of one engine rank.
    kv_tokens: planned cache of one engine; `kv_capacity` is what would fit.
    tokens_per_s: response tokens of the whole job, as bound: the slower pool alone where generation may run ahead, both in turn
        otherwise, and the update's floor.
    """

    job: Job
    stages: list[dict[str, int]]
    worst: int
    engine: dict[str, int]
    kv_tokens: int
    kv_capacity: int
    generation: Generation
    rollout_s: float
    training: TrainingTime
    sync: Sync
    summary: Summary
    tokens_per_s: float


def estimate(job: Job) -> Estimate:
    """Count, plan and bound.

    Raises:
        ConfigError: sizes that cannot be, or ranks that do not fit their GPUs, each with the nearest choice that would do.
        ReshardError: what else the transfer plan refuses.
    """
    kinds = wire_kinds(job.spec, job.engine)
    check_sizes(job, kinds)
    training = training_of(job.config, job.assumptions)
    stages = stage_memory(job.spec, job.trainer, training)
    engine, tokens, capacity = plan_engine(job, kinds, job.engine)
    problems = [*_trainer_too_large(job, stages), *_engine_too_large(job, kinds, engine, capacity)]
    if problems:
        raise ConfigError(problems)
    rate, rollout_s = generation_of(job, kinds, job.engine, tokens)
    time_of = training_time(job.spec, job.trainer, training, job.assumptions, passes(job.config))
    sync, summary = plan_sync(job)
    return Estimate(
        job=job,
        stages=stages,
        worst=worst_stage(stages),
        engine=engine,
        kv_tokens=tokens,
        kv_capacity=capacity,
        generation=rate,
        rollout_s=rollout_s,
        training=time_of,
        sync=sync,
        summary=summary,
        tokens_per_s=response_tokens(job) / step_s(job.config, rollout_s, time_of.step_s, sync.floor_s),
    )


def response_tokens(job: Job) -> float:
    """Of one step, at the mean length."""
    return job.config.rollout.prompts_per_step * job.config.rollout.group_size * job.assumptions.response_tokens


def step_s(config: Config, rollout_s: float, training_s: float, floor_s: float) -> float:
    """Bound of one step: both pools at once where a lag lets them, otherwise one after the other; then the update."""
    return (max(rollout_s, training_s) if config.buffer.max_lag else rollout_s + training_s) + floor_s


def check_sizes(job: Job, kinds: tuple[Kind, ...]) -> None:
    """
    Raises:
        ConfigError: sizes that the model or the number of ranks does not allow, and the nearest that are legal.
    """
    problems = [f"trainer: {problem}" for problem in fit.trainer_problems(job.spec, job.trainer)]
    if problems:
        problems.append("nearest legal sizes of the trainer: " + _or_none(fit.nearest_trainer(job.spec, job.trainer)))
    wrong = [f"engines: {problem}" for problem in fit.engine_problems(job.spec, kinds, job.engine)]
    if wrong:
        wrong.append("nearest legal sizes of the engines: " + _or_none(fit.nearest_engine(job.spec, kinds, job.engine)))
    blocks = [f"fp8: {problem}" for problem in fit.block_problems(kinds, job.trainer, job.engine)]
    if problems or wrong or blocks:
        raise ConfigError(problems + wrong + blocks)


def warnings(job: Job) -> list[str]:
    """What a plan allows, but moerl does not run."""
    if job.engine.tp <= job.ranks_per_node:
        return []
    return [
        f"an engine runs on one machine, and engine.tp = {job.engine.tp} is more than the {job.ranks_per_node} GPUs of one "
        "(--ranks-per-node): this can be planned, not run"
    ]


def plan_engine(job: Job, kinds: tuple[Kind, ...], topology: EngineTopology) -> tuple[dict[str, int], int, int]:
    """(bytes of one engine rank by part, planned tokens of cache, tokens that would fit)."""
    weights, each = engine_weights(kinds, topology), token_bytes(job, topology)
    bucket, most = int(job.config.sync.bucket_mib * 2**20), job.config.engine.max_total_tokens
    capacity = kv_capacity(engine_memory(job.spec, weights, each, 0, bucket), each, job.assumptions.budget)
    tokens = min(int(job.config.engine.max_running_requests * _mean(job)), capacity) if job.fill_cache else most
    return engine_memory(job.spec, weights, each, tokens, bucket), tokens, capacity


def token_bytes(job: Job, topology: EngineTopology) -> int:
    """Bytes of KV cache per token on one engine rank."""
    return kv_token_bytes(shape_of(job.spec), job.spec.layers, topology.tp // topology.attention_dp, kv_itemsize(job.config))


def generation_of(job: Job, kinds: tuple[Kind, ...], topology: EngineTopology, tokens: int) -> tuple[Generation, float]:
    """(bound of one engine, seconds in which all engines generate one step's samples): as many sequences at once as the cache, the
    engine's limit, and the samples that may be under way, allow.
    """
    rollout = job.config.rollout
    under_way = rollout.prompts_per_step * rollout.group_size * (1 + job.config.buffer.max_lag)
    batch = min(int(tokens / _mean(job)), job.config.engine.max_running_requests, max(under_way // topology.count, 1))
    weights, each = engine_weights(kinds, topology), token_bytes(job, topology)
    found = generation(job.spec, weights, each, topology.tp, max(batch, 1), job.assumptions, rollout.group_size)
    return found, response_tokens(job) / (found.tokens_per_s * topology.count)


def plan_sync(job: Job) -> tuple[Sync, Summary]:
    """Plan the transfer of all weights, and say what it costs."""
    start = time.perf_counter()
    plan: Plan = make_plan(
        job.spec,
        job.trainer,
        job.engine,
        bucket_bytes=job.config.sync.bucket_bytes,
        ranks_per_node=job.ranks_per_node,
    )
    spent, summary, pairs = time.perf_counter() - start, plan.summary(), pair_bytes(plan)
    out, into = int(pairs.sum(axis=1).max()), int(pairs.sum(axis=0).max())
    sync = Sync(
        bytes_total=summary.nbytes,
        bytes_minimum=plan.minimum_bytes,
        ratio=summary.bytes_ratio,
        max_bytes_per_source=out,
        max_bytes_per_destination=into,
        floor_s=max(out, into) * 8 / (job.assumptions.gbps_per_rank * 1e9),
        buckets=summary.buckets,
        plan_s=round(spent, 3),
    )
    return sync, summary


def _mean(job: Job) -> float:
    return job.assumptions.prompt_tokens + job.assumptions.response_tokens


def _trainer_too_large(job: Job, stages: list[dict[str, int]]) -> list[str]:
    assume, worst = job.assumptions, worst_stage(stages)
    if sum(stages[worst].values()) <= assume.budget:
        return []
    who = f"trainer: rank {worst * job.trainer.per_stage} (of stage {worst} of {job.trainer.pp})"
    text = fit.too_large(who, stages[worst], assume.gpu_gib, assume.reserve_gib)
    return [f"{text}; nearest that fits: {_or_none(nearest_that_fits(job))}"]


def nearest_that_fits(job: Job) -> str | None:
    """In words: other sizes, full recomputation, or more ranks; the first of them that fits."""
    training = training_of(job.config, job.assumptions)
    full = replace(training, granularity="full", block=1)
    for ranks in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64):
        world = int(job.trainer.world * ranks)
        for setting, note in ((training, ""), (full, " with megatron.recompute_granularity = 'full'")):
            found = fit.nearest_trainer(job.spec, replace(job.trainer, world=world), _fits(job, setting), tries=60)
            if found:
                return fit.words(found) + note
    return None


def _fits(job: Job, training: Training) -> Callable[[TrainerTopology], bool]:
    return lambda topology: all(sum(parts.values()) <= job.assumptions.budget for parts in stage_memory(job.spec, topology, training))


def _engine_too_large(job: Job, kinds: tuple[Kind, ...], parts: dict[str, int], capacity: int) -> list[str]:
    assume, longest = job.assumptions, int(_mean(job))
    enough = capacity >= longest
    if sum(parts.values()) <= assume.budget and enough:
        return []
    text = fit.too_large("engines: a rank", parts, assume.gpu_gib, assume.reserve_gib)
    if enough:
        return [f"{text}; nearest that fits: engine.max_total_tokens {capacity}"]

    def roomy(topology: EngineTopology) -> bool:
        return plan_engine(job, kinds, topology)[2] >= longest

    nearest = fit.nearest_engine(job.spec, kinds, job.engine, roomy)
    return [f"{text}, with room for {capacity} tokens of cache; nearest that fits: {_or_none(nearest)}"]


def _or_none(found: TrainerTopology | EngineTopology | str | None) -> str:
    return "none" if found is None else found if isinstance(found, str) else fit.words(found)


def as_dict(found: Estimate) -> dict[str, Any]:
    """What `--json` prints."""
    job, spec = found.job, found.job.spec
    return {
        "job": job.name,
        "family": spec.family,
        "parameters": spec.parameter_count(),
        "tensors": spec.tensor_count(),
        "parameters_with_mtp": spec.parameter_count(mtp=True),
        "tensors_with_mtp": spec.tensor_count(mtp=True),
        "active_parameters": active_parameters(spec),
        "trainer": {"ranks": job.trainer.world} | {name: getattr(job.trainer, name) for name in fit.SIZES},
        "engine": {"engines": job.engine.count, "tp": job.engine.tp, "ep": job.engine.ep, "fp8": job.engine.fp8_block is not None},
        "memory_per_rank": {
            "trainer": _rank(found.stages[found.worst], job.assumptions)
            | {"stage": found.worst, "rank": found.worst * job.trainer.per_stage},
            "trainer_stages_gib": [round(sum(parts.values()) / GIB + job.assumptions.reserve_gib, 2) for parts in found.stages],
            "engine": _rank(found.engine, job.assumptions) | {"kv_tokens": found.kv_tokens, "kv_tokens_that_fit": found.kv_capacity},
        },
        "sync": asdict(found.sync)
        | {
            name: getattr(found.summary, name)
            for name in ("senders", "receivers", "pairs", "pair_bytes_max", "pair_bytes_mean", "same_node_share", "steps")
        },
        "bounds": {
            "generation": asdict(found.generation) | {"step_s": found.generation.step_s, "rollout_s": found.rollout_s},
            "training": asdict(found.training),
            "tokens_per_s": found.tokens_per_s,
            "tokens_per_s_per_gpu": found.tokens_per_s / (job.trainer.world + job.engine.world),
        },
        "assumptions": asdict(job.assumptions),
        "warnings": warnings(job),
    }


def _rank(parts: dict[str, int], assume: Assumptions) -> dict[str, Any]:
    total = sum(parts.values()) / GIB + assume.reserve_gib
    return {"bytes": parts, "reserve_gib": assume.reserve_gib, "total_gib": round(total, 2), "gpu_gib": assume.gpu_gib}
