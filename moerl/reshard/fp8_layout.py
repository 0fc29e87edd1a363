"""Block-quantised engines: which tensors travel to them, and which layouts fit the grid of blocks.

    kinds(spec) --wire_kinds--> weights, each linear one followed by its scales --check_blocks--> every cut lies between blocks

A checkpoint with `weight_block_size` has, beside each linear weight, `weight_scale_inv`: one float32 per block, blocks counted from the
HF tensor's first row and column, the last ones smaller where the size is no multiple. Its layout follows from the weight's with all sizes
divided by the block's. That is exact if no cut goes through a block, on either side: then each trainer rank can quantise what it holds by
itself, and each engine rank's slice of the scales is a slice of the whole checkpoint's.

SGLang (`Fp8LinearMethod.validate_block_quant_shapes`, `Fp8MoEMethod.create_fp8_moe_weight_`) refuses the engines' cuts for the same
reason, and fused weights where one that is not the last ends inside a block. Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moerl.errors import ReshardError
from moerl.models.spec import ModelSpec, Param
from moerl.reshard.boxes import Kind, kinds
from moerl.reshard.engine_boxes import SCALE, EngineTopology, engine_slices, is_linear
from moerl.reshard.trainer_layout import TrainerTopology, trainer_parts

_SHOWN = 8
"""Sizes that an error suggests at most."""


def wire_kinds(spec: ModelSpec, engine: EngineTopology) -> tuple[Kind, ...]:
    """All kinds of tensors that engines hold: those of the model, and the scales of what they serve quantised.

    Scales are float32, have the layers and experts of their weight, and its names with `_scale_inv` behind them. A trainer has no such
    parameters; `fp8.sources` makes them.
    """
    if engine.fp8_block is None:
        return kinds(spec, mtp=engine.draft)
    return tuple(
        found
        for kind in kinds(spec, mtp=engine.draft)
        for found in ((kind, replace(kind, param=_scales(kind.param, engine.fp8_block))) if is_linear(kind.param) else (kind,))
    )


def check_blocks(every: Sequence[Kind], trainer: TrainerTopology, engine: EngineTopology) -> None:
    """Check that neither side cuts through a block.

    Args:
        every: from `wire_kinds`.

    Raises:
        ReshardError: with every weight that is cut so, and the sizes that would fit.
    """
    if engine.fp8_block is None:
        return
    linear = [kind for kind in every if is_linear(kind.param)]
    wrong = [problem for kind in linear for problem in _problems(kind, linear, trainer, engine)]
    if wrong:
        block = " × ".join(map(str, engine.fp8_block))
        raise ReshardError(
            f"{len(wrong)} cuts go through the blocks of {block} that share a scale:\n" + "\n".join(f"  - {p}" for p in wrong)
        )


def _scales(param: Param, block: tuple[int, int]) -> Param:
    """The scales of a weight, as if they were a weight of their own."""

    def blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // edge) for size, edge in zip(shape, block, strict=True))

    return replace(
        param,
        megatron=param.megatron + SCALE,
        hf=tuple(name + SCALE for name in param.hf),
        shape=blocks(param.shape),
        engine=param.engine + SCALE,
        aliases=(),
        fp32=True,
        part_shapes=tuple(blocks(shape) for shape in param.part_shapes),
        head_rows=-(-param.head_rows // block[0]),
    )


def _problems(kind: Kind, linear: Sequence[Kind], trainer: TrainerTopology, engine: EngineTopology) -> Iterator[str]:
    param, axis = kind.param, kind.param.tp_axis or 0
    size, edge = (kind.rows, kind.cols)[axis], engine.fp8_block[axis]
    words = f"{kind.hf}: {size} {('rows', 'columns')[axis]}"
    parts, slices = trainer_parts(param, trainer), engine_slices(kind, engine)
    if param.head_rows and param.groups > 1 and size // param.groups % edge:
        yield f"{words} lie in {param.groups} groups of {size // param.groups} at the trainer, not a multiple of {edge}; no size fits"
    elif parts > 1 and size // parts % edge:
        name = "etp" if param.expert else "tp"
        yield f"{words} are cut into {parts} of {size // parts} by the trainer, not a multiple of {edge}; {_fitting(name, size, edge)}"
    if slices > 1 and size // slices % edge:
        name = "tp / ep" if param.expert else "tp / attention_dp" if ".self_attn." in param.engine else "tp"
        yield f"{words} are cut into {slices} of {size // slices} by engines, not a multiple of {edge}; {_fitting(name, size, edge)}"
    elif kind.rows % engine.fp8_block[0] and _is_fused(kind, linear):
        yield f"{kind.hf}: {kind.rows} rows are fused with others by engines, not a multiple of {engine.fp8_block[0]}; no size fits"


def _is_fused(kind: Kind, linear: Sequence[Kind]) -> bool:
    """Whether the end of its rows must be the end of a block: another weight follows it, or SGLang checks each part of the merged one."""
    same = [other for other in linear if other.param.engine == kind.param.engine]
    return len(kind.param.hf) > 1 or same[-1] is not kind


def _fitting(name: str, size: int, edge: int) -> str:
    found = [n for n in range(1, size // edge + 1) if size % (n * edge) == 0] or [1]
    more = ", …" if len(found) > _SHOWN else ""
    return f"{name} = {', '.join(map(str, found[:_SHOWN]))}{more} would fit"
