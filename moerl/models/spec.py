"""The declarative description of a model family: one `Param` per kind of weight.

A family file lists, for every weight, its names in the three worlds that meet in moerl and how Megatron cuts it. Loading
a Hugging Face folder, exporting one, and syncing an engine all read the same list.

    HF checkpoint  <--Param.hf-->  full tensor  <--Param.tp_axis, expert-->  Megatron rank's parameter
                                        \\--Param.engine-->  SGLang's fused parameter

Flow: `ModelSpec` in, names and axes out. Nothing here imports torch or Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

LayerKind = Literal["once", "all", "dense", "moe", "mtp"]


@dataclass(frozen=True)
class Param:
    """One kind of weight.

    Attributes:
        megatron: parameter name in Megatron with `{layer}` (0-based model layer) and `{expert}` placeholders.
        hf: names of the HF tensors; several are stacked along dim 0 in this order (gate, then up).
        shape: of each HF part (all parts of one `Param` have the same shape).
        tp_axis: dimension that tensor parallelism cuts (expert tensor parallelism where `expert`), None if replicated.
            With several `hf` parts each part is cut by itself: a rank holds [gate shard; up shard].
        layers: which layers have it; "mtp": those for multi-token prediction, which follow the decoder's in the checkpoint.
        expert: one tensor per routed expert, distributed by expert parallelism.
        engine: SGLang's parameter that these HF tensors become part of (see `engine_group`).
        aliases: the same parameter's other names (Transformer Engine fuses norms into linears; grouped experts).
        fp32: engines keep it in float32, and so it travels (the router's correction bias, some routers' weights).
        engine_replicated: every engine rank holds all of it, although Megatron may cut it along `tp_axis`.
        part_shapes: of the HF parts, where they differ from each other (q, k, v); empty where each has `shape`.
        head_rows: rows of one attention head, where the parts are q, k, v of grouped-query attention; otherwise 0. Megatron then
            interleaves the parts per key-value head (its q heads, its k, its v) and cuts between those groups; engines cut each
            part by heads, and repeat key-value heads where they have more ranks than those.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    tp_axis: int | None = None
    layers: LayerKind = "all"
    expert: bool = False
    engine: str = ""
    aliases: tuple[str, ...] = ()
    fp32: bool = False
    engine_replicated: bool = False
    part_shapes: tuple[tuple[int, ...], ...] = ()
    head_rows: int = 0

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Shape of the HF tensor `hf[part]`."""
        return self.part_shapes[part] if self.part_shapes else self.shape

    @property
    def groups(self) -> int:
        """Key-value heads, where `head_rows` is set: as many groups are interleaved."""
        return min(shape[0] for shape in self.part_shapes) // self.head_rows

    @property
    def is_vocabulary(self) -> bool:
        """Whether it has one row per token: the embedding and the output layer, which both sides pad."""
        return self.layers == "once" and len(self.shape) == 2


@dataclass(frozen=True)
class ModelSpec:
    """What moerl needs to know of one model, read from its `config.json`.

    Attributes:
        family: name of the family file.
        hf_config: the parsed `config.json`.
        layers: decoder layers (MTP layers excluded).
        moe_layers: 0-based numbers of the layers that route tokens to experts, ascending.
        experts: routed experts per MoE layer.
        topk: experts per token.
        vocab_size: rows of the embedding in the checkpoint.
        tied_embeddings: the output layer is the embedding; `params` then has no output layer.
        params: all kinds of weights outside of multi-token prediction.
        mtp_params: all kinds of weights of the layer for multi-token prediction; empty if `config.json` announces none.
        megatron: keyword arguments for Megatron's transformer configuration (torch-free values).
        megatron_model: keyword arguments for Megatron's model, where its configuration has no field for them.
    """

    family: str
    hf_config: dict[str, Any]
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    topk: int
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    params: tuple[Param, ...]
    megatron: dict[str, Any] = field(default_factory=dict)
    megatron_model: dict[str, Any] = field(default_factory=dict)
    mtp_params: tuple[Param, ...] = ()

    @property
    def latent_attention(self) -> bool:
        """Whether attention is multi-latent (MLA), for which Megatron has a configuration of its own."""
        return "kv_lora_rank" in self.megatron

    @property
    def mtp_layers(self) -> int:
        """Layers for multi-token prediction that follow the decoder's in the checkpoint: none or one."""
        return 1 if self.mtp_params else 0

    def entries(self) -> Iterator["Entry"]:
        """All weights of the model in canonical order: the same on every rank, layer by layer; without multi-token prediction."""
        for param in self.params:
            if param.layers == "once" and not param.megatron.startswith(("decoder.final", "output")):
                yield Entry(param, None, None)
        moe = set(self.moe_layers)
        for layer in range(self.layers):
            for param in self.params:
                if param.layers == "all" or param.layers == ("moe" if layer in moe else "dense"):
                    for expert in range(self.experts) if param.expert else (None,):
                        yield Entry(param, layer, expert)
        for param in self.params:
            if param.layers == "once" and param.megatron.startswith(("decoder.final", "output")):
                yield Entry(param, None, None)

    def mtp_entries(self) -> Iterator["Entry"]:
        """The weights that multi-token prediction has to itself, in canonical order; `layer` is their number in the checkpoint."""
        for param in self.mtp_params:
            for expert in range(self.experts) if param.expert else (None,):
                yield Entry(param, self.layers, expert)

    def mtp_copies(self) -> dict[str, str]:
        """HF tensors that repeat another one for multi-token prediction -> that one. Megatron and engines share it instead."""
        if not self.mtp_params:
            return {}
        embedding, layer = "model.embed_tokens.weight", f"model.layers.{self.layers}."
        head = embedding if self.tied_embeddings else "lm_head.weight"
        return {layer + "embed_tokens.weight": embedding, layer + "shared_head.head.weight": head}

    def tensor_count(self, *, mtp: bool = False) -> int:
        """HF tensors of the checkpoint, without scales; with `mtp` also those of multi-token prediction, copies included."""
        return sum(len(param.hf) * times for param, times in self._times(mtp)) + (len(self.mtp_copies()) if mtp else 0)

    def parameter_count(self, *, mtp: bool = False) -> int:
        """Elements of those tensors."""
        own = sum(prod(param.part_shape(part)) * times for param, times in self._times(mtp) for part in range(len(param.hf)))
        return own + (len(self.mtp_copies()) * self.vocab_size * self.hidden_size if mtp else 0)

    def _times(self, mtp: bool) -> Iterator[tuple[Param, int]]:
        """(kind, how many weights of it there are)"""
        moe = len(self.moe_layers)
        layers = {"once": 1, "all": self.layers, "dense": self.layers - moe, "moe": moe, "mtp": 1}
        for param in (*self.params, *self.mtp_params) if mtp else self.params:
            yield param, layers[param.layers] * (self.experts if param.expert else 1)


@dataclass(frozen=True)
class Entry:
    """One weight of one model: a `Param` with its layer and expert filled in."""

    param: Param
    layer: int | None
    expert: int | None

    @property
    def megatron(self) -> str:
        return self.param.megatron.format(layer=self.layer, expert=self.expert)

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """All names under which Megatron may hold this weight, the local layout's first."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in (self.param.megatron, *self.param.aliases))

    @property
    def hf(self) -> tuple[str, ...]:
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.param.hf)

    @property
    def engine(self) -> str:
        return self.param.engine.format(layer=self.layer, expert=self.expert)
