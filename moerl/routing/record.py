"""The container of trace records: magic, header size, header, zeros up to a multiple of 8, rows of routes, xxh3 of all that.

Reading bounds every size before anything is allocated: the header by the record, the rows by the record and by what a sequence
can be (rows that are missing take no bytes, so the record alone is no bound).
"""

import msgspec
import numpy as np
import xxhash

from moerl.errors import TraceError
from moerl.routing import codec as codecs
from moerl.routing.codec import Codec
from moerl.routing.layout import Layout

MAX_HEADER_BYTES = 1 << 24
MAX_ROWS = 1 << 24  # of one sequence, or of all in one group
MAX_IDS_BYTES = 1 << 34
_DIGEST_BYTES = 8
_ALIGNMENT = 8  # of the rows, so that two-byte ids can be used where they lie


def seal(magic: bytes, header: msgspec.Struct, rows: np.ndarray) -> bytes:
    """One record.

    Args:
        rows: uint8[row, row_bytes] from `codec.encode`.
    """
    encoded = msgspec.msgpack.encode(header)
    start = len(magic) + 4 + len(encoded)
    gap = bytes(-start % _ALIGNMENT)
    parts = (magic, len(encoded).to_bytes(4, "little"), encoded, gap, memoryview(np.ascontiguousarray(rows).reshape(-1)))
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return b"".join((*parts, digest.digest()))


def open_record[Header: msgspec.Struct](record: bytes, magic: bytes, kind: type[Header], name: str) -> tuple[Header, memoryview]:
    """(header, bytes of the rows) of a record whose checksum is right.

    Raises:
        TraceError: not a record of this kind, cut short, or damaged.
    """
    view = memoryview(record)
    start = len(magic) + 4
    if len(view) < start + _DIGEST_BYTES or view[: len(magic)] != magic:
        raise TraceError(f"not a {name}: expected it to begin with {magic!r}, got {bytes(view[: len(magic)])!r} of {len(view)} bytes")
    if xxhash.xxh3_64_digest(view[:-_DIGEST_BYTES]) != view[-_DIGEST_BYTES:]:
        raise TraceError(f"the {name} is damaged: its checksum does not match ({len(view)} bytes); read it again from its source")
    size = int.from_bytes(view[len(magic) : start], "little")
    if size > min(MAX_HEADER_BYTES, len(view) - start - _DIGEST_BYTES):
        raise TraceError(f"the {name} claims a header of {size} bytes in a record of {len(view)}")
    try:
        header = msgspec.msgpack.decode(view[start : start + size], type=kind)
    except msgspec.MsgspecError as error:
        raise TraceError(f"the {name}'s header cannot be read: {error}") from error
    rows = start + size + -(start + size) % _ALIGNMENT
    if rows > len(view) - _DIGEST_BYTES:
        raise TraceError(f"the {name} ends before its rows begin, at byte {rows} of {len(view)}")
    return header, view[rows:-_DIGEST_BYTES]


def check_layout(layout: Layout, name: str) -> None:
    """Raises:
    TraceError: numbers that describe no model.
    """
    layers, experts, topk = layout
    if not (
        0 < topk <= experts <= 1 << 16
        and len(layers) * topk < 1 << 20
        and list(layers) == sorted(set(layers))
        and min(layers, default=0) >= 0
    ):
        raise TraceError(f"the {name} describes no model: layers {layers[:8]}, {experts} experts, top-{topk}")


def decode_rows(payload: memoryview, rows: int, stored: int, layout: Layout, codec: Codec, name: str) -> np.ndarray:
    """uint8|uint16[stored, moe_layer, k] of the bytes of a record.

    Args:
        rows: rows in all, for which the caller will allocate.
        stored: rows that have bytes.

    Raises:
        TraceError: more rows than can be, or another number of bytes than they take.
    """
    check_layout(layout, name)
    per_row = codecs.row_bytes(layout.experts, layout.topk, len(layout.layers), codec)
    in_memory = rows * len(layout.layers) * layout.topk * layout.dtype.itemsize
    if not 0 <= stored <= rows <= MAX_ROWS or in_memory > MAX_IDS_BYTES:
        raise TraceError(
            f"the {name} claims {rows} rows ({stored} with routes), {in_memory} bytes in memory; at most {MAX_ROWS} rows are read"
        )
    if stored * per_row != len(payload):
        raise TraceError(f"the {name} holds {len(payload)} bytes of routes, but its header says {stored} rows of {per_row} ({codec.name})")
    data = np.frombuffer(payload, np.uint8) if len(payload) else np.zeros(0, np.uint8)
    return codecs.decode(data.reshape(stored, per_row), layout.experts, layout.topk, len(layout.layers), codec)


def missing_runs(valid: np.ndarray | None) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the rows that are False."""
    if valid is None:
        return ()
    edges = np.flatnonzero(np.diff(np.concatenate([[True], valid, [True]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def count_missing(runs: tuple[tuple[int, int], ...], rows: int, name: str) -> int:
    """Rows in runs that must be ascending, apart and within `rows`.

    Raises:
        TraceError: they are not.
    """
    end = -1
    for start, stop in runs:
        if not end < start < stop <= rows:
            raise TraceError(f"the {name} names missing rows {start}..{stop}, expected runs in order, apart and within {rows} rows")
        end = stop
    return sum(stop - start for start, stop in runs)


def spread_rows(stored: np.ndarray, rows: int, missing: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids[rows, layer, k] with zeros where rows are missing, validity) of the rows that were stored."""
    if not missing:
        return stored, None
    valid = np.ones(rows, bool)
    for start, stop in missing:
        valid[start:stop] = False
    ids = np.zeros((rows, *stored.shape[1:]), stored.dtype)
    ids[valid] = stored
    return ids, valid
