"""Where every element of every HF tensor must go in the parameters of each engine rank, and which parameters those are.

    EngineTopology + kinds --engine_shares--> Shares within one engine, kind by kind
                           --engine_parameters--> {name: Parameter} of one rank --check_engine--> what an engine reports

The layout is SGLang's. A fused parameter stacks, along its rows, this rank's slice of each HF tensor that becomes part of it, in the
order in which the model family lists them (q_a over kv_a, gate over up, q over k over v); routed experts are stacked in front of that.
Which ranks cut a weight among themselves depends on the module it belongs to:

    attention              tp / attention_dp ranks (attention data parallelism repeats it)
    embedding              as attention; rows padded
    output layer           tp ranks, or as attention with dp_output_layer; rows padded
    dense and shared MLPs  tp ranks, or none where replicated; width padded on CPU
    routed experts         blocks of experts over ep, each cut by tp / ep ranks; width padded on CPU

Padding is zero from the engine's start on and is never sent.

Engines that serve block-quantised fp8 hold every linear and expert weight as float8_e4m3fn, and beside it `…_scale_inv`: one float32 per
block of a HF tensor's rows and columns, cut, fused and stacked as the weight is (`fp8_layout`). Norms, router, embedding and output
layer stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moerl.errors import ReshardError
from moerl.models.spec import ModelSpec, Param
from moerl.reshard.boxes import Kind, Shares, shares

VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, and further until the ranks that share it can cut it evenly."""

CPU_WIDTH_MULTIPLE = 32
"""On CPU the widths of gated MLPs are padded to a multiple of this per tensor-parallel rank."""

DERIVED = {".kv_b_proj.weight": ("w_kc", "w_vc")}
"""End of an engine parameter's name -> what the engine derives from it, beside it in the same module."""

SCALE = "_scale_inv"
"""What the name of a quantised parameter's scales ends with, behind the parameter's own."""

_NEVER_QUANTISED = ("gate.weight", "eh_proj.weight")
"""Ends of names of linear layers that stay in the engine's dtype: routers, and what multi-token prediction begins with."""

Cutting = Literal["attention", "embedding", "output", "mlp", "shared", "experts"]


@dataclass(frozen=True)
class EngineTopology:
    """How all engines cut the model; they are alike.

    Attributes:
        count: engines. Rank r of engine n is engine rank n * tp + r.
        tp: ranks per engine.
        ep: expert parallelism within tp.
        attention_dp: attention data parallelism within tp.
        dp_output_layer: the output layer is cut like attention (`enable_dp_lm_head`).
        replicated_shared: every rank holds the whole shared experts, as under all-to-all expert parallelism.
        replicated_dense: every rank holds the whole dense MLPs (`moe_dense_tp_size = 1`).
        cpu: engines on CPU, which pad gated widths.
        dtype: of all parameters but those that are float32 everywhere, or quantised.
        fp8_block: (rows, columns) that share a scale, where the engines serve a checkpoint with `weight_block_size`; None: not quantised.
        fp8_power_of_two: scales are powers of two (`scale_fmt = "ue8m0"` in the checkpoint's configuration).
        draft: engines decode speculatively with the layer for multi-token prediction, and are sent its weights too. Its embedding and
            output layer are the model's own.
    """

    count: int = 1
    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    dp_output_layer: bool = False
    replicated_shared: bool = False
    replicated_dense: bool = False
    cpu: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    fp8_block: tuple[int, int] | None = None
    fp8_power_of_two: bool = False
    draft: bool = False

    @property
    def world(self) -> int:
        return self.count * self.tp


@dataclass(frozen=True)
class Parameter:
    """One parameter of an engine rank: shape and dtype ("bfloat16", "float32", "float8_e4m3fn")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class EngineSlice:
    """What one engine rank holds of a kind: experts × rows × columns, of which the padding holds no element of the HF tensor."""

    experts: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]


def dtype_of(param: Param, topology: EngineTopology) -> str:
    """The dtype in which the engine holds a weight, and in which it travels."""
    if param.fp32:
        return "float32"
    return "float8_e4m3fn" if topology.fp8_block and is_linear(param) else topology.dtype


def is_linear(param: Param) -> bool:
    """Whether it is the weight of a linear layer or of experts, which are what SGLang quantises; some it never does."""
    return len(param.shape) == 2 and not param.is_vocabulary and not param.fp32 and not param.engine.endswith(_NEVER_QUANTISED)


def padded_vocabulary(size: int, ranks: int) -> int:
    """Rows of an embedding of `size` tokens that `ranks` ranks share, over all of them."""
    multiple = VOCABULARY_MULTIPLE
    if -(-size // multiple) * multiple % ranks:
        multiple *= ranks
    return -(-size // multiple) * multiple


def check_topology(spec: ModelSpec, kinds: Sequence[Kind], topology: EngineTopology) -> None:
    """Check that engines can cut the model that way.

    Raises:
        ReshardError: with every size that does not fit.
    """
    t, wrong = topology, []
    for name in ("ep", "attention_dp"):
        if t.tp % getattr(t, name):
            wrong.append(f"engine tp = {t.tp} is not a multiple of {name} = {getattr(t, name)}")
    if spec.experts % t.ep:
        wrong.append(f"{spec.experts} experts cannot be spread over ep = {t.ep}")
    if not wrong:
        heads = spec.hf_config["num_attention_heads"]
        if heads % (t.tp // t.attention_dp):
            wrong.append(f"{heads} attention heads cannot be cut into tp / attention_dp = {t.tp // t.attention_dp} parts")
        wrong += [problem for kind in kinds if (problem := slice_problem(kind, topology))]
    if t.cpu and t.fp8_block:
        wrong.append("engines on CPU repack fp8 weights for their kernels, in a layout that is not known here; serve bfloat16 there")
    if wrong:
        raise ReshardError("the engines' topology does not fit the model:\n" + "\n".join(f"  - {line}" for line in wrong))


def engine_shares(kinds: Sequence[Kind], topology: EngineTopology) -> list[Shares]:
    """For each kind, where it must go within one engine; ranks count from the engine's first, padding belongs to no box."""
    slices = [[engine_slice(kind, topology, rank) for rank in range(topology.tp)] for kind in kinds]
    heights, found = _heights(kinds, slices), []
    for kind, parts, first in zip(kinds, slices, _stack(kinds, slices), strict=True):
        groups: dict[EngineSlice, list[int]] = {}
        for rank, part in enumerate(parts):
            groups.setdefault(part, []).append(rank)
        width = _length(parts[0].cols)
        held = []
        for part, ranks in groups.items():
            held.append(((part.experts, _real(part.rows, kind.rows), _real(part.cols, kind.cols)), first * width, ranks))
        found.append(shares(held, (heights[kind.param.engine] * width, width)))
    return found


def engine_parameters(kinds: Sequence[Kind], topology: EngineTopology) -> list[dict[str, Parameter]]:
    """Every parameter that weights are sent into, for each rank of an engine, padding included."""
    slices = [[engine_slice(kind, topology, rank) for rank in range(topology.tp)] for kind in kinds]
    heights = _heights(kinds, slices)
    ranks: list[dict[str, Parameter]] = []
    for rank in range(topology.tp):
        held = {}
        for kind, parts in zip(kinds, slices, strict=True):
            shape: tuple[int, ...] = (heights[kind.param.engine], _length(parts[rank].cols))[: len(kind.param.shape)]
            if kind.param.expert:
                shape = (_length(parts[rank].experts), *shape)
            for layer in kind.layers:
                held[kind.param.engine.format(layer=layer)] = Parameter(shape, dtype_of(kind.param, topology))
        ranks.append(held)
    return ranks


def check_engine(expected: Sequence[Mapping[str, Parameter]], reported: Sequence[Mapping[str, Parameter]], ignore: Sequence[str]) -> None:
    """Compare what an engine's ranks report with what the plan writes.

    Args:
        ignore: parts of names of what is derived from the weights or follows from the configuration.

    Raises:
        ReshardError: listing every difference.
    """
    if len(expected) != len(reported):
        raise ReshardError(f"the engine reports parameters of {len(reported)} ranks, the plan is for {len(expected)}")
    wrong = []
    for rank, (want, got) in enumerate(zip(expected, reported, strict=True)):
        held = {name: parameter for name, parameter in got.items() if not any(part in name for part in ignore)}
        wrong += [f"rank {rank}: {name} is missing, expected {_words(want[name])}" for name in want if name not in held]
        wrong += [
            f"rank {rank}: {name} {_words(held[name])} is in the engine, but nothing is sent into it" for name in held if name not in want
        ]
        wrong += [
            f"rank {rank}: {name} is {_words(held[name])}, expected {_words(want[name])}"
            for name in want
            if name in held and held[name] != want[name]
        ]
    if wrong:
        raise ReshardError(
            f"{len(wrong)} parameters of the engine are not what the plan expects; check that [sglang] has no option that changes "
            "layouts (expert fusion, quantisation, load balancing):\n" + "\n".join(f"  - {line}" for line in wrong)
        )


def commit_unit(kind: Kind, kinds: Sequence[Kind]) -> str:
    """The engine parameter (with `{layer}`) that may be used only when all of it has arrived; empty for a plain parameter.

    That holds where several weights are fused into one, where a weight comes with scales, and where the engine derives other tensors
    from it.
    """
    name = kind.param.engine.removesuffix(SCALE)
    fused = len({other.param for other in kinds if other.param.engine.removesuffix(SCALE) == name}) > 1
    return name if fused or any(name.endswith(end) for end in DERIVED) else ""


def _cutting(param: Param) -> Cutting:
    if param.expert:
        return "experts"
    if param.layers == "once":
        return "output" if param.engine.startswith("lm_head") else "embedding"
    if ".self_attn." in param.engine:
        return "attention"
    return "shared" if ".shared_expert" in param.engine else "mlp"


def _cuts(param: Param, topology: EngineTopology) -> int:
    """Into how many slices the engine cuts a weight along its `tp_axis`."""
    t = topology
    if param.tp_axis is None or param.engine_replicated:
        return 1
    return {
        "attention": t.tp // t.attention_dp,
        "embedding": t.tp // t.attention_dp,
        "output": t.tp // t.attention_dp if t.dp_output_layer else t.tp,
        "mlp": 1 if t.replicated_dense else t.tp,
        "shared": 1 if t.replicated_shared else t.tp,
        "experts": t.tp // t.ep,
    }[_cutting(param)]


def _padded(kind: Kind, topology: EngineTopology) -> int:
    """Length of the cut axis with padding."""
    size = (kind.rows, kind.cols)[kind.param.tp_axis or 0]
    if kind.is_vocabulary:
        return padded_vocabulary(size, _cuts(kind.param, topology))
    gated = kind.param.tp_axis is not None and not kind.param.engine_replicated and _cutting(kind.param) in ("mlp", "shared", "experts")
    if topology.cpu and gated:
        multiple = CPU_WIDTH_MULTIPLE * topology.tp
        return -(-size // multiple) * multiple
    return size


def engine_slices(kind: Kind, topology: EngineTopology) -> int:
    """Into how many different slices engines cut a kind."""
    return _pieces(kind, topology)[0]


def _pieces(kind: Kind, topology: EngineTopology) -> tuple[int, int]:
    """(different slices, ranks in a row that hold the same one): key-value heads are repeated where there are fewer than ranks."""
    cuts = _cuts(kind.param, topology)
    heads = kind.rows // kind.param.head_rows if kind.param.head_rows and kind.part else cuts
    return (cuts, 1) if heads >= cuts else (heads, cuts // heads)


def slice_problem(kind: Kind, topology: EngineTopology) -> str | None:
    """Why engines cannot cut a kind that way, as a sentence; None if they can."""
    cuts, (slices, repeats) = _cuts(kind.param, topology), _pieces(kind, topology)
    size = _padded(kind, topology)
    if kind.param.head_rows:
        size //= kind.param.head_rows
        if topology.cpu and repeats > 1:
            return f"{kind.hf}: {size} heads for {cuts} ranks: engines on CPU pad heads instead of repeating them; use fewer ranks"
    if slices * repeats != cuts or size % slices:
        return f"{kind.hf}: {size} {'heads' if kind.param.head_rows else 'elements'} cannot be cut into {cuts} parts"
    return None


def engine_slice(kind: Kind, topology: EngineTopology, rank: int) -> EngineSlice:
    """What engine rank `rank` holds; padding counts, so the end may lie beyond the HF tensor."""
    experts = (0, 1)
    if kind.param.expert:
        each, block = kind.experts // topology.ep, rank // (topology.tp // topology.ep)
        experts = (block * each, (block + 1) * each)
    slices, repeats = _pieces(kind, topology)
    size = _padded(kind, topology) // slices
    index = rank % _cuts(kind.param, topology) // repeats
    window = (index * size, (index + 1) * size)
    return EngineSlice(experts, (0, kind.rows), window) if kind.param.tp_axis == 1 else EngineSlice(experts, window, (0, kind.cols))


def _heights(kinds: Sequence[Kind], slices: Sequence[Sequence[EngineSlice]]) -> dict[str, int]:
    """Rows of each engine parameter (of one expert where experts are stacked); the same on all ranks."""
    heights: dict[str, int] = {}
    for kind, parts in zip(kinds, slices, strict=True):
        heights[kind.param.engine] = heights.get(kind.param.engine, 0) + _length(parts[0].rows)
    return heights


def _stack(kinds: Sequence[Kind], slices: Sequence[Sequence[EngineSlice]]) -> list[int]:
    """First row of each kind in the engine parameter that it becomes part of."""
    ends: dict[str, int] = {}
    first = []
    for kind, parts in zip(kinds, slices, strict=True):
        first.append(ends.get(kind.param.engine, 0))
        ends[kind.param.engine] = first[-1] + _length(parts[0].rows)
    return first


def _length(window: tuple[int, int]) -> int:
    return window[1] - window[0]


def _real(window: tuple[int, int], size: int) -> tuple[int, int]:
    """The part of a window that lies inside an axis of `size`."""
    return min(window[0], size), min(window[1], size)


def _words(parameter: Parameter) -> str:
    return f"{parameter.dtype}{list(parameter.shape)}"
