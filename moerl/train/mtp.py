"""The layer for multi-token prediction in the trainer: built behind the decoder on the last stage, and taught without touching it.

    final hidden state of row i  --detached--+
                                             +--> MTP layer --> the output layer, detached --> logprob of row i + 1's label
    embedding of row i's label   --detached--+

Row i of a packed sequence has token i as input and token i + 1 as label, so that the layer predicts the token after next. Its loss reaches
its own weights only: every other gradient is bit by bit what it is without the layer. Its modules, and their names in checkpoints, are
Megatron's, but Megatron's model is not told of it: that would run it in every pass, give it an embedding of its own to keep equal, and let
its loss into the decoder.

Its router chooses for itself and is not balanced: engines record no routes for a draft, and its correction bias stays as it was loaded.
"""

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from moerl.train.layers import RMSNorm, moe_layer_spec

if TYPE_CHECKING:
    from moerl.train.forward import LocalMicrobatch

CLIPPED_ALONE = "mtp"
"""Megatron's name of the parameters whose gradients have a norm of their own."""


class DetachedLayer(MultiTokenPredictionLayer):
    """Megatron's layer, given next tokens as they are and hidden states that no gradient reaches.

    The stock one shifts the inputs itself, sequence by sequence, and has no next token for a sequence's last row.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Any,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        hidden_states = hidden_states.detach()
        if self.config.recompute_granularity == "full":
            hidden_states.requires_grad_()  # or recomputation would find nothing to differentiate
        return input_ids, position_ids, padding_mask, embedding(input_ids), hidden_states


def attach(chunk: torch.nn.Module, vp_stage: int | None, *, trained: bool) -> None:
    """Build the layer as `chunk.mtp`. The chunk must hold the output layer, and not be wrapped yet.

    Args:
        trained: its weights get gradients; False freezes them.
    """
    config = _own_settings(chunk.config)
    engine = config.transformer_impl == "transformer_engine"
    stock = get_mtp_layer_spec(moe_layer_spec(config), use_transformer_engine=engine)
    norms = {} if engine else dict.fromkeys(("enorm", "hnorm", "layer_norm"), RMSNorm)
    layer = ModuleSpec(module=DetachedLayer, submodules=replace(stock.submodules, **norms))
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    chunk.mtp = MultiTokenPredictionBlock(config, submodules, vp_stage=vp_stage, pg_collection=chunk.pg_collection)
    if trained and not chunk.pre_process and not chunk.share_embeddings_and_output_weights:
        chunk.moerl_embedding = torch.empty_like(chunk.output_layer.weight, requires_grad=False)
    for parameter in chunk.mtp.parameters():
        parameter.requires_grad_(trained)
        parameter.grad_norm_group = CLIPPED_ALONE
    for router in chunk.mtp.modules():
        if isinstance(router, TopKRouter):
            router.frozen_expert_bias = True


def _own_settings(config: TransformerConfig) -> TransformerConfig:
    """The model's settings for this layer: its router is neither replayed nor balanced, and full recomputation is of the one layer."""
    own = copy(config)
    own.mtp_num_layers, own.moe_enable_routing_replay = 1, False
    own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "none", 0.0, None
    if own.recompute_granularity == "full":
        own.recompute_method, own.recompute_num_layers = "uniform", 1
    return own


def share_embedding(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Bring the embedding as it is now from the first pipeline stage to the last, which needs its values only. Collective over all stages.

    Args:
        first, last: this rank's first and last chunk, not wrapped.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or last.share_embeddings_and_output_weights:
        return
    if not first.pre_process and not last.post_process:
        return
    weight = first.embedding.word_embeddings.weight.detach() if first.pre_process else last.moerl_embedding
    group = parallel_state.get_embedding_group()
    dist.broadcast(weight, src=dist.get_process_group_ranks(group)[0], group=group)


def predict(chunk: torch.nn.Module, hidden_states: torch.Tensor, rows: "LocalMicrobatch") -> torch.Tensor:
    """What the output layer makes the token after next of.

    Args:
        chunk: the last stage's, not wrapped; `share_embedding` was called since the weights changed.
        hidden_states: [n_local, 1, hidden] after the final norm; cut into sequence-parallel pieces where there are.

    Returns:
        of the same shape; differentiable in the layer's weights only.
    """
    packing, rotary = rows.packing, None
    if not chunk.config.multi_latent_attention:
        rotary = chunk.rotary_pos_emb(packing.max_seqlen_q, packed_seq=True, cp_group=packing.cp_group)
    (layer,) = chunk.mtp.layers
    found, *_ = layer(
        input_ids=rows.labels[None],
        position_ids=rows.positions[None],
        hidden_states=hidden_states,
        attention_mask=None,
        rotary_pos_emb=rotary,
        packed_seq_params=packing,
        embedding=partial(_embed, chunk, dtype=hidden_states.dtype),
    )
    return found


@torch.no_grad()
def _embed(chunk: torch.nn.Module, ids: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """int64[1, n_local] -> [n_local, 1, hidden], or this rank's sequence-parallel piece of it."""
    if chunk.pre_process:
        weight = chunk.embedding.word_embeddings.weight
    else:
        weight = chunk.output_layer.weight if chunk.share_embeddings_and_output_weights else chunk.moerl_embedding
    group = parallel_state.get_tensor_model_parallel_group()
    local = ids[0] - group.rank() * len(weight)
    held = (local >= 0) & (local < len(weight))
    found = (F.embedding(local.where(held, 0), weight) * held[:, None])[:, None].to(dtype)
    if chunk.config.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(found, group=group)
    return reduce_from_tensor_model_parallel_region(found, group=group)


@torch.no_grad()
def rescale(chunk: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """Make the layer's finalised gradients those of a mean over its targets. Collective over the last stage's ranks.

    Args:
        tokens: number by which Megatron divided all gradients, this rank's share of it.
        targets: this rank's share of the tokens predicted.
    """
    counts = torch.stack([tokens, targets]).to(torch.float64)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    divisor, number = counts.clamp(min=1).tolist()
    for parameter in chunk.mtp.parameters():
        parameter.main_grad.mul_(divisor / number)
