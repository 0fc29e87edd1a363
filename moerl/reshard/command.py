"""`moerl plan @ FILE [SETTINGS] [--world N] [--ranks-per-node N] [--json]`: what a weight update of a cluster moves, without a cluster.

Needs the model's config.json alone, no weights, no GPU and no process.
"""

import msgspec

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.models import read_spec
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.plan import make_plan
from moerl.reshard.trainer_layout import trainer_topology

_COUNTS = ("--world", "--ranks-per-node")


def main(argv: list[str]) -> int:
    """Print the summary of the plan that `argv` asks for; the exit status.

    Raises:
        ConfigError: wrong settings. ReshardError: topologies that do not fit the model.
    """
    counts, as_json, rest = split_options(argv)
    world = counts.get("--world")
    config = load_config(rest, world=world)
    spec = read_spec(config.model.path)
    if problems := model_problems(config, spec):
        raise ConfigError(problems)
    world = world or config.parallel.nproc_per_node
    trainer = trainer_topology(config.parallel, world, transformer_engine=config.train.device != "cpu")
    summary = make_plan(
        spec,
        trainer,
        engine_topology(config),
        bucket_bytes=int(config.sync.bucket_mib * 2**20),
        ranks_per_node=counts.get("--ranks-per-node", 8),
    ).summary()
    print(f"{config.model.path}: {spec.family}, {spec.layers} layers, {spec.experts} experts\n{summary}")
    if as_json:
        print(msgspec.json.encode(summary).decode())
    return 0


def engine_topology(config: Config) -> EngineTopology:
    """How the engines of `[engine]` and `[sglang]` cut the model."""
    engine, native = config.engine, config.sglang
    return EngineTopology(
        count=engine.count,
        tp=engine.tp,
        ep=native.get("ep_size", 1),
        replicated_dense=native.get("moe_dense_tp_size") == 1,
        cpu=engine.device == "cpu",
        dtype=engine.dtype,
    )


def split_options(argv: list[str]) -> tuple[dict[str, int], bool, list[str]]:
    """(given counts by name, whether JSON is asked for, the settings).

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
        elif word != "--json":
            rest.append(word)
    return counts, "--json" in argv, rest
