"""Make a tiny, randomly initialised checkpoint with a one-character-per-token tokenizer for arithmetic.

    tiny_config (DeepSeek-V3), tiny_deepseek_v2_config, tiny_qwen3_config, tiny_glm4_config --write_tiny--> folder

Everything real about the family is in it. DeepSeek-V3: MLA with compressed queries, yarn, a dense first layer, group-limited sigmoid
routing with a correction bias, a shared expert, and with `mtp` a layer for multi-token prediction. DeepSeek-V2: softmax routing, groups
that compete by their best expert. Qwen3-MoE: grouped-query attention with normalised queries and keys of a width of their own. GLM-4.5:
grouped-query attention with biases and half of each head rotated. Only the sizes are small. The folder loads in transformers, SGLang
and moerl.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from moerl.models import ModelSpec, read_spec

VOCABULARY = ("<pad>", "<bos>", "<eos>", *"0123456789", "+", "-", "=")
PAD, BOS, EOS = 0, 1, 2


def tiny_config(
    *,
    hidden: int = 128,
    layers: int = 5,
    experts: int = 64,
    topk: int = 8,
    groups: int = 8,
    group_topk: int = 4,
    expert_width: int = 64,
    initializer_range: float = 0.06,
    mtp: bool = False,
) -> dict[str, Any]:
    """`config.json` of a tiny DeepSeek-V3, with the fields that SGLang on CPU insists on."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": expert_width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": topk,
        "n_group": groups,
        "topk_group": group_topk,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": int(mtp),
        **_common(initializer_range),
    }


def tiny_deepseek_v2_config(
    *,
    hidden: int = 128,
    layers: int = 4,
    experts: int = 64,
    topk: int = 6,
    groups: int = 8,
    group_topk: int = 3,
    expert_width: int = 64,
    initializer_range: float = 0.06,
) -> dict[str, Any]:
    """`config.json` of a tiny DeepSeek-V2; with one group of experts it is a V2-Lite, without compressed queries."""
    limited = groups > 1
    sizes = {"hidden": hidden, "layers": layers, "experts": experts, "topk": topk, "groups": groups, "group_topk": group_topk}
    config = tiny_config(**sizes, expert_width=expert_width, initializer_range=initializer_range)
    del config["num_nextn_predict_layers"]
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0 if limited else 1.0,
        "q_lora_rank": config["q_lora_rank"] if limited else None,
    }


def tiny_glm4_config(
    *,
    hidden: int = 128,
    layers: int = 4,
    experts: int = 64,
    topk: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    expert_width: int = 64,
    initializer_range: float = 0.06,
    qk_norm: bool = True,
    mtp: bool = False,
) -> dict[str, Any]:
    """`config.json` of a tiny GLM-4.5."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": expert_width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": topk,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "use_qk_norm": qk_norm,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "num_nextn_predict_layers": int(mtp),
        **_common(initializer_range),
        "attention_bias": True,
    }


def tiny_qwen3_config(
    *,
    hidden: int = 128,
    layers: int = 4,
    experts: int = 64,
    topk: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    expert_width: int = 64,
    initializer_range: float = 0.06,
) -> dict[str, Any]:
    """`config.json` of a tiny Qwen3-MoE; as in the published models, the heads together are wider than the hidden size."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": expert_width,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "max_window_layers": layers,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        **_common(initializer_range),
    }


FAMILIES = {"deepseek": tiny_config, "deepseek_v2": tiny_deepseek_v2_config, "qwen3": tiny_qwen3_config, "glm4": tiny_glm4_config}
"""What makes the `config.json` of a tiny model of each family."""


def _common(initializer_range: float) -> dict[str, Any]:
    return {
        "initializer_range": initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def write_tiny(folder: str | Path, config: dict[str, Any], seed: int = 0) -> ModelSpec:
    """Write config, tokenizer and random float32 weights into `folder` (made if missing)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(folder)
    spec = read_spec(folder)
    save_file(random_weights(spec, config["initializer_range"], seed), folder / "model.safetensors", metadata={"format": "pt"})
    return spec


def random_weights(spec: ModelSpec, std: float, seed: int) -> dict[str, np.ndarray]:
    """HF name -> float32 array: normal(0, std) matrices and biases, ones for norms, zeros for the router's correction bias.

    Multi-token prediction is included where the model has it, with the copies that checkpoints keep for it.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for entry in (*spec.entries(), *spec.mtp_entries()):
        for part, name in enumerate(entry.hf):
            shape = entry.param.part_shape(part)
            if name.endswith("correction_bias"):
                weights[name] = np.zeros(shape, np.float32)
            elif len(shape) == 1 and name.endswith(".weight"):
                weights[name] = np.ones(shape, np.float32)
            else:
                weights[name] = (std * rng.standard_normal(shape)).astype(np.float32)
    return weights | {copy: weights[original].copy() for copy, original in spec.mtp_copies().items()}


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}))
