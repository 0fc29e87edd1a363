"""Packed passes through the model under every parallelism: log-probabilities, losses, gradients.

    [Microbatch] --cut to this rank--> LocalMicrobatch --Megatron's schedule--> TokenOutputs --loss_fn--> sums

Each data-parallel rank brings its own microbatches, whole. `localise` cuts the rows that this context-parallel rank holds
(and, for routes, the sequence-parallel chunk that its routers see). The vocabulary is never gathered: log-probability and
entropy are computed from tensor-parallel shards of the logits.

Invariants: gradients are those of (sum of all loss sums) / (sum of all token counts) over every microbatch of every
data-parallel rank; gradient buffers are cleared at the start of a pass; outputs are the same on all tensor-parallel ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moerl.errors import TrainError
from moerl.routing.replay import Natural, RouteReplay
from moerl.train.batch import Microbatch, filler_routes
from moerl.train.megatron import Ranks, unwrap
from moerl.train.vocabulary import logprob_and_entropy

if TYPE_CHECKING:
    from moerl.train.layers import Packing


@dataclass(frozen=True)
class TokenOutputs:
    """Attributes:
    logprobs: float32[n_local] of each row's label under the temperature-scaled distribution.
    entropy: float32[n_local] of that distribution, in nats.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class LocalMicrobatch:
    """The rows of a microbatch that this rank works on, as tensors on its device.

    Attributes:
        tokens, labels, positions: int64[n_local].
        loss_mask: float32[n_local].
        real: bool[n_local].
        columns: float32[n_local] by name.
        packing: what attention and rotary embedding need.
        routes: int64[n_router, layers here, k] in router order, or None.
        router_real: bool[n_router].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    real: torch.Tensor
    columns: dict[str, torch.Tensor]
    packing: "Packing"
    routes: torch.Tensor | None
    router_real: torch.Tensor


LossFunction = Callable[[TokenOutputs, LocalMicrobatch], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(outputs, rows) -> (sum of losses with gradient, number of tokens, metrics as sums); all scalars of this rank's rows."""


def localise(microbatch: Microbatch, number: int, ranks: Ranks, replay: RouteReplay | None = None) -> LocalMicrobatch:
    """Cut one whole microbatch to this rank's rows.

    Args:
        number: of the microbatch within the step.
        replay: cut its routes too, to this rank's layers and router rows.

    Raises:
        TrainError: a sequence cannot be cut evenly, or routes are needed and missing.
    """
    from moerl.train.layers import pack

    lengths = np.diff(microbatch.cu_seqlens)
    if (lengths % ranks.sequence_multiple).any():
        found = sorted({int(length) for length in lengths if length % ranks.sequence_multiple})[:8]
        raise TrainError(f"padded sequence lengths must be multiples of {ranks.sequence_multiple} here, got {found}")
    device = ranks.torch_device
    packing = pack(microbatch.cu_seqlens, rank=ranks.cp[0], size=ranks.cp[1], microbatch=number, device=device)
    rows = packing.local_rows.cpu().numpy()

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(array[rows])).to(device)

    router_rows = rows[ranks.tp[0] * len(rows) // ranks.tp[1] : (ranks.tp[0] + 1) * len(rows) // ranks.tp[1]]
    routes = None
    if replay is not None:
        if microbatch.routes is None:
            raise TrainError(f"microbatch {number} carries no routes, but replay is on; record routes or set train.replay to false")
        routes = torch.as_tensor(microbatch.routes[router_rows][:, list(replay.moe_indices)].astype(np.int64)).to(device)
    return LocalMicrobatch(
        tokens=put(microbatch.tokens),
        labels=put(microbatch.labels),
        positions=put(microbatch.positions),
        loss_mask=put(microbatch.loss_mask),
        real=put(microbatch.real),
        columns={name: put(column) for name, column in microbatch.columns.items()},
        packing=packing,
        routes=routes,
        router_real=torch.as_tensor(microbatch.real[router_rows]).to(device),
    )


def forward_backward(
    model: list[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    ranks: Ranks,
    *,
    loss_fn: LossFunction,
    replay: RouteReplay | None,
    temperature: float,
    fp32_head: bool,
) -> list[dict[str, torch.Tensor]]:
    """Forward and backward over all microbatches; gradients end up finalised in the model's buffers, ready for the optimizer.

    Args:
        microbatches: of this data-parallel rank, the same number on each.
        replay: force the routes that the microbatches carry; None lets the model choose.

    Returns:
        The metrics of each microbatch on the last pipeline stage (sums over this context-parallel rank's rows); empty elsewhere.

    Raises:
        TrainError: microbatches that the schedule can't run.
        ReplayError: routes that were not used exactly once.
    """
    local = _prepare(model, microbatches, ranks, replay)
    for chunk in model:
        chunk.zero_grad_buffer()

    def finish(rows: LocalMicrobatch, outputs: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, tokens, metrics = loss_fn(outputs, rows)
        return loss, tokens.to(torch.int), {name: value.detach() for name, value in metrics.items()}

    with _forced(replay, local):
        return _run(model, local, finish, ranks, temperature=temperature, fp32_head=fp32_head, forward_only=False)


def compute_logprobs(
    model: list[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    ranks: Ranks,
    *,
    temperature: float,
    fp32_head: bool,
    replay: RouteReplay | None = None,
    recorder: RouteReplay | None = None,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Log-probabilities without gradients.

    Args:
        replay: force the routes that the microbatches carry.
        recorder: let the model choose and report what it chose (excludes `replay`).

    Returns:
        Per microbatch (logprobs float32[n], routes int64[n, moe_layer, k] or None): all rows, all MoE layers, the same on
        every rank of this data-parallel replica.

    Raises:
        TrainError, ReplayError: as in `forward_backward`.
    """
    if replay is not None and recorder is not None:
        raise TrainError("a pass either replays routes or records them; give one of replay and recorder")
    local = _prepare(model, microbatches, ranks, replay)

    def finish(rows: LocalMicrobatch, outputs: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        zero = outputs.logprobs.new_zeros(())
        return zero, zero.to(torch.int), {"logprobs": outputs.logprobs}

    recording = recorder.recorded(len(local)) if recorder is not None else contextlib.nullcontext()
    with torch.no_grad(), _forced(replay, local), recording as natural:
        outputs = _run(model, local, finish, ranks, temperature=temperature, fp32_head=fp32_head, forward_only=True)
    answers = []
    for number, (rows, microbatch) in enumerate(zip(local, microbatches, strict=True)):
        logprobs = _assemble_rows(outputs[number]["logprobs"] if ranks.last_stage else None, rows, ranks)
        routes = None if natural is None else _assemble_routes(natural, number, rows, recorder, ranks)[: microbatch.size]
        answers.append((logprobs[: microbatch.size], routes))
    return answers


def _prepare(
    model: list[torch.nn.Module], microbatches: Sequence[Microbatch], ranks: Ranks, replay: RouteReplay | None
) -> list[LocalMicrobatch]:
    """Cut all microbatches, after checking that every rank will run the same schedule."""
    count = torch.tensor([len(microbatches), -len(microbatches)])
    if ranks.world > 1:
        count = count.to(ranks.torch_device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    if int(count[0]) != -int(count[1]):
        raise TrainError(f"all data-parallel ranks must bring equally many microbatches, got {-int(count[1])} to {int(count[0])}")
    if len(microbatches) == 0 or len(microbatches) % ranks.microbatch_multiple:
        unit = ranks.microbatch_multiple
        raise TrainError(f"the number of microbatches must be a positive multiple of {unit} here, got {len(microbatches)}")
    if len(model) != ranks.vpp:
        raise TrainError(f"expected {ranks.vpp} model chunks, got {len(model)}")
    size = max(microbatch.size for microbatch in microbatches) if ranks.pp[1] > 1 else 0
    equal = [_pad(microbatch, size, ranks.sequence_multiple, replay) for microbatch in microbatches]
    return [localise(microbatch, number, ranks, replay) for number, microbatch in enumerate(equal)]


def _pad(microbatch: Microbatch, size: int, multiple: int, replay: RouteReplay | None) -> Microbatch:
    """Append padding sequences up to `size` rows: pipeline stages exchange activations of one shape only."""
    rows = size - microbatch.size
    if rows <= 0:
        return microbatch

    def grown(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.zeros(rows, array.dtype)])

    ends = np.arange(microbatch.size + multiple, size + 1, multiple, dtype=np.int32)
    routes = microbatch.routes
    if routes is not None and replay is not None:
        routes = np.concatenate([routes, filler_routes(rows, replay.layout)])
    return replace(
        microbatch,
        tokens=grown(microbatch.tokens),
        labels=grown(microbatch.labels),
        positions=np.concatenate([microbatch.positions, np.arange(rows) % multiple]),
        cu_seqlens=np.concatenate([microbatch.cu_seqlens, ends]),
        loss_mask=grown(microbatch.loss_mask),
        routes=routes,
        real=grown(microbatch.real),
        columns={name: grown(column) for name, column in microbatch.columns.items()},
    )


def _forced(replay: RouteReplay | None, local: list[LocalMicrobatch]) -> contextlib.AbstractContextManager[Any]:
    if replay is None:
        return contextlib.nullcontext()
    return replay.forced([rows.routes for rows in local], [rows.router_real for rows in local])


def _run(
    model: list[torch.nn.Module],
    local: list[LocalMicrobatch],
    finish: Callable[[LocalMicrobatch, TokenOutputs], Any],
    ranks: Ranks,
    *,
    temperature: float,
    fp32_head: bool,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(rows_iterator: Iterator[LocalMicrobatch], chunk: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows = next(rows_iterator)
        output = chunk(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            attention_mask=None,
            packed_seq_params=rows.packing,
            output_processor=partial(_head, labels_of=rows, temperature=temperature, fp32=fp32_head, vocab=_valid_vocabulary(chunk)),
        )
        return output, partial(finish, rows)

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
) -> TokenOutputs:  # fmt: skip
    """Language-model head on the last stage, in place of Megatron's logits."""
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
    return TokenOutputs(*logprob_and_entropy(logits / temperature, labels_of.labels, vocab, group))


def _assemble_rows(local: torch.Tensor | None, rows: LocalMicrobatch, ranks: Ranks) -> np.ndarray:
    """Logprobs of all rows of the microbatch, from the last stage and all context-parallel ranks, on every rank."""
    from megatron.core import parallel_state

    size = len(rows.tokens)
    mine = local if local is not None else torch.empty(size, dtype=torch.float32, device=ranks.torch_device)
    if ranks.pp[1] > 1:
        mine = mine.contiguous()
        torch.distributed.broadcast(
            mine, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group()
        )
    return _scatter_rows(mine.cpu().numpy(), rows, ranks)


def _scatter_rows(mine: np.ndarray, rows: LocalMicrobatch, ranks: Ranks) -> np.ndarray:
    """[n_local, ...] of this context-parallel rank -> [n, ...] of the whole microbatch."""
    from megatron.core import parallel_state

    placed = rows.packing.local_rows.cpu().numpy()
    if ranks.cp[1] > 1:
        everyone: list[Any] = [None] * ranks.cp[1]
        torch.distributed.all_gather_object(everyone, (placed, mine), group=parallel_state.get_context_parallel_group())
        placed, mine = (np.concatenate(parts) for parts in zip(*everyone, strict=True))
    whole = np.empty_like(mine)
    whole[placed] = mine
    return whole


def _assemble_routes(natural: Natural, number: int, rows: LocalMicrobatch, recorder: RouteReplay, ranks: Ranks) -> np.ndarray:
    """Recorded routes of all rows and all MoE layers, on every rank."""
    from megatron.core import parallel_state

    mine = natural.routes(number).cpu().numpy()
    if ranks.tp[1] > 1:
        chunks: list[Any] = [None] * ranks.tp[1]
        torch.distributed.all_gather_object(chunks, mine, group=parallel_state.get_tensor_model_parallel_group())
        mine = np.concatenate(chunks)
    layers = (recorder.moe_indices, _scatter_rows(mine, rows, ranks))
    everyone: list[Any] = [layers]
    if ranks.pp[1] > 1:
        everyone = [None] * ranks.pp[1]
        torch.distributed.all_gather_object(everyone, layers, group=parallel_state.get_pipeline_model_parallel_group())
    whole = np.empty((layers[1].shape[0], len(recorder.layout.layers), recorder.layout.topk), np.int64)
    for indices, routes in everyone:
        whole[:, list(indices)] = routes
    return whole
