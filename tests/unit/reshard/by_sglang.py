"""What SGLang's own code says of fp8, asked in a process of its own, since importing it changes the environment.

`ask` writes a question to a file and runs `python -m tests.unit.reshard.by_sglang QUESTION ANSWER`.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[3]


class Cut(NamedTuple):
    """A linear layer as SGLang builds it: sizes over all ranks, and of one rank."""

    tp: int
    input_size: int
    input_size_per_partition: int
    output_size: int
    output_partition_sizes: tuple[int, ...]


class Experts(NamedTuple):
    """Routed experts of one of `tp` ranks that share each expert."""

    tp: int
    count: int
    hidden_size: int
    intermediate_size_per_partition: int


class Answer(NamedTuple):
    """Attributes:
    blocks: name -> (fp8, float32 scales).
    powers: the same with scales that are powers of two; of bf16 tensors only.
    back: name -> bf16 that `blocks` stand for.
    linear, experts: for each layer, why SGLang refuses it or "", and the shapes of its parameters.
    """

    blocks: dict[str, tuple[torch.Tensor, torch.Tensor]]
    powers: dict[str, tuple[torch.Tensor, torch.Tensor]]
    back: dict[str, torch.Tensor]
    linear: list[tuple[str, dict[str, tuple[int, ...]]]]
    experts: list[tuple[str, dict[str, tuple[int, ...]]]]


def ask(folder: Path, tensors: dict[str, torch.Tensor], cuts: list[Cut], experts: list[Experts]) -> Answer:
    """All answers from one process, which takes some seconds to start."""
    file, answer = folder / "question.pt", folder / "answer.pt"
    torch.save((tensors, [tuple(cut) for cut in cuts], [tuple(each) for each in experts]), file)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.reshard.by_sglang", str(file), str(answer)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Answer(*torch.load(answer))


def main(file: str, answer: str) -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, quant_weight_ue8m0
    from sglang.srt.layers.quantization.mxfp8_block_convert import bf16_to_block_fp8_128

    tensors, cuts, experts = torch.load(file)
    edges = [128, 128]
    blocks = {name: bf16_to_block_fp8_128(tensor) for name, tensor in tensors.items()}
    powers = {name: quant_weight_ue8m0(tensor, edges) for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    back = {name: block_quant_dequant(*pair, edges, torch.bfloat16) for name, pair in blocks.items()}
    linear = [_built(_linear, Cut(*cut)) for cut in cuts]
    torch.save((blocks, powers, back, linear, [_built(_experts, Experts(*each)) for each in experts]), answer)


def _built(build, layer) -> tuple[str, dict[str, tuple[int, ...]]]:
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    module = torch.nn.Module()
    try:
        build(module, layer, Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]))
    except ValueError as error:
        return str(error), {}
    assert all(p.dtype == (torch.float32 if name.endswith("_scale_inv") else torch.float8_e4m3fn) for name, p in module.named_parameters())
    return "", {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _linear(module: torch.nn.Module, cut: Cut, config) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    module.tp_group = SimpleNamespace(world_size=cut.tp)
    Fp8LinearMethod.create_fp8_weight_(
        module,
        block_quant=True,
        quant_config=config,
        use_mxfp8=False,
        output_size_per_partition=sum(cut.output_partition_sizes),
        input_size_per_partition=cut.input_size_per_partition,
        output_partition_sizes=list(cut.output_partition_sizes),
        input_size=cut.input_size,
        output_size=cut.output_size,
        params_dtype=torch.bfloat16,
        weight_loader=None,
        is_checkpoint_fp8_serialized=True,
    )


def _experts(module: torch.nn.Module, experts: Experts, config) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

    module.moe_tp_size, module.moe_runner_config = experts.tp, SimpleNamespace(is_gated=True)
    Fp8MoEMethod.create_fp8_moe_weight_(
        module,
        num_experts=experts.count,
        hidden_size=experts.hidden_size,
        intermediate_size_per_partition=experts.intermediate_size_per_partition,
        block_quant=True,
        quant_config=config,
        use_mxfp8=False,
        is_checkpoint_fp8_serialized=True,
        is_fp4_expert=False,
        params_dtype=torch.bfloat16,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
