"""Make a tiny, randomly initialised checkpoint with a one-character-per-token tokenizer for arithmetic.

    tiny_config (DeepSeek-V3), tiny_qwen3_config (Qwen3-MoE) --write_tiny--> folder

Everything real about the family is in it. DeepSeek-V3: MLA with compressed queries, yarn, a dense first layer, group-limited sigmoid
routing with a correction bias, a shared expert. Qwen3-MoE: grouped-query attention with normalised queries and keys of a width of
their own, softmax routing. Only the sizes are small. The folder loads in transformers, SGLang and moerl.
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
        "initializer_range": initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
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
    """HF name -> float32 array: normal(0, std) matrices, ones for norms, zeros for the router's correction bias."""
    rng = np.random.default_rng(seed)
    weights = {}
    for entry in spec.entries():
        for part, name in enumerate(entry.hf):
            shape = entry.param.part_shape(part)
            if entry.param.fp32:
                weights[name] = np.zeros(shape, np.float32)
            elif len(shape) == 1:
                weights[name] = np.ones(shape, np.float32)
            else:
                weights[name] = (std * rng.standard_normal(shape)).astype(np.float32)
    return weights


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
