"""The kernel for GPUs: csrc/pack.cu, loaded with ctypes when it is first needed.

`tools/setup.sh` and `pip install` build it with `setup.py build_ext` where they find nvcc and a torch with CUDA.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from moerl.errors import ReshardError
from moerl.reshard.pack.native import load
from moerl.reshard.pack.resident import addresses, descriptors
from moerl.reshard.pack.table import Table

_POINTER = ctypes.c_void_p
_LEAST = (9, 0)  # compute capability that setup.py builds for


def problem(device: torch.device) -> str:
    """Why it cannot be used on a device; empty if it can."""
    if device.type != "cuda":
        return f"it moves tensors on a GPU, not on {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if (found := torch.cuda.get_device_capability(device)) < _LEAST:
        return f"it is built for compute capability {_LEAST[0]}.{_LEAST[1]} and later, and {device} has {found[0]}.{found[1]}"
    return _library()[1]


def move(table: Table, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, pack: bool, threads: int) -> int:
    """Into the bucket if `pack`, else out of it, queued on torch's current stream; `threads` has no meaning here.

    Returns:
        The number of launches.

    Raises:
        ReshardError: CUDA refused the launch.
    """
    library, why = _library()
    if library is None:
        raise RuntimeError(why)
    device = bucket.device
    rows, owners = descriptors(table, device)
    spots = addresses(table, tensors, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    work = rows.data_ptr(), owners.data_ptr(), len(owners), spots.data_ptr(), bucket.data_ptr()
    if status := library.pack_launch(*work, pack, device.index, stream):
        raise ReshardError(f"CUDA refused to launch the packing kernel on {device}: {library.pack_error(status).decode()}")
    return 1


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    library, why = load("_pack_cuda", "nvcc and a torch with CUDA, and MOERL_SKIP_CUDA not set")
    if library is not None:
        library.pack_launch.argtypes = (*(_POINTER,) * 2, ctypes.c_int64, *(_POINTER,) * 2, ctypes.c_int, ctypes.c_int, _POINTER)
        library.pack_error.restype = ctypes.c_char_p
    return library, why
