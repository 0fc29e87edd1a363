"""A Hugging Face folder as it lies on disk: which tensor is where in which file, and its rows on demand.

    folder --read_folder--> {name: Stored} --read_rows--> rows of one tensor

Only headers are read at first. Rows come by plain reads into the caller's memory, not by a memory map: what a conversion holds is then
what it allocated, and a file that shrinks meanwhile is an error instead of a signal.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moerl.errors import ModelError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""What weights are stored in: safetensors' names of them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
_SHOWN = 12


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder.

    Attributes:
        dtype: safetensors' name of it; may be one that is not in `DTYPES`.
        offset: of its first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name, in the order of its files.

    Raises:
        ModelError: no weights, damaged or missing files, or an index that doesn't fit them; all of it in one message.
    """
    index = folder / INDEX
    placed: dict[str, str] = {}
    if index.is_file():
        try:
            placed = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ModelError(f"{index} is no index of a checkpoint ({error!r}); download it again") from error
    paths = [folder / name for name in sorted(set(placed.values()))] if placed else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors; expected a Hugging Face checkpoint with weights")
    found: dict[str, Stored] = {}
    twice: Counter[str] = Counter()
    problems = []
    for path in paths:
        try:
            tensors = _read_header(path)
        except (SafetensorError, OSError) as error:
            problems.append(f"{path.name}: {'missing' if not path.exists() else f'damaged ({error})'}")
            continue
        twice.update(tensors.keys() & found.keys())
        found |= tensors
    problems += [f"{name}: stored in more than one file" for name in twice]
    if placed and not problems:
        elsewhere = [name for name, file in placed.items() if name not in found or found[name].path.name != file]
        unlisted = [name for name in found if name not in placed]
        problems += [f"{len(elsewhere)} tensors are not in the file that {INDEX} names: {some(elsewhere)}"] if elsewhere else []
        problems += [f"{len(unlisted)} tensors are in the files but not in {INDEX}: {some(unlisted)}"] if unlisted else []
    if problems:
        raise ModelError(f"{folder} is damaged or incomplete; download these again:\n" + "\n".join(f"  - {one}" for one in problems))
    return found


def _read_header(path: Path) -> dict[str, Stored]:
    with safe_open(path, framework="pt"):  # checks the header, and that the file has as many bytes as it says
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return found


def read_rows(stored: Stored, first: int, last: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous and of the stored type, with rows `first` to `last` - 1 of a tensor.

    Raises:
        ModelError: the file ends early.
    """
    at, wanted = stored.offset + first * stored.row_bytes, (last - first) * stored.row_bytes
    if prod(out.shape) * out.element_size() != wanted:
        raise ValueError(f"rows {first}:{last} have {wanted} bytes, the buffer has {prod(out.shape) * out.element_size()}")
    file = os.open(stored.path, os.O_RDONLY)
    try:
        fill(file, at, out)
    except EOFError as error:
        raise ModelError(f"{stored.path} {error}, in the middle of a tensor; it was changed meanwhile") from error
    finally:
        os.close(file)


def fill(file: int, at: int, out: torch.Tensor) -> None:
    """Fill a contiguous tensor with the bytes of an open file from `at` on.

    Raises:
        EOFError: there are not that many.
    """
    view, done = memoryview(out.flatten().view(torch.uint8).numpy()), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], at + done)
        if not count:
            raise EOFError(f"ends at byte {at + done}")
        done += count


def some(names: list[str]) -> str:
    """A list of names for an error, cut where it becomes too long."""
    return ", ".join(names[:_SHOWN]) + (f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
