"""The kernel for CPUs: csrc/pack.cpp, loaded with ctypes when it is first needed; ctypes lets other Python threads run meanwhile.

`tools/setup.sh` and `pip install` build it with `setup.py build_ext`.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from moerl.reshard.pack.table import Table

INTERFACE = 2  # kInterface of the csrc/pack.h that fits `table`
_POINTER = ctypes.c_void_p


def problem(device: torch.device) -> str:
    """Why it cannot be used on a device; empty if it can."""
    return f"it moves tensors on a CPU, not on {device}" if device.type != "cpu" else _library()[1]


def move(
    table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, pack: bool, threads: int, chunks: tuple[int, int] | None = None
) -> int:
    """Into the bucket if `pack`, else out of it: all chunks of the table, or those from the first to before the second number.

    Returns:
        The number of launches.
    """
    library, why = _library()
    if library is None:
        raise RuntimeError(why)
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    work = table.rows.ctypes.data, table.owners.ctypes.data, *(chunks or (0, len(table.owners)))
    library.pack_move(*work, addresses.ctypes.data, bucket.data_ptr(), pack, threads)
    return 1


def load(stem: str, needs: str) -> tuple[ctypes.CDLL | None, str]:
    """A compiled library beside this file, or why there is none.

    Args:
        stem: of its name.
        needs: what building it takes.
    """
    folder = Path(__file__).parent
    built = sorted(folder.glob(f"{stem}.*.so"), key=lambda path: path.stat().st_mtime)  # of any Python version: it holds nothing of Python
    if not built:
        return None, f"{folder / stem}.*.so is not built, which needs {needs}"
    path = built[-1]
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    if (found := library.pack_interface()) != INTERFACE:
        return None, f"{path} is of another version ({found}, expected {INTERFACE})"
    return library, ""


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    library, why = load("_pack", "a C++ compiler (g++ or clang++)")
    if library is not None:
        library.pack_move.argtypes = (_POINTER, _POINTER, ctypes.c_int64, ctypes.c_int64, _POINTER, _POINTER, ctypes.c_int, ctypes.c_int)
        library.pack_move.restype = None
    return library, why
