"""A tiny model of every family: its published config, scaled down. A new family needs a line here and nothing else."""

from typing import Any

from tests.unit.models import published

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
MLA: dict[str, Any] = SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
}
GQA: dict[str, Any] = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 4}
V2_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepSeek-V3", MLA | {"q_lora_rank": 64, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    "moonlight": ("Moonlight-16B-A3B-Instruct", MLA),
    "kimi_k2": ("Kimi-K2-Instruct", MLA | {"q_lora_rank": 64, "num_experts_per_tok": 4}),
    "deepseek_v2": ("DeepSeek-V2-Lite", MLA | V2_GROUPS | {"q_lora_rank": 64}),
    "deepseek_v2_lite": ("DeepSeek-V2-Lite", MLA),
    "qwen3": ("Qwen3-30B-A3B", GQA | {"num_experts": 16}),
    "glm4": ("GLM-4.5", GQA | {"n_routed_experts": 16, "first_k_dense_replace": 1}),
    "glm4_air": ("GLM-4.5", GQA | {"n_routed_experts": 16, "first_k_dense_replace": 1, "use_qk_norm": False}),
}
"""Model -> (published model, what is smaller)."""


def config(model: str) -> dict[str, Any]:
    """`config.json` of the tiny model."""
    base, smaller = BASES[model]
    full = {name: value for name, value in published.config(base).items() if name != "quantization_config"}
    return full | smaller
