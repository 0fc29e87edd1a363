"""Rules on the trainer's ranks: how many there are, how they are split, how long they wait for one another."""

from collections.abc import Iterator
from math import prod

from moerl.config.rule import Check, Problem

_WORLD = ("parallel.nodes", "parallel.nproc_per_node")


def launched(check: Check) -> Iterator[Problem]:
    """A launcher has its own numbers of machines and of ranks on each, which nothing else compares with the settings."""
    sizes = check.config.parallel
    if check.started is not None and check.started != sizes.world:
        yield Problem(
            _WORLD,
            f"parallel: the launcher has started {check.started} trainer ranks (WORLD_SIZE), expected parallel.nodes {sizes.nodes} x "
            f"parallel.nproc_per_node {sizes.nproc_per_node} = {sizes.world}; change these, or torchrun's --nnodes and --nproc-per-node",
        )


def parallel_sizes(check: Check) -> Iterator[Problem]:
    sizes = check.config.parallel
    for names in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
        values = [getattr(sizes, name) for name in names]
        if check.world % prod(values):
            factors = " x ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            yield Problem(
                (*_WORLD, *(f"parallel.{name}" for name in names)),
                f"parallel: {check.world} trainer ranks cannot be split into groups of {factors} = {prod(values)}; the number of ranks "
                "must be a multiple of that product (set parallel.nodes and parallel.nproc_per_node, or smaller sizes)",
            )
    if sizes.vpp > 1 and sizes.pp == 1:
        yield Problem(
            ("parallel.vpp", "parallel.pp"), f"parallel.vpp {sizes.vpp} needs pipeline stages: set parallel.pp above 1, or vpp to 1"
        )


def waits(check: Check) -> Iterator[Problem]:
    """Trainer ranks wait in a collective while rank 0 generates, and restarts an engine if it must."""
    config, attempts = check.config, len(check.config.sync.ladder)
    parts = {
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "engine.start_timeout_s": config.engine.start_timeout_s,
        "sync.timeout_s": config.sync.timeout_s,
    }
    total = sum(parts.values()) + (attempts - 1) * config.sync.timeout_s
    if check.world > 1 and config.parallel.timeout_s <= total:
        shown = " + ".join(f"{name} {value:g}" for name, value in parts.items()) + (f" x {attempts} attempts" if attempts > 1 else "")
        yield Problem(
            ("parallel.timeout_s", *parts),
            f"parallel.timeout_s {config.parallel.timeout_s:g} would end the other ranks' wait while rank 0 may still be busy: it must be "
            f"more than {shown} = {total:g}",
        )
