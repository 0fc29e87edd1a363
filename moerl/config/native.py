"""What a config asks of the installed packages: native options of Megatron and SGLang, optional metric sinks.

The field names are read from the installed sources with `ast`, not imported: importing either package takes seconds and
needs torch. Every function takes plain values and returns sentences, one per problem.
"""

import ast
import difflib
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from moerl.config.schema import Observe
from moerl.errors import ConfigError

_FROM_MODEL = "it is read from the model's config.json"
_BY_OBJECTIVE = "moerl sets it"

OWNED_MEGATRON = {
    "num_layers": _FROM_MODEL,
    "hidden_size": _FROM_MODEL,
    "ffn_hidden_size": _FROM_MODEL,
    "num_attention_heads": _FROM_MODEL,
    "num_query_groups": _FROM_MODEL,
    "kv_channels": _FROM_MODEL,
    "normalization": _FROM_MODEL,
    "layernorm_epsilon": _FROM_MODEL,
    "multi_latent_attention": _FROM_MODEL,
    "add_qkv_bias": _FROM_MODEL,
    "qk_layernorm": _FROM_MODEL,
    "rotary_percent": _FROM_MODEL,
    "q_lora_rank": _FROM_MODEL,
    "kv_lora_rank": _FROM_MODEL,
    "qk_head_dim": _FROM_MODEL,
    "qk_pos_emb_head_dim": _FROM_MODEL,
    "v_head_dim": _FROM_MODEL,
    "num_moe_experts": _FROM_MODEL,
    "moe_ffn_hidden_size": _FROM_MODEL,
    "moe_layer_freq": _FROM_MODEL,
    "moe_router_topk": _FROM_MODEL,
    "moe_router_num_groups": _FROM_MODEL,
    "moe_router_group_topk": _FROM_MODEL,
    "moe_router_score_function": _FROM_MODEL,
    "moe_router_pre_softmax": _FROM_MODEL,
    "moe_router_enable_expert_bias": _FROM_MODEL,
    "moe_router_topk_scaling_factor": _FROM_MODEL,
    "moe_shared_expert_intermediate_size": _FROM_MODEL,
    "rope_type": _FROM_MODEL,
    "rotary_base": _FROM_MODEL,
    "rotary_scaling_factor": _FROM_MODEL,
    "original_max_position_embeddings": _FROM_MODEL,
    "beta_fast": _FROM_MODEL,
    "beta_slow": _FROM_MODEL,
    "mscale": _FROM_MODEL,
    "mscale_all_dim": _FROM_MODEL,
    "tensor_model_parallel_size": "set parallel.tp",
    "pipeline_model_parallel_size": "set parallel.pp",
    "virtual_pipeline_model_parallel_size": "set parallel.vpp",
    "context_parallel_size": "set parallel.cp",
    "expert_model_parallel_size": "set parallel.ep",
    "expert_tensor_parallel_size": "set parallel.etp",
    "sequence_parallel": "it is on wherever parallel.tp > 1",
    "bf16": "set train.dtype",
    "fp16": "set train.dtype",
    "params_dtype": "set train.dtype",
    "pipeline_dtype": "set train.dtype",
    "moe_enable_routing_replay": "set replay.actor",
    "mtp_num_layers": "set train.mtp",
    "moe_router_bias_update_rate": "set train.expert_bias_update_rate",
    "calculate_per_token_loss": _BY_OBJECTIVE,
}
"""`[megatron]` keys that moerl decides itself, and what to use instead."""

OWNED_SGLANG = {
    "model_path": "set model.path",
    "host": "engines listen on the loopback interface only",
    "port": "ports are chosen per engine",
    "device": "set engine.device",
    "dtype": "set engine.dtype",
    "tp_size": "set engine.tp",
    "max_running_requests": "set engine.max_running_requests",
    "max_total_tokens": "set engine.max_total_tokens",
    "random_seed": "set run.seed",
    "weight_version": "versions are counted by the trainer",
    "enable_return_routed_experts": "routes are always recorded",
    "enable_fp32_lm_head": "the head is always float32, as in the trainer",
    "dp_size": "replicas inside one server refuse weight updates; set engine.count",
    "pp_size": "pipeline stages lose the routes of later layers; set engine.tp",
}
"""`[sglang]` keys that moerl decides itself, and what to use instead."""

_MEGATRON_CLASSES = {"MLATransformerConfig", "TransformerConfig", "ModelParallelConfig"}


def megatron_problems(options: dict[str, Any]) -> list[str]:
    """`[megatron]` keys that the installed configuration classes lack, that moerl owns, or that no file can express.

    Those of multi-latent attention alone pass here for every model: the trainer, which knows the family, refuses them.
    """
    if not options:
        return []
    problems = _problems("megatron", options, OWNED_MEGATRON, "megatron-core", megatron_fields)
    return problems + [
        f"megatron.{name} is a Python callable in Megatron and cannot be set in a config"
        for name in options
        if name.endswith("_func") and name not in OWNED_MEGATRON
    ]


def sglang_problems(options: dict[str, Any]) -> list[str]:
    """`[sglang]` keys that the installed `ServerArgs` lacks, or that moerl owns."""
    return _problems("sglang", options, OWNED_SGLANG, "sglang", sglang_fields) if options else []


def sink_problems(observe: Observe) -> list[str]:
    """Sinks that are asked for and whose package is not installed."""
    asked = {
        "tensorboard": observe.tensorboard,
        "wandb_project": bool(observe.wandb_project),
        "trackio_project": bool(observe.trackio_project),
    }
    return [
        f"observe.{key} needs the package {package}, which is not installed; install it with: pip install {package}"
        for key, on in asked.items()
        if on and importlib.util.find_spec(package := key.removesuffix("_project")) is None
    ]


@cache
def megatron_fields() -> frozenset[str]:
    """Fields of the installed `MLATransformerConfig` and its base, the `TransformerConfig` of families without MLA."""
    core = _package_folder("megatron", "megatron-core") / "core"
    sources = (core / "transformer" / "transformer_config.py", core / "model_parallel_config.py")
    return _class_fields(sources, lambda node: node.name in _MEGATRON_CLASSES)


@cache
def sglang_fields() -> frozenset[str]:
    """Fields of the installed `ServerArgs`: it is put together from one class per namespace."""
    folder = _package_folder("sglang", "sglang") / "srt" / "arg_groups" / "fields"
    return _class_fields(sorted(folder.glob("*.py")), lambda node: True)


def _problems(section: str, options: dict[str, Any], owned: dict[str, str], package: str, fields: Any) -> list[str]:
    problems = [f"{section}.{name} cannot be set: {owned[name]}" for name in options if name in owned]
    rest = [name for name in options if name not in owned]
    try:
        known = fields() if rest else frozenset()
    except ConfigError as error:
        return problems + [f"[{section}] {violation}" for violation in error.violations]
    for name in rest:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), sorted(known - owned.keys()), n=1)
            hint = f"; did you mean {section}.{near[0]}?" if near else ""
            problems.append(f"{section}.{name} is not an option of the installed {package} {importlib.metadata.version(package)}{hint}")
    return problems


def _package_folder(module: str, package: str) -> Path:
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"cannot be checked, since {package} is not installed; `moerl doctor` says how to install it")
    return Path(next(iter(found.submodule_search_locations)))


def _class_fields(sources: Any, wanted: Any) -> frozenset[str]:
    """Names of the annotated attributes of the wanted top-level classes."""
    names = set()
    for source in sources:
        if source.is_file():
            for node in ast.parse(source.read_text()).body:
                if isinstance(node, ast.ClassDef) and wanted(node):
                    names |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    if not names:
        raise ConfigError(
            f"cannot be checked: the installed sources hold no options where they were expected ({', '.join(map(str, sources))})"
        )
    return frozenset(names)
