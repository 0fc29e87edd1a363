"""Checkpoints: Megatron's distributed format plus `state.json`, published by one rename.

    checkpoints/.writing-step-000010/   every rank writes its shards        --rename-->  checkpoints/step-000010/
        *.distcp, common.pt, metadata.json      model, optimizer, RNG
        state.json                              step, weight version, data position, the settings that matter

A folder named `step-*` is complete by construction. Whether a config may continue it is `progress.find`'s to say.
"""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moerl.config.schema import Config
from moerl.convert.carry import same_model
from moerl.errors import CheckpointError
from moerl.models import ModelSpec
from moerl.train.megatron import unwrap
from moerl.train.progress import Progress, available, rank_layout, settings_that_matter

log = logging.getLogger(__name__)

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: Path, progress: Progress, model: list[torch.nn.Module], optimizer: Any, config: Config, spec: ModelSpec) -> Path:
    """Write and publish the checkpoint of `progress` under `folder`; collective. Older ones beyond `checkpoint.keep` are removed.

    Returns:
        The published folder.
    """
    final = folder / f"step-{progress.step:06d}"
    writing = folder / f".writing-{final.name}"
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state_dict(model, optimizer, loading=False), writing, validate_access_integrity=True)
    if dist.get_rank() == 0:
        state = {
            "progress": asdict(progress),
            "settings": settings_that_matter(config, spec),
            "ranks": rank_layout(config, dist.get_world_size()),
        }
        (writing / "state.json").write_text(json.dumps(state, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        for old in available(folder)[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    log.info("checkpoint %s", final)
    return final


def load(checkpoint: Path, model: list[torch.nn.Module], optimizer: Any, *, same_layout: bool) -> None:
    """Load a published checkpoint into a freshly built model and optimizer; collective. `same_layout`: restore RNG states too."""
    inner = _inner_optimizers(optimizer)
    for one in inner:
        _allocate_state(one)
    with _torch_adam_step():
        state = dist_checkpointing.load(_state_dict(model, optimizer, loading=True, rng=same_layout), checkpoint)
        for index, chunk in enumerate(model):
            unwrap(chunk).load_state_dict(state[f"model{index}"])
        optimizer.load_state_dict(state["optimizer"])
    for one in inner:
        for values in one.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                # Megatron hands one step tensor to all parameters; torch's Adam would advance it once per parameter.
                values["step"] = values["step"].clone()
    if same_layout:
        torch.set_rng_state(state["rng"]["cpu"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def load_weights(checkpoint: Path, model: list[torch.nn.Module]) -> None:
    """Load only the weights of a published checkpoint into a freshly built model, whatever layout wrote it; collective."""
    wanted = {f"model{index}": unwrap(chunk).sharded_state_dict(metadata=_METADATA) for index, chunk in enumerate(model)}
    state = dist_checkpointing.load(wanted, checkpoint)
    for index, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(state[f"model{index}"])


def load_policy(checkpoint: Path, model: list[torch.nn.Module], hf: Path) -> None:
    """Load the weights of version 0 from a checkpoint of another program, such as `moerl convert`; collective.

    What Transformer Engine's layers keep besides weights is not asked for, so either kind of layers may have written it.

    Args:
        hf: folder with the model's config.json.

    Raises:
        CheckpointError: it is of another model, or lacks weights; with every field or name.
    """
    same_model(checkpoint, hf)
    if not dist_checkpointing.check_is_distributed_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint} is no Megatron distributed checkpoint; make one with `moerl convert hf-to-megatron`")
    whole = {f"model{index}": unwrap(chunk).sharded_state_dict(metadata=_METADATA) for index, chunk in enumerate(model)}
    wanted = {name: {key: one for key, one in part.items() if not isinstance(one, ShardedObject)} for name, part in whole.items()}
    stored = dist_checkpointing.load_tensors_metadata(checkpoint)
    if missing := sorted({one.key for part in wanted.values() for one in part.values()} - stored.keys()):
        shown = ", ".join(missing[:12]) + (f", … {len(missing) - 12} more" if len(missing) > 12 else "")
        raise CheckpointError(f"{checkpoint} lacks {len(missing)} weights of this rank: {shown}")
    try:
        state = dist_checkpointing.load(wanted, checkpoint)
    except CheckpointingException as error:
        raise CheckpointError(f"{checkpoint} does not fit the model in {hf}: {error}") from error
    for index, chunk in enumerate(model):
        left = unwrap(chunk).load_state_dict(state[f"model{index}"], strict=False)
        if wrong := [name for name in (*left.missing_keys, *left.unexpected_keys) if not name.endswith("_extra_state")]:
            raise CheckpointError(f"{checkpoint}: Megatron did not take {', '.join(wrong)}")


def _state_dict(model: list[torch.nn.Module], optimizer: Any, *, loading: bool, rng: bool = True) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{index}": unwrap(chunk).sharded_state_dict(metadata=_METADATA) for index, chunk in enumerate(model)}
    merged = {name: value for index in range(len(model)) for name, value in state[f"model{index}"].items()} if len(model) == 1 else state
    state["optimizer"] = optimizer.sharded_state_dict(merged, is_loading=loading, metadata=_METADATA)
    if rng:
        states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
        state["rng"] = ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return state


def _inner_optimizers(optimizer: Any) -> list[DistributedOptimizer]:
    chained = optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    return [one for one in chained if isinstance(one, DistributedOptimizer)]


def _allocate_state(one: DistributedOptimizer) -> None:
    """Give torch's Adam its state tensors before the first step, so that loading has somewhere to copy to."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for group in one.optimizer.param_groups:
        for parameter in group["params"]:
            state = one.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


class _torch_adam_step:
    """While loading with torch's Adam: Megatron copies every state tensor by name, but saves no `step` per parameter."""

    def __enter__(self) -> None:
        self.original = original = DistributedOptimizer._set_main_param_and_optimizer_states

        def tolerant(one: DistributedOptimizer, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
            original(one, parameter, {"step": None, **tensors})

        DistributedOptimizer._set_main_param_and_optimizer_states = tolerant

    def __exit__(self, *exc: object) -> None:
        DistributedOptimizer._set_main_param_and_optimizer_states = self.original
