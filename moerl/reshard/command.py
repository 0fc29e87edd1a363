"""`moerl plan @ FILE [SETTINGS] [--world N] [--ranks-per-node N] [--fp8] [--json]`: what a weight update moves, without a cluster.

Needs the model's config.json alone, no weights, no GPU and no process. `--fp8`: to engines that serve fp8 in blocks of 128 × 128.
"""

from dataclasses import replace

import msgspec

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.errors import ConfigError
from moerl.models import read_spec
from moerl.reshard.plan import make_plan
from moerl.reshard.topology import engine_topology
from moerl.reshard.trainer_layout import trainer_topology

_COUNTS = ("--world", "--ranks-per-node")
_FLAGS = ("--fp8", "--json")


def main(argv: list[str]) -> int:
    """Print the summary of the plan that `argv` asks for; the exit status.

    Raises:
        ConfigError: wrong settings. ReshardError: topologies that do not fit the model.
    """
    counts, flags, rest = split_options(argv)
    world = counts.get("--world")
    config = load_config(rest, world=world)
    spec = read_spec(config.model.path)
    if problems := model_problems(config, spec):
        raise ConfigError(problems)
    world = world or config.parallel.nproc_per_node
    trainer = trainer_topology(config.parallel, world, transformer_engine=config.train.device != "cpu")
    engine = engine_topology(config)
    summary = make_plan(
        spec,
        trainer,
        replace(engine, fp8_block=(128, 128)) if "--fp8" in flags else engine,
        bucket_bytes=int(config.sync.bucket_mib * 2**20),
        ranks_per_node=counts.get("--ranks-per-node", 8),
    ).summary()
    print(f"{config.model.path}: {spec.family}, {spec.layers} layers, {spec.experts} experts\n{summary}")
    if "--json" in flags:
        print(msgspec.json.encode(summary).decode())
    return 0


def split_options(argv: list[str]) -> tuple[dict[str, int], set[str], list[str]]:
    """(given counts by name, flags, the settings).

    Raises:
        ConfigError: a count that is no positive whole number.
    """
    counts, rest, words = {}, [], iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name in _COUNTS:
            value = value or next(words, "")
            if not value.isdecimal() or not int(value):
                raise ConfigError(f"{name} needs a positive whole number, got {value!r}")
            counts[name] = int(value)
        elif word not in _FLAGS:
            rest.append(word)
    return counts, {word for word in argv if word in _FLAGS}, rest
