"""Megatron's real model of any rank of any job, on the meta device: no weights, no other processes, no GPU.

    rank, world --fake_world--> Ranks --build_model, on_meta--> chunks --hold--> Holding

torch's process group "fake" lets this process be rank r of n: Megatron makes its groups and reads its place and sizes from
them as ever, and whatever is sent through them goes nowhere. Only one rank exists at a time, and nothing of it stays.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moerl.config.schema import Config
from moerl.errors import ConfigError, TrainError
from moerl.models import ModelSpec
from moerl.plan.holdings import Holding
from moerl.plan.trainer import Elements
from moerl.train import megatron, platform, weights

_META = torch.device("meta")
_WITHOUT_WEIGHTS = {"perform_initialization": False, "init_model_with_meta_device": True}


@contextmanager
def fake_world(config: Config, rank: int, world: int) -> Iterator[megatron.Ranks]:
    """Be trainer rank `rank` of `world`, alone.

    Raises:
        ConfigError: the world size does not factor. TrainError: this process has joined a process group.
    """
    if torch.distributed.is_initialized():
        raise TrainError("this process has joined a process group and cannot be another rank; leave it, or use another process")
    device = platform.pick_device("auto")
    platform.quiet()
    platform.install(device)
    megatron.check_world(config.parallel, world)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with torch.random.fork_rng(devices=[]):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield megatron.make_groups(device, config.parallel, config.run.seed, gloo=False)
        finally:
            megatron.shutdown()


class _OnMeta(TorchFunctionMode):
    """Replaces every device that is named; `with torch.device(...)` only fills in where none is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = {name: _META if name == "device" and value is not None else value for name, value in (kwargs or {}).items()}
        return func(*(_META if isinstance(value, torch.device) else value for value in args), **named)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within, tensors are made and moved without memory, wherever the code asks for them."""
    with _META, _OnMeta():
        yield


def build_rank(spec: ModelSpec, config: Config, rank: int, world: int) -> Holding:
    """Build the model of one rank and say what it holds.

    Raises:
        ConfigError: Megatron refuses the settings. ModelError: it builds parameters that the model's family does not describe.
    """
    bare = config.model_copy(update={"megatron": config.megatron | _WITHOUT_WEIGHTS})
    with fake_world(config, rank, world) as ranks:
        try:
            with on_meta():
                chunks = megatron.build_model(spec, bare, ranks, trainable=False, mtp=config.train.builds_mtp)
        except ConfigError:
            raise
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"Megatron does not build the model of rank {rank} of {world}: {error}") from error
        return hold(chunks, spec, ranks)


def hold(chunks: list[torch.nn.Module], spec: ModelSpec, ranks: megatron.Ranks) -> Holding:
    """What the model of this rank holds."""
    placed = weights.placed(chunks, spec, ranks)
    parameters = [item for item in placed if isinstance(item.tensor, torch.nn.Parameter)]
    expert = sum(item.tensor.numel() for item in parameters if item.entry.param.expert)
    buffers = [tensor for chunk in chunks for tensor in megatron.unwrap(chunk).buffers() if tensor.dim()]
    return Holding(
        rank=ranks.rank,
        transformer_engine=chunks[0].config.transformer_impl == "transformer_engine",
        layers=tuple(len(megatron.unwrap(chunk).decoder.layers) for chunk in chunks),
        shapes={shard.entry.megatron: tuple(shard.tensor.shape) for shard in weights.shards_of(placed, spec)},
        elements=Elements(sum(item.tensor.numel() for item in parameters) - expert, expert, sum(tensor.numel() for tensor in buffers)),
        nbytes=sum(tensor.nbytes for tensor in (*(item.tensor for item in parameters), *buffers)),
    )
