"""Layers for packed attention, multi-latent or grouped-query: Transformer Engine's on CUDA, ours elsewhere (on the CPU above all).

Our modules take the places that Megatron's layer specification leaves open; nothing is patched. They exist because the stock
local ones reject packed sequences, context parallelism and MLA's head sizes (core attention), reject sequence parallelism
(norms), lose gradients of the rotary keys under tensor parallelism (the key-value down-projection), or rotate sequence by sequence.

    Packing (see `packing`) --> PackedMLA or PackedGQA --> PackedAttention, in every layer
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from moerl.errors import ConfigError
from moerl.routing.margin import best_experts
from moerl.train.packing import Block, Packing


class PackedAttention(torch.nn.Module):
    """Causal softmax attention within each packed sequence; keys and values are gathered over the context-parallel group.

    Where there are fewer key-value heads than queries' heads, each serves as many of those in a row.
    """

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None, pg_collection: Any, **_: Any):
        super().__init__()
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Packing,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> torch.Tensor:
        """query [n_local, heads, d], key and value [n_local, key-value heads, d] -> [n_local, heads, d of value]"""
        if self.cp_group.size() > 1:
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = [self._attend(query, key, value, block) for block in packed_seq_params.blocks]
        return torch.cat(outputs).index_select(0, packed_seq_params.scatter)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> torch.Tensor:
        def batch(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, rows.view(-1)).view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            batch(block.queries, query),
            batch(block.keys, key),
            batch(block.keys, value),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient is summed over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The view joins the parts of x's gradient before they meet the residual's: recomputed or not, they are added in one order.
        return super().forward(x.view_as(x))


class PackedMLA(MLASelfAttention):
    """Multi-latent attention on packed rows, from Megatron's local linears.

    Differs from the stock module in three ways: rotary embedding is applied to all sequences at once by position; the
    gathered key-value down-projection is handed on as if its weight were replicated, so that the gradient of the rotary part
    is summed over tensor-parallel ranks; norms of the compressed queries and keys are what the specification says.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = super()._qkv_down_projection(hidden_states)
        if keys.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            keys = gather_from_tensor_model_parallel_region(keys, group=self.tp_group)
            if self.config.sequence_parallel:
                keys = scatter_to_sequence_parallel_region(keys, group=self.tp_group)
        return queries, keys

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Packing | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, 1, hidden] -> query, key [n, heads, nope + rope], value [n, heads, v], compressed query and key-value."""
        config = self.config
        compressed_q, combined = self._qkv_down_projection(hidden_states)
        compressed_kv, rope_key = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if config.sequence_parallel:
            rope_key = gather_from_sequence_parallel_region(rope_key, group=self.tp_group)
        else:
            rope_key = copy_to_tensor_model_parallel_region(rope_key, group=self.tp_group)
        compressed_q, compressed_kv, rope_key = compressed_q.squeeze(1), compressed_kv.squeeze(1), rope_key.squeeze(1)

        if config.q_lora_rank is not None:
            compressed_q = self.q_layernorm(compressed_q)
        compressed_kv = self.kv_layernorm(compressed_kv)

        up_project = partial(self._up_project, self._rotary_tables(packed_seq_params, compressed_q.dtype))
        if self.recompute_up_proj:  # the base class discards the outputs after attention, and clears the attribute
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8 or config.fp4)
            up_project = partial(self.qkv_up_checkpoint.checkpoint, up_project)
        query, key, value = up_project(compressed_q, compressed_kv, rope_key)
        return query, key, value, compressed_q, compressed_kv

    def _up_project(
        self,
        rotary: tuple[torch.Tensor, torch.Tensor],
        compressed_q: torch.Tensor,
        compressed_kv: torch.Tensor,
        rope_key: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised compressed rows (hidden ones for the queries without q_lora_rank) -> query, key, value, each contiguous."""
        config, heads = self.config, self.num_attention_heads_per_partition
        query, _bias = (self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(compressed_q)
        key_value, _bias = self.linear_kv_up_proj(compressed_kv)
        query = query.view(-1, heads, self.q_head_dim)
        key_value = key_value.view(-1, heads, config.qk_head_dim + config.v_head_dim)
        plain_query, rope_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        plain_key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query = torch.cat([plain_query, _rotate_pairs(rope_query, *rotary)], dim=-1)
        rope_key = _rotate_pairs(rope_key.unsqueeze(1), *rotary).expand(-1, heads, -1)
        return query, torch.cat([plain_key, rope_key], dim=-1), value.contiguous()

    def _rotary_tables(self, packing: Packing, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if packing.rotary is None:
            angles, magnitude = self.rotary_pos_emb(packing.max_seqlen_q, packed_seq=True), 1.0
            if self.config.rope_type == "yarn":
                angles, magnitude = angles
            packing.rotary = _tables(angles, magnitude, packing, dtype)
        return packing.rotary


class PackedGQA(SelfAttention):
    """Grouped-query attention on packed rows: the stock module, but all sequences are rotated at once, by position."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Packing,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[n, 1, hidden] -> ([n, 1, hidden], bias or None)

        Args:
            rotary_pos_emb: float32[longest, 1, 1, d] angles by position, computed by the model.
        """
        if packed_seq_params.rotary is None:
            packed_seq_params.rotary = _tables(rotary_pos_emb, 1.0, packed_seq_params, hidden_states.dtype)
        # The base class hands a pair on as it is.
        pair = packed_seq_params.rotary
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=pair, packed_seq_params=packed_seq_params, **rest)

    def _adjust_key_value_for_inference(
        self,
        inference_context: None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, Any, None]:
        """Called between projection and rotation, where training has nothing to adjust: rotate, and leave nothing to rotate."""
        if rotary_pos_emb is not None:
            cos, sin = (table.unsqueeze(1) for table in rotary_pos_emb)
            query, key = _rotate_halves(query, cos, sin), _rotate_halves(key, cos, sin)
        return query, key, value, None, self.attn_mask_type, None


def _tables(angles: torch.Tensor, magnitude: float, packing: Packing, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [n_local, 1, d / 2], from angles [longest, 1, 1, d] whose second half repeats the first."""
    angles = angles[:, :, 0, : angles.shape[-1] // 2].index_select(0, packing.local_positions)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (x[2i], x[2i + 1]); the result holds all first members, then all second ones."""
    return _rotate(x[..., 0::2], x[..., 1::2], cos, sin)


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (x[i], x[d / 2 + i]), in place of both; d is the width of the tables, and what lies beyond it stays as it is."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = _rotate(first, second, cos, sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _rotate(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GroupedRouter(TopKRouter):
    """A router whose groups of experts compete by as many of their best experts as `best_experts` says; the stock one adds up
    topk / group_topk of them, which is not what every model was trained with.

    Everything else is the stock router: whoever stands in the place of its choice (`routing.chooser`) is asked as ever.
    """

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[s, b, experts] -> (probabilities, map), both [s * b, experts]"""
        asked = self.router_replay
        self.router_replay = _GroupedChoice(asked, best_experts(self.score_function))
        try:
            return super().routing(logits, padding_mask)
        finally:
            self.router_replay = asked


@dataclass(frozen=True)
class _GroupedChoice:
    """Stands in for a router's replay object during one call, and hands on all but the rule for groups."""

    asked: Any
    best: int

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _stock: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        choose = partial(grouped_topk, best=self.best)
        if self.asked is None:
            return choose(scores, topk, num_groups, group_topk)
        return self.asked.get_replay_topk(scores, topk, num_groups, group_topk, choose)


def grouped_topk(scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` best experts of the `group_topk` groups whose `best` best experts add up to most: (scores, ids), both [n, topk]."""
    grouped = scores.unflatten(-1, (num_groups, -1))
    strength = grouped.topk(min(best, grouped.shape[-1]), dim=-1)[0].sum(-1)
    chosen = torch.zeros_like(strength, dtype=torch.bool).scatter(1, strength.topk(group_topk, dim=-1)[1], True)
    return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1).topk(topk, dim=-1)


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's layer specification of this pipeline stage, with our modules where Transformer Engine is not used.

    Raises:
        ConfigError: settings that the chosen layers cannot honour.
    """
    engine = config.transformer_impl == "transformer_engine"
    if engine and config.multi_latent_attention and config.q_lora_rank is None:
        raise ConfigError("Transformer Engine layers add a query norm where q_lora_rank is absent; set megatron.transformer_impl = 'local'")
    # By default this class asks for Transformer Engine's fp8 state, even without fp8; Megatron's layers leave it at the default.
    normed_again = config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules
    if normed_again and not HAVE_TE and CheckpointWithoutOutput().fp8:
        raise ConfigError("megatron.recompute_modules: 'layernorm' needs Transformer Engine, which is not installed; remove 'layernorm'")
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage)
    layers = [_ours(spec, config) for spec in stock.layer_specs]
    return replace(stock, layer_specs=layers) if engine else replace(stock, layer_specs=layers, layer_norm=RMSNorm)


def moe_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Specification of a decoder layer with experts, as `block_spec` has it; every stage knows it, whichever layers it holds."""
    engine = config.transformer_impl == "transformer_engine"
    every = get_gpt_decoder_layer_specs(config, use_transformer_engine=engine, normalization="RMSNorm")
    return _ours(every[config.moe_layer_freq.index(1)], config)


def _ours(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A layer's specification with our router where its rule for groups differs, and our modules unless they are Transformer Engine's."""
    if config.moe_router_group_topk and config.moe_router_topk // config.moe_router_group_topk != best_experts(
        config.moe_router_score_function
    ):
        spec = _with_grouped_router(spec)
    return spec if config.transformer_impl == "transformer_engine" else _local_layer(spec, config)


def has_transformer_engine() -> bool:
    """Whether Megatron found Transformer Engine (it needs CUDA libraries to import)."""
    return HAVE_TE


def _with_grouped_router(spec: ModuleSpec) -> ModuleSpec:
    """The layer with `GroupedRouter` if it has a router."""
    mlp = spec.submodules.mlp  # of experts: what builds it, with its parts bound
    parts = mlp.keywords.get("submodules") if isinstance(mlp, partial) else None
    if not isinstance(parts, MoESubmodules):
        return spec
    mlp = partial(mlp.func, **mlp.keywords | {"submodules": replace(parts, router=GroupedRouter)})
    return ModuleSpec(module=spec.module, params=spec.params, submodules=replace(spec.submodules, mlp=mlp))


def _local_layer(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    layer, attention = spec.submodules, spec.submodules.self_attention
    if config.multi_latent_attention:
        module, norms = PackedMLA, {"q_layernorm": RMSNorm if config.q_lora_rank else IdentityOp, "kv_layernorm": RMSNorm}
    else:
        module, norms = PackedGQA, dict.fromkeys(("q_layernorm", "k_layernorm"), RMSNorm if config.qk_layernorm else IdentityOp)
    submodules = replace(attention.submodules, core_attention=PackedAttention, **norms)
    attention = ModuleSpec(module=module, params=attention.params, submodules=submodules)
    return ModuleSpec(
        module=spec.module,
        params=spec.params,
        submodules=replace(layer, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention),
    )
