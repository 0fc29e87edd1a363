"""What `moerl train --dry-run` can show without other processes, a GPU or weights: the real settings of everything that would run.

    Config + ModelSpec --Megatron's configuration class, the transfer plan, both command lines--> lines of text
                       --Megatron's model of some ranks, on the meta device, against the plan-->

Configuration and models are built as a rank would build them, so what Megatron refuses is refused here.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moerl.config.schema import Config, Parallel
from moerl.models import ModelSpec
from moerl.plan.assumptions import assumptions_of
from moerl.plan.estimate import Job, job_of, plan_sync, warnings
from moerl.plan.holdings import Holding, check_holdings, spread_of
from moerl.plan.trainer import training_of
from moerl.rollout.server import command_line, resolve_device
from moerl.train import platform


def preview(config: Config, spec: ModelSpec, argv: Sequence[str]) -> list[str]:
    """Process groups, Megatron's configuration, what ranks hold, the weight update, and the command line of each process.

    Args:
        argv: the arguments of `moerl train`.

    Raises:
        ConfigError: Megatron refuses the settings. ReshardError: Megatron builds another model than the plan counts on, or the weights of
            these topologies cannot be transferred.
    """
    job = job_of(config, spec, config.parallel.world, assumptions_of({}, config))
    shown = megatron_lines(config, spec, job)
    job, holdings = build_ranks(job)
    sync, summary = plan_sync(job)
    device, model = resolve_device(config.engine.device), config.engine.model_path or config.model.path
    engine = command_line(model, config.engine, config.sglang, device=device, port=0, version=0, seed=config.run.seed)
    return [
        *shown,
        *holding_lines(job, holdings),
        f"sync     {sync.bytes_total / 1e9:.3f} GB, {sync.ratio:.3f} of the minimum, {sync.buckets} buckets, {summary.pairs} pairs; "
        f"busiest trainer rank {sync.max_bytes_per_source / 1e9:.3f} GB, engine rank {sync.max_bytes_per_destination / 1e9:.3f} GB",
        *(f"warning  {text}" for text in _warnings(job)),
        f"start    {shlex.join(trainer_command(config.parallel, argv))}",
        f"engine   python -m sglang.launch_server {shlex.join(engine)}  (on a free port, seed + its number)",
    ]


def trainer_command(parallel: Parallel, argv: Sequence[str]) -> list[str]:
    """torchrun for the trainer: on this machine, or on every one of several, of which HOST is number 0."""
    meet = [f"--nnodes={parallel.nodes}", "--node-rank=NUMBER", "--master-addr=HOST", "--master-port=PORT"]
    where = meet if parallel.nodes > 1 else ["--standalone"]
    given = [word for word in argv if word != "--dry-run"]
    return ["torchrun", *where, f"--nproc-per-node={parallel.nproc_per_node}", "-m", "moerl.train", *given]


def megatron_lines(config: Config, spec: ModelSpec, job: Job) -> list[str]:
    """Sizes of the process groups, and of Megatron's configuration what decides memory and routes."""
    p, world = config.parallel, job.trainer.world
    dp, edp = world // (p.tp * p.pp * p.cp), world // (p.etp * p.ep * p.pp)
    platform.quiet()
    platform.install(platform.pick_device("auto"))
    from moerl.train.megatron import Ranks, transformer_config

    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "dp": dp, "ep": p.ep, "etp": p.etp, "edp": edp}
    ranks = Ranks(platform.pick_device("auto"), 0, world, **{name: (0, size) for name, size in sizes.items()}, vpp=p.vpp)
    built = transformer_config(spec, config, ranks)
    recompute, parallel = built.recompute_granularity or "none", "on" if built.sequence_parallel else "off"
    return [
        f"groups   {' '.join(f'{name}{size}' for name, size in sizes.items())} vpp{p.vpp}, {world} ranks",
        f"megatron {type(built).__name__}: {built.num_layers} layers, hidden {built.hidden_size}, {built.num_moe_experts} experts, "
        f"dispatcher {built.moe_token_dispatcher_type}, recompute {recompute}, sequence parallel {parallel}",
    ]


def build_ranks(job: Job) -> tuple[Job, list[Holding]]:
    """Build Megatron's model of the first rank of every pipeline stage and of the last rank of all, without weights, and compare.

    Returns:
        The job, with the layers spread over stages as `[megatron]` spreads them where it does; and what the ranks hold.

    Raises:
        ConfigError, ModelError: Megatron refuses the settings, or builds weights that no model of this family has. ReshardError: a rank
            holds something else than the plan says; with every difference.
    """
    from moerl.train.megatron import spreads_layers
    from moerl.train.meta import build_rank

    trainer = job.trainer
    ranks = sorted({*range(0, trainer.world, trainer.per_stage), trainer.world - 1})
    holdings = [build_rank(job.spec, job.config, rank, trainer.world) for rank in ranks]
    if spreads_layers(job.config):
        job = replace(job, trainer=replace(trainer, stages=spread_of(holdings, trainer)))
    built = replace(job.trainer, transformer_engine=holdings[0].transformer_engine)
    check_holdings(job.spec, built, training_of(job.config, job.assumptions).itemsize, holdings)
    return job, holdings


def holding_lines(job: Job, holdings: Sequence[Holding]) -> list[str]:
    """What the ranks hold, one line for each."""
    from moerl.train.layers import has_transformer_engine

    kind = "Transformer Engine's layers" if holdings[0].transformer_engine else "local layers"
    if job.trainer.transformer_engine and not has_transformer_engine():
        kind += ", as Transformer Engine is absent here, against the plan for those"
    pp, per_stage = job.trainer.pp, job.trainer.per_stage
    return [
        f"weights  shapes and sizes as planned on {len(holdings)} ranks, built on the meta device ({kind})",
        *(
            f"rank     {each.rank}: stage {each.rank // per_stage} of {pp}, {sum(each.layers)} layers, {each.parameters:,} parameters, "
            f"{each.nbytes / 1e9:.3f} GB of weights"
            for each in holdings
        ),
    ]


def _warnings(job: Job) -> list[str]:
    config = job.config
    found, served = warnings(job), config.engine.model_path
    if served and not (Path(served) / "config.json").is_file():
        found.append(
            f"engine.model_path {served} has no config.json here, which says in what precision engines serve: "
            f"the update is counted in {config.engine.dtype}"
        )
    return found
