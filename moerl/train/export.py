"""The trainer's weights as a Hugging Face folder."""

from pathlib import Path

import torch

from moerl.convert.export import write_folder
from moerl.models import ModelSpec
from moerl.reshard.gather import gather_hf
from moerl.train import weights
from moerl.train.megatron import Ranks


def export_hf(folder: Path, source: Path, model: list[torch.nn.Module], spec: ModelSpec, ranks: Ranks, *, dtype: torch.dtype) -> None:
    """Write the model to `folder`; collective, rank 0 writes.

    Args:
        source: HF folder whose config and tokenizer are copied.
        dtype: of the written tensors (the router's correction bias stays float32).
    """
    tensors = gather_hf(weights.local_shards(model, spec, ranks), spec, dtype=dtype)
    if ranks.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, source, tensors, dtype=dtype)
    else:
        for _ in tensors:
            pass
