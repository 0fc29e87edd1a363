"""The compiled twin of `packing`: csrc/routes.cpp, loaded with ctypes when it is first needed.

`tools/setup.sh` and `pip install` build it with `setup.py build_ext`. Without it `codec` works on numpy, with the same bytes and
more slowly; `problem()` says why it is not there.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np

from moerl.routing.space import Space, id_bits, words_of

_INTERFACE = 1  # routes_interface() of the source that fits this file
_SLACK = 17  # bytes that may be read beyond a row
_POINTER = ctypes.c_void_p


class _Params(ctypes.Structure):
    """Mirrors `Params` in csrc/routes.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "layers", "row_bytes")),
        *((name, ctypes.c_int32) for name in ("k", "experts", "wide", "set_bits", "order_bits")),
        *((name, ctypes.c_int32) for name in ("groups", "group_topk", "group_size", "short_topk", "stride")),
        *((name, _POINTER) for name in ("low", "high")),
        *((name, ctypes.c_uint64) for name in ("sets_low", "sets_high", "total_low", "total_high", "orders")),
        *((name, _POINTER) for name in ("rank_of_mask", "mask_of_rank", "group_of")),
    )


def problem() -> str:
    """Why the compiled loops cannot be used; empty if they can."""
    return _load()[1]


def first_bad(ids: np.ndarray, experts: int) -> int:
    """See `packing.first_bad`."""
    ids = np.require(ids, requirements=("C", "A"))
    return _library().routes_check(ids.ctypes.data, ids.itemsize == 2, len(ids), ids.shape[1], experts)


def pack_ids(ids: np.ndarray, space: Space) -> np.ndarray:
    """See `packing.pack_ids`."""
    return _encode("routes_pack", ids, space)[0]


def unpack_ids(data: np.ndarray, space: Space, layers: int, dtype: np.dtype) -> np.ndarray:
    """See `packing.unpack_ids`."""
    return _decode("routes_unpack", data, space, layers, dtype)[0]


def encode_sets(ids: np.ndarray, space: Space) -> tuple[np.ndarray, int]:
    """See `packing.encode_sets`."""
    return _encode("routes_encode_sets", ids, space)


def decode_sets(data: np.ndarray, space: Space, layers: int, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """See `packing.decode_sets`."""
    return _decode("routes_decode_sets", data, space, layers, dtype)


def _encode(function: str, ids: np.ndarray, space: Space) -> tuple[np.ndarray, int]:
    ids = np.require(ids, requirements=("C", "A"))
    rows, layers, _ = ids.shape
    row_bytes = space.row_bytes(layers)
    out, scratch = np.empty((rows, row_bytes), np.uint8), np.zeros(row_bytes + _SLACK, np.uint8)
    params = _params(space, rows, layers, ids.dtype)
    return out, getattr(_library(), function)(ctypes.byref(params), ids.ctypes.data, out.ctypes.data, scratch.ctypes.data)


def _decode(function: str, data: np.ndarray, space: Space, layers: int, dtype: np.dtype) -> tuple[np.ndarray, int]:
    data = np.require(data, requirements="C")
    row_bytes = space.row_bytes(layers)
    ids, scratch = np.empty((len(data), layers, space.topk), dtype), np.zeros(row_bytes + _SLACK, np.uint8)
    params = _params(space, len(data), layers, ids.dtype)
    return ids, getattr(_library(), function)(ctypes.byref(params), data.ctypes.data, ids.ctypes.data, scratch.ctypes.data)


def _params(space: Space, rows: int, layers: int, dtype: np.dtype) -> _Params:
    (sets_low, total_low), (sets_high, total_high) = words_of([space.sets, space.total])
    return _Params(
        rows=rows,
        layers=layers,
        row_bytes=space.row_bytes(layers),
        k=space.topk,
        experts=space.experts,
        wide=dtype.itemsize == 2,
        set_bits=space.set_bits if space.total else id_bits(space.experts),
        order_bits=space.order_bits,
        groups=space.groups,
        group_topk=space.group_topk,
        group_size=space.group_size,
        short_topk=space.short_topk,
        stride=space.stride,
        low=space.low.ctypes.data,
        high=space.high.ctypes.data,
        sets_low=int(sets_low),
        sets_high=int(sets_high),
        total_low=int(total_low),
        total_high=int(total_high),
        orders=space.orders,
        rank_of_mask=space.rank_of_mask.ctypes.data,
        mask_of_rank=space.mask_of_rank.ctypes.data,
        group_of=space.group_of.ctypes.data,
    )


def _library() -> ctypes.CDLL:
    library, why = _load()
    if library is None:
        raise RuntimeError(why)
    return library


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    built = sorted(folder.glob("_routes.*.so"), key=lambda path: path.stat().st_mtime)  # of any Python version: it holds nothing of Python
    if not built:
        return None, f"{folder / '_routes.*.so'} is not built, which needs a C++ compiler (g++ or clang++)"
    path = built[-1]
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    library.routes_interface.restype = ctypes.c_int
    if (found := library.routes_interface()) != _INTERFACE:
        return None, f"{path} is of another version ({found}, expected {_INTERFACE})"
    library.routes_check.argtypes = (_POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    library.routes_check.restype = ctypes.c_int64
    for name in ("routes_encode_sets", "routes_decode_sets", "routes_pack", "routes_unpack"):
        function = getattr(library, name)
        function.argtypes = (ctypes.POINTER(_Params), _POINTER, _POINTER, _POINTER)
        function.restype = ctypes.c_int64
    return library, ""
