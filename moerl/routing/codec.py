"""Routes as bytes and back: three codecs, each lossless as sets, with rows that begin at a byte.

    narrow   one or two bytes per expert; keeps slot order; a copy
    packed   ⌈log2 experts⌉ bits per expert; keeps slot order
    set      the rank of each set, ⌈log2 C(experts, k)⌉ bits; less where the router chooses groups of experts first

`set` with `keep_order` spends ⌈log2 k!⌉ more bits. A group limit is a promise about the model, and data may break it (routes of
another model, a test): then the whole record uses the space without groups, and says so.

The work is done by `native` (compiled) or `packing` (numpy), with the same bytes.
"""

from types import ModuleType
from typing import Literal, NamedTuple, get_args

import numpy as np

from moerl.errors import TraceError
from moerl.routing import native, packing
from moerl.routing.space import Space, id_space, set_space

CodecName = Literal["narrow", "packed", "set"]


class Codec(NamedTuple):
    """How routes are written.

    Attributes:
        keep_order: set only: keep the slots' order; the others always do.
        groups, group_topk: set only: experts lie in `groups` equal blocks, of which a token uses at most `group_topk`; 0 for no limit.
    """

    name: CodecName = "narrow"
    keep_order: bool = False
    groups: int = 0
    group_topk: int = 0


NARROW = Codec()


def encode(ids: np.ndarray, experts: int, codec: Codec) -> tuple[np.ndarray, Codec]:
    """Bytes of uint8|uint16[row, layer, k] routes.

    Returns:
        (uint8[row, row_bytes], the codec that was really used: without groups if a row breaks their limit)

    Raises:
        TraceError: an expert is out of range or repeated (set), or the codec cannot hold this model.
    """
    rows, layers, topk = ids.shape
    if not ids.size:
        return np.zeros((rows, 0), np.uint8), codec
    if codec.name == "narrow":
        little = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<"))
        return little.reshape(rows, layers * topk).view(np.uint8), Codec("narrow")
    if codec.name == "packed":
        return _engine().pack_ids(ids, id_space(experts, topk)), Codec("packed")
    space = _space(experts, topk, codec)
    data, bad = _engine().encode_sets(ids, space)
    if bad >= 0 and space.groups:
        codec = codec._replace(groups=0, group_topk=0)
        data, bad = _engine().encode_sets(ids, _space(experts, topk, codec))
    if bad >= 0:
        row, layer = divmod(bad, layers)
        raise TraceError(
            f"the set codec needs distinct experts below {experts}, got {ids[row, layer].tolist()} at row {row}, layer {layer}"
        )
    return data, codec


def decode(data: np.ndarray, experts: int, topk: int, layers: int, codec: Codec) -> np.ndarray:
    """Routes of uint8[row, row_bytes] that `encode` made; a view of the data if narrow.

    Returns:
        uint8|uint16[row, layer, k]: of `set` always valid, ascending unless order was kept; of the others to be checked.

    Raises:
        TraceError: bits that stand for no set.
    """
    dtype = np.dtype(np.uint8 if experts <= 256 else np.uint16)
    if not data.size:
        return np.zeros((len(data), layers, topk), dtype)
    if codec.name == "narrow":
        return data.reshape(-1).view(dtype.newbyteorder("<")).reshape(len(data), layers, topk)
    if codec.name == "packed":
        return _engine().unpack_ids(data, id_space(experts, topk), layers, dtype)
    ids, bad = _engine().decode_sets(data, _space(experts, topk, codec), layers, dtype)
    if bad >= 0:
        row, layer = divmod(bad, layers)
        raise TraceError(
            f"row {row}, layer {layer} of the record stands for no set of {topk} of {experts} experts; was it written by moerl?"
        )
    return ids


def row_bytes(experts: int, topk: int, layers: int, codec: Codec) -> int:
    """Bytes of one row.

    Raises:
        TraceError: an unknown codec, or one that cannot hold this model.
    """
    if codec.name == "narrow":
        return layers * topk * (1 if experts <= 256 else 2)
    if codec.name == "packed":
        return id_space(experts, topk).row_bytes(layers)
    if codec.name != "set":
        raise TraceError(f"unknown codec {codec.name!r}; expected one of {', '.join(get_args(CodecName))}")
    return _space(experts, topk, codec).row_bytes(layers)


def all_distinct(ids: np.ndarray, experts: int) -> bool:
    """Whether every set of uint8|uint16[row, layer, k] has distinct experts, all below `experts`."""
    if not ids.size:
        return True
    return _engine().first_bad(ids.reshape(-1, ids.shape[-1]), experts) < 0


def _space(experts: int, topk: int, codec: Codec) -> Space:
    return set_space(experts, topk, codec.groups, codec.group_topk, codec.keep_order)


def _engine() -> ModuleType:
    return packing if native.problem() else native
