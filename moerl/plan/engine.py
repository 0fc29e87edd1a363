"""Memory of engine ranks: weights as SGLang cuts them, KV cache, sync buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from moerl.config.schema import Config
from moerl.models import ModelSpec
from moerl.plan.assumptions import Shape
from moerl.reshard.boxes import Kind
from moerl.reshard.engine_boxes import DERIVED, EngineTopology, dtype_of, engine_slice
from moerl.reshard.plan import ITEMSIZE


@dataclass(frozen=True)
class EngineWeights:
    """Bytes that one engine rank holds.

    Attributes:
        experts: routed experts.
        embedding: the input embedding, of which decoding reads single rows.
        rest: everything that every token uses.
        derived: copies that the engine makes for itself (absorbed multi-latent attention).
    """

    experts: int
    embedding: int
    rest: int
    derived: int

    @property
    def total(self) -> int:
        return self.experts + self.embedding + self.rest + self.derived


def engine_weights(kinds: Sequence[Kind], topology: EngineTopology, *, rank: int = 0) -> EngineWeights:
    """Bytes of weights of one rank of an engine; no rank holds more than the first.

    Args:
        kinds: of `fp8_layout.wire_kinds`, scales included.
    """
    found = {"experts": 0, "embedding": 0, "rest": 0, "derived": 0}
    for kind in kinds:
        part = engine_slice(kind, topology, rank)
        each = prod(last - first for first, last in (part.experts, part.rows, part.cols)) * ITEMSIZE[dtype_of(kind.param, topology)]
        name = "experts" if kind.param.expert else "embedding" if kind.param.engine.startswith("model.embed") else "rest"
        found[name] += each * len(kind.layers)
        if kind.param.engine.endswith(tuple(DERIVED)):
            elements = prod(last - first for first, last in (part.rows, part.cols))
            found["derived"] += elements * ITEMSIZE[topology.dtype] * len(kind.layers)
    return EngineWeights(**found)


def kv_token_bytes(shape: Shape, layers: int, ranks: int, itemsize: int) -> int:
    """Bytes of KV cache per token on one rank.

    Multi-latent attention caches kv_lora_rank + rotary elements per layer, whole on every rank (arXiv 2405.04434, section 2.1). Grouped-
    query attention caches a key and a value of each key-value head, which are cut over the ranks, and repeated where there are fewer.

    Args:
        ranks: that share the heads.
    """
    elements = shape.latent or ceil(shape.key_value_heads / ranks) * (shape.key + shape.value)
    return elements * layers * itemsize


def kv_itemsize(config: Config) -> int:
    """Bytes of a cached element: the engine's dtype unless `sglang.kv_cache_dtype` says fp8."""
    if "kv_cache_dtype" in config.sglang and str(config.sglang["kv_cache_dtype"]).startswith("fp8"):
        return 1
    return ITEMSIZE[config.engine.dtype]


def engine_memory(spec: ModelSpec, weights: EngineWeights, token_bytes: int, tokens: int, bucket: int) -> dict[str, int]:
    """Bytes of one rank by part, with a cache of `tokens` tokens. Of `bucket` there are two. The route recorder's host-side copy is left
    out: on the GPU it keeps int32 [tokens of one batch, MoE layers, topk], counted for 8192 tokens (SGLang's chunked prefill).
    """
    return {
        "weights": weights.total,
        "kv_cache": token_bytes * tokens,
        "routes": 8192 * len(spec.moe_layers) * spec.topk * 4,
        "sync_buckets": 2 * bucket,
    }


def kv_capacity(memory: dict[str, int], token_bytes: int, budget: int) -> int:
    """Tokens that fit into what the other parts of `memory` leave of `budget` bytes."""
    left = budget - sum(size for name, size in memory.items() if name != "kv_cache")
    return max(left // token_bytes, 0)
