"""What a plan takes for granted: the hardware, and the lengths of prompts and responses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from moerl.config.schema import Config
from moerl.errors import ConfigError
from moerl.models import ModelSpec

GIB = 2**30

HBM_TB_S = {80: 3.35, 141: 4.8}
"""Memory of an H100 SXM and an H200 in GiB, as sold -> bandwidth of that memory in TB/s, by NVIDIA's data sheets."""


@dataclass(frozen=True)
class Assumptions:
    """Options of `moerl plan`, with dashes instead of underscores. All but lengths are per GPU.

    Attributes:
        gpu_gib: memory.
        reserve_gib: of it, for what is not counted: CUDA context, communicators, kernels' workspaces, fragmentation.
        gbps_per_rank: network bandwidth in Gbit/s, one way.
        hbm_tb_s: memory bandwidth in TB/s.
        tflops: dense bfloat16, the data sheet's figure.
        mfu: share of `tflops` that the trainer reaches, pipeline bubbles left aside.
        imbalance: rows of the busiest rank's experts over the mean.
        prompt_tokens, response_tokens: mean lengths.
    """

    gpu_gib: float = 80.0
    reserve_gib: float = 5.0
    gbps_per_rank: float = 400.0
    hbm_tb_s: float = 3.35
    tflops: float = 989.0
    mfu: float = 0.3
    imbalance: float = 1.25
    prompt_tokens: float = 512.0
    response_tokens: float = 512.0

    @property
    def budget(self) -> int:
        """Bytes that what is counted may take of one GPU."""
        return int((self.gpu_gib - self.reserve_gib) * GIB)

    def __str__(self) -> str:
        return (
            f"{self.gpu_gib:g} GiB per GPU ({self.reserve_gib:g} of it reserved), {self.hbm_tb_s:g} TB/s HBM, {self.tflops:g} TFLOP/s, "
            f"MFU {self.mfu:g}, {self.gbps_per_rank:g} Gbit/s per rank, busiest experts x {self.imbalance:g}, "
            f"{self.prompt_tokens:g} + {self.response_tokens:g} tokens"
        )


NAMES = {f"--{field.name.replace('_', '-')}": field.name for field in fields(Assumptions)}


def assumptions_of(given: Mapping[str, float], config: Config) -> Assumptions:
    """What was given, with lengths that default to the longest that the settings allow.

    Args:
        given: by field name.

    Raises:
        ConfigError: figures that cannot be, all of them.
    """
    lengths = {"prompt_tokens": config.rollout.max_prompt_tokens, "response_tokens": config.rollout.max_new_tokens}
    bandwidth = {} if "gpu_gib" not in given or given["gpu_gib"] not in HBM_TB_S else {"hbm_tb_s": HBM_TB_S[given["gpu_gib"]]}
    found = replace(Assumptions(), **(lengths | bandwidth | dict(given)))
    wrong = [f"--{name.replace('_', '-')} must be above 0, got {value:g}" for name, value in given.items() if value <= 0]
    if found.reserve_gib >= found.gpu_gib:
        wrong.append(f"--reserve-gib {found.reserve_gib:g} leaves nothing of --gpu-gib {found.gpu_gib:g}")
    if found.mfu > 1:
        wrong.append(f"--mfu is a share of --tflops, at most 1, got {found.mfu:g}")
    if found.imbalance < 1:
        wrong.append(f"--imbalance is busiest over mean, at least 1, got {found.imbalance:g}")
    for name, longest in lengths.items():
        if (mean := getattr(found, name)) > longest:
            limit = {"prompt_tokens": "rollout.max_prompt_tokens", "response_tokens": "rollout.max_new_tokens"}[name]
            wrong.append(f"--{name.replace('_', '-')} {mean:g} is a mean above the longest that {limit} = {longest} allows; raise that too")
    if wrong:
        raise ConfigError(wrong)
    return found


@dataclass(frozen=True)
class Shape:
    """What of a model's shape decides activations, KV cache and FLOPs; elements per token and layer unless said otherwise.

    Attributes:
        heads: query heads.
        key, value: elements of one head.
        key_value_heads: as many as `heads` in multi-latent attention.
        latent: elements that multi-latent attention caches, compressed key-values and rotary keys; 0: grouped-query attention.
        rotary: of these, the rotary keys.
        q_lora: elements of compressed queries; 0 where they are not.
        width: of one routed expert's gated MLP; `shared_width` of the shared experts together; `dense_width` of dense layers.
    """

    hidden: int
    heads: int
    key: int
    value: int
    key_value_heads: int
    latent: int
    rotary: int
    q_lora: int
    width: int
    shared_width: int
    dense_width: int


def shape_of(spec: ModelSpec) -> Shape:
    """Read from Megatron's options, which all families name alike."""
    m = spec.megatron
    common = {
        "hidden": spec.hidden_size,
        "heads": m["num_attention_heads"],
        "width": m["moe_ffn_hidden_size"],
        "shared_width": (m["moe_shared_expert_intermediate_size"] or 0) if "moe_shared_expert_intermediate_size" in m else 0,
        "dense_width": m["ffn_hidden_size"],
    }
    if spec.latent_attention:
        return Shape(
            key=m["qk_head_dim"] + m["qk_pos_emb_head_dim"],
            value=m["v_head_dim"],
            key_value_heads=m["num_attention_heads"],
            latent=m["kv_lora_rank"] + m["qk_pos_emb_head_dim"],
            rotary=m["qk_pos_emb_head_dim"],
            q_lora=m["q_lora_rank"] or 0,
            **common,
        )
    head = m["kv_channels"]
    return Shape(key=head, value=head, key_value_heads=m["num_query_groups"], latent=0, rotary=0, q_lora=0, **common)
