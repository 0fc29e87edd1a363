"""One tensor that `torch.save` wrote, somewhere within a file, or a part of it, read straight into memory.

`torch.load` of a part of a file copies twice and computes a checksum, which takes longer than reading. What it would return follows from
the few bytes that describe the tensor, unless that is something unusual; then `torch.load` is what reads it.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from moerl.convert.folder import fill

_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
}
"""What torch calls a tensor's type in a file."""


@dataclass(frozen=True)
class _Plain:
    """A tensor that is all of its storage, contiguous.

    Attributes:
        record: of the archive, which holds its bytes.
    """

    record: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a plain tensor's elements are in a file, one after another: `at`, in bytes."""

    path: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """So many elements from number `first` on, in a shape of their own; all of them in theirs.

        Raises:
            OSError, EOFError: the file cannot be read, or ends early.
        """
        tensor = torch.empty(self.shape if shape is None else shape, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            fill(file.fileno(), self.at + first * self.dtype.itemsize, tensor)
        return tensor


def locate(path: Path, at: int, nbytes: int) -> Place | None:
    """Where the elements of the tensor in the bytes `at` to `at` + `nbytes` of a file are; None if only `torch.load` can read it.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError, EOFError: they are damaged, or missing.
    """
    with path.open("rb", buffering=0) as file:
        archive = torch._C.PyTorchFileReader(_create_file_view(file, at, nbytes))
        plain = _Description(io.BytesIO(archive.get_record("data.pkl"))).read()
        if plain is None or archive.get_record("byteorder") != b"little":
            return None
        begin = archive.get_record_offset(plain.record)
    if (end := begin + prod(plain.shape) * plain.dtype.itemsize) > nbytes:
        raise EOFError(f"its bytes should end at {end}, but there are {nbytes}")
    return Place(path, at + begin, plain.dtype, plain.shape)


def load_tensor(path: Path, at: int, nbytes: int) -> torch.Tensor:
    """The tensor in the bytes `at` to `at` + `nbytes` of a file.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError, EOFError: they are damaged, or missing.
    """
    if (place := locate(path, at, nbytes)) is not None:
        return place.read()
    with path.open("rb", buffering=0) as file:
        return torch.load(_create_file_view(file, at, nbytes), map_location="cpu", weights_only=True)


class _Description(pickle.Unpickler):
    """Reads what describes a tensor; knows no other classes than that needs, and makes no tensor."""

    def read(self) -> _Plain | None:
        """None if the tensor is not plain."""
        try:
            found = self.load()
        except _Unusual:
            return None
        return found if isinstance(found, _Plain) else None

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _plain
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise _Unusual

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Unusual(Exception):
    """There is something in it that only torch understands."""


def _plain(storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Plain | None:
    _, dtype, key, _, elements = storage
    expected = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    contiguous = all(size == 1 or stride == want for size, stride, want in zip(shape, strides, expected, strict=True))
    if offset or not contiguous or prod(shape) != elements:
        return None
    return _Plain(f"data/{key}", dtype, tuple(shape))
