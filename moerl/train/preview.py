"""What `moerl train --dry-run` can show without a process group, a GPU or weights: the real settings of everything that would run.

    Config + ModelSpec --Megatron's configuration class, the transfer plan, both command lines--> lines of text

Megatron's configuration is built as a rank would build it, so what it refuses is refused here.
"""

import shlex
from collections.abc import Sequence

from moerl.config.schema import Config
from moerl.models import ModelSpec
from moerl.plan.assumptions import assumptions_of
from moerl.plan.estimate import Job, job_of, plan_sync, warnings
from moerl.rollout.server import command_line, resolve_device
from moerl.train import platform

MACHINE = 8
"""Ranks of one machine, where there are more than one machine holds."""


def preview(config: Config, spec: ModelSpec, argv: Sequence[str]) -> list[str]:
    """Process groups, Megatron's configuration, the weight update, and the command line of each process.

    Args:
        argv: the arguments of `moerl train`.

    Raises:
        ConfigError: Megatron refuses the settings. ReshardError: the weights of these topologies cannot be transferred.
    """
    world = config.parallel.nproc_per_node
    job = job_of(config, spec, world, assumptions_of({}, config))
    sync, summary = plan_sync(job)
    device, model = resolve_device(config.engine.device), config.engine.model_path or config.model.path
    engine = command_line(model, config.engine, config.sglang, device=device, port=0, version=0, seed=config.run.seed)
    return [
        *megatron_lines(config, spec, job),
        f"sync     {sync.bytes_total / 1e9:.3f} GB, {sync.ratio:.3f} of the minimum, {sync.buckets} buckets, {summary.pairs} pairs; "
        f"busiest trainer rank {sync.max_bytes_per_source / 1e9:.3f} GB, engine rank {sync.max_bytes_per_destination / 1e9:.3f} GB",
        *(f"warning  {text}" for text in warnings(job)),
        f"start    {shlex.join(trainer_command(world, argv))}",
        f"engine   python -m sglang.launch_server {shlex.join(engine)}  (on a free port, seed + its number)",
    ]


def trainer_command(world: int, argv: Sequence[str]) -> list[str]:
    """torchrun for the trainer: on this machine, or on every one of several, of which HOST is number 0."""
    machines = -(-world // MACHINE)
    meet = [f"--nnodes={machines}", "--node-rank=NUMBER", "--master-addr=HOST", "--master-port=PORT"]
    where = meet if machines > 1 else ["--standalone"]
    given = [word for word in argv if word != "--dry-run"]
    return ["torchrun", *where, f"--nproc-per-node={world // machines}", "-m", "moerl.train", *given]


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
