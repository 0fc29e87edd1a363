"""Write a Hugging Face folder from a stream of named tensors: sharded safetensors, index, config and tokenizer.

The folder appears under its final name only when it is complete.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_COPIED = ("tokenizer", "special_tokens", "generation_config", "chat_template", "vocab", "merges")


def write_folder(
    folder: Path,
    source: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    shard_bytes: int = 4 << 30,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write `tensors` (HF names) into `folder`, with config and tokenizer taken from `source`.

    Args:
        dtype: what config.json declares; tensors are written as they come.
        config: takes the place of the one in `source`.
        shard_bytes: a file is closed before it would exceed this.

    Returns:
        `folder`, replaced as a whole if it existed.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    where: dict[str, int] = {}
    pending: dict[str, torch.Tensor] = {}
    total, pending_bytes, part = 0, 0, 0
    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            save_file(pending, writing / f"part-{part}", metadata={"format": "pt"})
            pending, pending_bytes, part = {}, 0, part + 1
        pending[name] = tensor.detach().cpu().contiguous().clone()
        where[name] = part
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    save_file(pending, writing / f"part-{part}", metadata={"format": "pt"})
    _name_parts(writing, where, part + 1, total)
    config = dict(json.loads((source / "config.json").read_text()) if config is None else config)
    config.pop("dtype", None)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (writing / "config.json").write_text(json.dumps(config, indent=2))
    for path in source.iterdir():
        if path.is_file() and path.name.startswith(_COPIED):
            shutil.copy2(path, writing / path.name)
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)
    return folder


def _name_parts(folder: Path, where: dict[str, int], parts: int, total: int) -> None:
    if parts == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    names = [f"model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
    for part, name in enumerate(names):
        (folder / f"part-{part}").rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[part] for name, part in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
