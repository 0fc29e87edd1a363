"""Packed passes through the model under every parallelism: log-probabilities, losses, gradients.

    [Part] --to the device, all at once--> LocalMicrobatch --Megatron's schedule--> TokenOutputs --loss_fn--> sums

Each rank brings its own parts of its data-parallel replica's microbatches, and gets the outputs of its own rows back. Which experts
run is not this module's business: passes are made within `replay.forced(...)` or `replay.recorded(...)`, or by themselves. The
vocabulary is never gathered: log-probability and entropy are computed from tensor-parallel shards of the logits. Every pass, the
reference's too, gives the log-probability of a label within the tokens that the engine kept where it sampled it, if it kept only some:
policies are compared on one support. Entropy is that of the whole vocabulary: it is what may bring a token back that was cut off.
Only a pass that trains multi-token prediction runs its layer (`mtp`).

Invariants: gradients are those of (sum of all loss sums) / (sum of all token counts) over every microbatch of every data-parallel rank,
those of multi-token prediction excepted, which are its weighted mean loss's; gradient buffers are cleared at the start of a pass; outputs
are the same on all tensor-parallel ranks.
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
    from moerl.train.packing import Packing


@dataclass(frozen=True)
class TokenOutputs:
    """Attributes:
    logprobs: float32[n_local] of each row's label under the temperature-scaled distribution over the tokens that the engine kept.
    entropy: float32[n_local] of the temperature-scaled distribution over the whole vocabulary, in nats.
    ahead: float32[n_local] of the tokens after next (`LocalMicrobatch.ahead`) by multi-token prediction; anything where there is none, and
        None in a pass that doesn't train it.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    ahead: torch.Tensor | None = None


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
        ahead: int64[n_local] the tokens after next that multi-token prediction learns, -1 at rows without; None in a step that trains none.
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
    ahead: torch.Tensor | None = None

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
    from moerl.train.packing import pack

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
        ahead=None if part.ahead is None else put(part.ahead),
    )


def forward_backward(
    model: list[torch.nn.Module],
    local: Sequence[LocalMicrobatch],
    ranks: Ranks,
    *,
    loss_fn: LossFunction,
    temperature: float,
    fp32_head: bool,
    mtp_weight: float = 0.0,
) -> list[dict[str, torch.Tensor]]:
    """Forward and backward over all microbatches; gradients end up finalised in the model's buffers, ready for the optimizer.

    Args:
        mtp_weight: of the loss of multi-token prediction, for which the model has a layer and each microbatch tokens; 0 doesn't run it.

    Returns:
        The metrics of each microbatch on the last pipeline stage (sums over this context-parallel rank's rows); empty elsewhere. With
        `mtp_weight` also mtp_loss, not weighted, and mtp_tokens, which it is a sum over.

    Raises:
        TrainError: microbatches that the schedule can't run, or without tokens for multi-token prediction.
    """
    if mtp_weight and any(rows.ahead is None for rows in local):
        raise TrainError("multi-token prediction has nothing to learn: expected parts that were cut with `ahead`")
    for chunk in model:
        chunk.zero_grad_buffer()
    divisors = []

    def finish(rows: LocalMicrobatch, outputs: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, tokens, metrics = loss_fn(outputs, rows)
        if mtp_weight:
            learned = rows.ahead >= 0
            ahead = -(outputs.ahead * learned).sum()
            loss, metrics = loss + mtp_weight * ahead, {**metrics, "mtp_loss": ahead, "mtp_tokens": learned.sum()}
        divisors.append(tokens.to(torch.int))
        return loss, divisors[-1], {name: value.detach() for name, value in metrics.items()}

    if mtp_weight:
        _prepare_mtp(model)
    ahead = mtp_weight > 0
    results = _run(model, local, finish, ranks, temperature=temperature, fp32_head=fp32_head, forward_only=False, ahead=ahead)
    if ahead and results:
        from moerl.train import mtp

        mtp.rescale(unwrap(model[-1]), torch.stack(divisors).sum(), torch.stack([one["mtp_tokens"] for one in results]).sum())
    return results


def _prepare_mtp(model: list[torch.nn.Module]) -> None:
    from moerl.train import mtp

    mtp.share_embedding(unwrap(model[0]), unwrap(model[-1]))


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
    ahead: bool = False,
) -> list[dict[str, torch.Tensor]]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if len(model) != ranks.vpp:
        raise TrainError(f"expected {ranks.vpp} model chunks, got {len(model)}")

    def step(
        rows_iterator: Iterator[LocalMicrobatch], chunk: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        rows = next(rows_iterator)
        call = chunk.build_schedule_plan if return_schedule_plan else chunk  # with a plan, the schedule runs the layers' parts itself
        head = partial(_head, labels_of=rows, temperature=temperature, fp32=fp32_head, vocab=_valid_vocabulary(chunk))
        output = call(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            attention_mask=None,
            packed_seq_params=rows.packing,
            output_processor=partial(head, ahead_of=unwrap(chunk)) if ahead else head,
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
    fp32: bool, vocab: int, config: Any, ahead_of: Any = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Language-model head on the last stage, in place of Megatron's logits.

    Args:
        ahead_of: the model whose layer for multi-token prediction is run too; None runs none.

    Returns:
        float32[2 or 3, n_local]: the fields of `TokenOutputs` as one tensor, the only thing that every schedule can send a gradient to.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    weight = output_layer.weight if output_weight is None else output_weight
    logits = _logits(hidden_states, output_layer, weight, fp32, config.sequence_parallel, group) / temperature
    logprobs, entropy = logprob_and_entropy(logits, labels_of.labels, vocab, group)
    if labels_of.kept is not None:
        logprobs = logprobs_within(*labels_of.kept, logits, labels_of.labels, logprobs, group)
    if ahead_of is None:
        return torch.stack([logprobs, entropy])
    from moerl.train import mtp

    hidden = mtp.predict(ahead_of, hidden_states, labels_of)
    logits = _logits(hidden, output_layer, weight.detach(), fp32, config.sequence_parallel, group) / temperature
    ahead, _entropy = logprob_and_entropy(logits, labels_of.ahead.clamp(min=0), vocab, group)
    return torch.stack([logprobs, entropy, ahead])


def _logits(hidden: torch.Tensor, output_layer: Any, weight: torch.Tensor, fp32: bool, sequence_parallel: bool, group: Any) -> torch.Tensor:
    """[n_local, 1, hidden], or its sequence-parallel piece -> float32[n_local, vocabulary / tp]"""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

    if not fp32:
        return output_layer(hidden, weight=weight)[0].squeeze(1).float()
    spread = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    return spread(hidden, group=group).squeeze(1).float() @ weight.float().t()
