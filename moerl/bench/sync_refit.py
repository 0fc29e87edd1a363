"""Megatron's own refit between models in different processes, for comparison: `megatron.core.resharding`, unchanged, over gloo.

Two things are needed to call it here, and neither is on the path of a byte:

- *names*: its planner follows an expert to another expert-parallel layout only by the names of Transformer Engine's grouped experts
  (`linear_fc1.weight3`). Without Transformer Engine experts are called otherwise (`local_experts.3.linear_fc1.weight`); `GroupedNames`
  shows a model under the names it would have with it.
- *a group* of ranks of different worlds, which Megatron allows and torch makes by private functions only.

Its gloo service stages messages in buffers of their own, one message per parameter and part, as it does on GPUs.
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_LOCAL = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class GroupedNames(torch.nn.Module):
    """A Megatron model whose experts go by the names of grouped ones; its tensors are the live ones."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.config, self.pg_collection = model.config, model.pg_collection
        self._shown = (model,)  # in a tuple, so that it is no submodule

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._shown[0].named_parameters(*args, **kwargs):
            yield grouped(name), parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return self._shown[0].named_modules(*args, **kwargs)


def grouped(name: str) -> str:
    """`….experts.local_experts.3.linear_fc1.weight` -> `….experts.linear_fc1.weight3`; others are as they were."""
    return _LOCAL.sub(r"\2.weight\1", name)


class Refit:
    """One rank's part of the refit.

    Args:
        model: of this rank.
        store: shared by all ranks of source and destination.
        rank, world: among them.
        sources: ranks that send, the first ones; the others receive.

    Attributes:
        sent_nbytes: so far, to other ranks.
    """

    def __init__(self, model: torch.nn.Module, store: dist.Store, rank: int, world: int, sources: int, timeout_s: float):
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

        refit = self

        class Counting(GlooCopyService):
            def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
                refit.sent_nbytes += src_tensor.nbytes
                super().submit_send(src_tensor, dest_rank, task_id)

        self.sent_nbytes = 0
        self._group = _group_across_worlds(store, rank, world, timeout_s)
        shown = [GroupedNames(model)]
        self._models = (shown, None) if rank < sources else (None, shown)
        self._sources, self._service = sources, Counting(self._group)

    def run(self) -> None:
        """Copy all weights; collective over source and destination. The first call plans."""
        from megatron.core.resharding.refit import swap_model_weights

        swap_model_weights(*self._models, self._service, group=self._group, src_rank_offset=0, dst_rank_offset=self._sources)


def _group_across_worlds(store: dist.Store, rank: int, world: int, timeout_s: float) -> dist.ProcessGroup:
    """A group whose members' default groups are different ones, in torch's registry, where Megatron's calls look it up."""
    group, _ = c10d._new_process_group_helper(
        world, rank, [], dist.Backend("gloo"), dist.PrefixStore("refit", store), group_name="refit", timeout=timedelta(seconds=timeout_s)
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world)}
    return group
