"""Packed passes through the model under every parallelism: log-probabilities, losses, gradients.

    [Part] --to the device, all at once--> LocalMicrobatch --Megatron's schedule--> TokenOutputs --loss_fn--> sums

Each rank brings its own parts of its data-parallel replica's microbatches, and gets the outputs of its own rows back. Which experts
run is not this module's business: passes are made within `replay.forced(...)` or `replay.recorded(...)`, or by themselves. The
vocabulary is never gathered: log-probability and entropy are computed from tensor-parallel shards of the logits. Every pass, the
reference's too, gives the log-probability of a label within the tokens that the engine kept where it sampled it, if it kept only some:
policies are compared on one support. Entropy is that of the whole vocabulary: it is what may bring a token back that was cut off.

Invariants: gradients are those of (sum of all loss sums) / (sum of all token counts) over every microbatch of every
data-parallel rank; gradient buffers are cleared at the start of a pass; outputs are the same on all tensor-parallel ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moerl.errors import TrainError
from moerl.routing.chooser import Routes
from moerl.train.batch import Part
from moerl.train.megatron import Ranks, unwrap
from moerl.train.vocabulary import logprob_and_entropy, logprobs_within

if TYPE_CHECKING:
    from moerl.train.layers import Packing


@dataclass(frozen=True)
class TokenOutputs:
    """Attributes:
    logprobs: float32[n_local] of each row's label under the temperature-scaled distribution over the tokens that the engine kept.
    entropy: float32[n_local] of the temperature-scaled distribution over the whole vocabulary, in nats.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class LocalMicrobatch:
    """The rows of a microbatch that this rank works on, as tensors on its device.

    Attributes:
        tokens, labels, positions: int64[n_local].
        loss_mask: float32[n_local].
        columns: float32[n_local] by name.
        packing: what attention and rotary embedding need.
        real: bool[n_router] in router order, False at padding.
        routes: of this rank's layers and router rows, or None.
        kept: (ids int64[m], offsets int64[n_local + 1]) of the sampling mask, a row without ids being unrestricted; None: all rows are.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    packing: "Packing"
    real: torch.Tensor
    routes: Routes | None
    kept: tuple[torch.Tensor, torch.Tensor] | None

    def with_column(self, name: str, column: torch.Tensor) -> "LocalMicrobatch":
        """With one more float32[n_local] column."""
        return replace(self, columns={**self.columns, name: column})


LossFunction = Callable[[TokenOutputs, LocalMicrobatch], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(outputs, rows) -> (sum of losses with gradient, number of tokens, metrics as sums); all scalars of this rank's rows."""


def localise(parts: Sequence[Part], ranks: Ranks) -> list[LocalMicrobatch]:
    """Copy this rank's parts of a step's microbatches to its device, ahead of their use.

    Raises:
        TrainError: microbatches that the schedule can't run, or other numbers of them on other ranks.
    """
    count = torch.tensor([len(parts), -len(parts)])
    if ranks.world > 1:
        count = count.to(ranks.torch_device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    if int(count[0]) != -int(count[1]):
        raise TrainError(f"all data-parallel ranks must bring equally many microbatches, got {-int(count[1])} to {int(count[0])}")
    unit = ranks.microbatch_multiple
    if len(parts) == 0 or len(parts) % unit:
        raise TrainError(f"the number of microbatches must be a positive multiple of {unit} here, got {len(parts)}")
    if ranks.pp[1] > 1 and len(sizes := {len(part.tokens) for part in parts}) > 1:
        raise TrainError(f"pipeline stages exchange rows of one shape only, got microbatches of {sorted(sizes)} rows; equalise them first")
    return [_localise(part, number, ranks) for number, part in enumerate(parts)]


def _localise(part: Part, number: int, ranks: Ranks) -> LocalMicrobatch:
    from moerl.train.layers import pack

    device = ranks.torch_device

    def put(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    real = put(part.router_real)
    forced = None if part.forced is None else put(part.forced)
    mask = part.sampling_mask
    return LocalMicrobatch(
        tokens=put(part.tokens),
        labels=put(part.labels),
        positions=put(part.positions),
        loss_mask=put(part.loss_mask),
        columns={name: put(column) for name, column in part.columns.items()},
        packing=pack(part.cu_seqlens, rank=ranks.cp[0], size=ranks.cp[1], microbatch=number, device=device),
        real=real,
        routes=None if part.routes is None else Routes(put(part.routes), real, forced),
        kept=None if mask is None else (put(mask.ids.astype(np.int64)), put(mask.offsets)),
    )


def forward_backward(
    model: list[torch.nn.Module],
    local: Sequence[LocalMicrobatch],
    ranks: Ranks,
    *,
    loss_fn: LossFunction,
    temperature: float,
    fp32_head: bool,
) -> list[dict[str, torch.Tensor]]:
    """Forward and backward over all microbatches; gradients end up finalised in the model's buffers, ready for the optimizer.

    Returns:
        The metrics of each microbatch on the last pipeline stage (sums over this context-parallel rank's rows); empty elsewhere.
    """
    for chunk in model:
        chunk.zero_grad_buffer()

    def finish(rows: LocalMicrobatch, outputs: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, tokens, metrics = loss_fn(outputs, rows)
        return loss, tokens.to(torch.int), {name: value.detach() for name, value in metrics.items()}

    return _run(model, local, finish, ranks, temperature=temperature, fp32_head=fp32_head, forward_only=False)


def compute_logprobs(
    model: list[torch.nn.Module], local: Sequence[LocalMicrobatch], ranks: Ranks, *, temperature: float, fp32_head: bool
) -> list[torch.Tensor]:
    """Log-probabilities without gradients: float32[n_local] per microbatch on the last pipeline stage; empty elsewhere."""

    def finish(rows: LocalMicrobatch, outputs: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        zero = outputs.logprobs.new_zeros(())
        return zero, zero.to(torch.int), {"logprobs": outputs.logprobs.clone()}  # the schedule may free the output

    with torch.no_grad():
        found = _run(model, local, finish, ranks, temperature=temperature, fp32_head=fp32_head, forward_only=True)
    return [one["logprobs"] for one in found]


def sum_over_context(values: torch.Tensor) -> torch.Tensor:
    """Added up over the context-parallel ranks, which hold the pieces of the same sequences; not differentiated."""
    from megatron.core import parallel_state

    group, total = parallel_state.get_context_parallel_group(), values.detach().clone()
    if group.size() > 1:
        torch.distributed.all_reduce(total, group=group)
    return total


def _run(
    model: list[torch.nn.Module],
    local: Sequence[LocalMicrobatch],
    finish: Callable[[LocalMicrobatch, TokenOutputs], Any],
    ranks: Ranks,
    *,
    temperature: float,
    fp32_head: bool,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if len(model) != ranks.vpp:
        raise TrainError(f"expected {ranks.vpp} model chunks, got {len(model)}")

    def step(
        rows_iterator: Iterator[LocalMicrobatch], chunk: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        rows = next(rows_iterator)
        call = chunk.build_schedule_plan if return_schedule_plan else chunk  # with a plan, the schedule runs the layers' parts itself
        output = call(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            attention_mask=None,
            packed_seq_params=rows.packing,
            output_processor=partial(_head, labels_of=rows, temperature=temperature, fp32=fp32_head, vocab=_valid_vocabulary(chunk)),
        )
        return output, lambda head: finish(rows, TokenOutputs(*head))

    iterators = [iter(local) for _ in model]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(local),
        seq_length=max(len(rows.tokens) for rows in local) * ranks.cp[1],  # Megatron divides it by cp, and by tp
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _valid_vocabulary(chunk: torch.nn.Module) -> int:
    return unwrap(chunk).moerl_vocab_size


def _head(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, labels_of: LocalMicrobatch, temperature: float,
    fp32: bool, vocab: int, config: Any, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Language-model head on the last stage, in place of Megatron's logits.

    Returns:
        float32[2, n_local]: the fields of `TokenOutputs` as one tensor, the only thing that every schedule can send a gradient to.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

    group = parallel_state.get_tensor_model_parallel_group()
    if fp32:
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        logits = hidden.squeeze(1).float() @ weight.float().t()
    else:
        logits = output_layer(hidden_states, weight=output_weight)[0].squeeze(1).float()
    logits = logits / temperature
    logprobs, entropy = logprob_and_entropy(logits, labels_of.labels, vocab, group)
    if labels_of.kept is not None:
        logprobs = logprobs_within(*labels_of.kept, logits, labels_of.labels, logprobs, group)
    return torch.stack([logprobs, entropy])
