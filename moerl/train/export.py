"""The trainer's weights as a Hugging Face folder, with the layer for multi-token prediction: the trained one, or the one it started beside.

shards of all ranks --gather--> HF tensors --+
model.path or model.megatron_checkpoint -----+--> folder (rank 0)
"""

import json
import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from moerl.convert.ahead import Ahead, find, repeated
from moerl.convert.carry import without_mtp
from moerl.convert.export import write_folder
from moerl.models import ModelSpec
from moerl.reshard.gather import gather_hf
from moerl.train import weights
from moerl.train.megatron import Ranks

log = logging.getLogger(__name__)


def export_hf(
    folder: Path,
    source: Path,
    model: list[torch.nn.Module],
    spec: ModelSpec,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    mtp: bool = False,
    origin: Path | None = None,
) -> str | None:
    """Write the model to `folder`; collective, rank 0 writes.

    Where the model has no layer for multi-token prediction, that of `origin` is written byte by byte, but for its copies of the embedding
    and the output layer, which repeat the model's.

    Args:
        source: HF folder whose config and tokenizer are copied.
        dtype: of the written tensors (the router's correction bias stays float32), those from `origin` excepted.
        mtp: the model has the layer.
        origin: HF folder or Megatron checkpoint that the model was loaded from; None for `source`.

    Returns:
        What config.json of `source` announces and the folder lacks, in a sentence that was logged too; None where nothing is, and on all
        ranks but the first.
    """
    tensors = gather_hf(weights.local_shards(model, spec, ranks), spec, dtype=dtype, mtp=mtp)
    if ranks.rank:
        for _ in tensors:
            pass
        return None
    ahead = find(origin or source, spec)
    lacks = None if mtp else _lacks(ahead, origin or source)
    config = json.loads((source / "config.json").read_text())
    if ahead.is_empty and not mtp:
        config = without_mtp(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_folder(folder, source, _whole(tensors, ahead, mtp), dtype=dtype, config=config)
    if lacks:
        log.warning("%s: %s", folder, lacks)
    return lacks


def _whole(tensors: Iterator[tuple[str, torch.Tensor]], ahead: Ahead, mtp: bool) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(repeated(tensors, ahead.copies), () if mtp else ahead.tensors())


def _lacks(ahead: Ahead, origin: Path) -> str | None:
    if not ahead.missing:
        return None
    if ahead.is_empty:
        return f"{origin} holds no layer for multi-token prediction, so the export has none, and its config.json announces none"
    some = ", ".join(ahead.missing[:4]) + (f", … {len(ahead.missing) - 4} more" if len(ahead.missing) > 4 else "")
    return f"{origin} lacks {len(ahead.missing)} tensors of the layer for multi-token prediction, and so does the export: {some}"
