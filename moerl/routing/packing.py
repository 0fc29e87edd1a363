"""Packing and ranking of routes in numpy: the reference for csrc/routes.cpp, and what runs where that is not built.

Both write the same bytes. Values of up to 128 bits are pairs of uint64 words; the search for a rank's largest expert is a binary
search without branches, over all sets at once. Work goes in chunks, so that temporaries stay small.

Every encoder and decoder answers -1 if all is well, otherwise the first `row * layers + layer` at fault: an expert out of range
or repeated, more groups than the limit, a value that stands for no set.
"""

from collections.abc import Iterator

import numpy as np

from moerl.routing.space import Space, id_bits, words_of

_CHUNK_SETS = 1 << 14
_ONE = np.uint64(1)
_ALL = np.uint64(2**64 - 1)

Words = tuple[np.ndarray, np.ndarray]


def first_bad(ids: np.ndarray, experts: int) -> int:
    """First set of ids[set, k] with an expert out of range or repeated; -1 if there is none."""
    for start in range(0, len(ids), _CHUNK_SETS):
        bad = _bad_sets(ids[start : start + _CHUNK_SETS], experts)
        if bad.any():
            return start + int(bad.argmax())
    return -1


def pack_ids(ids: np.ndarray, space: Space) -> np.ndarray:
    """uint8[row, row_bytes] of ids uint8|uint16[row, layer, k], each in ⌈log2 experts⌉ bits, little-endian."""
    rows, layers, topk = ids.shape
    out = np.zeros((rows, space.row_bytes(layers)), np.uint8)
    for part in _chunks(rows, layers * topk):
        values = ids[part].astype("<u2").reshape(-1, 1).view(np.uint8)
        out[part] = _join_bits(values, id_bits(space.experts), layers * topk)
    return out


def unpack_ids(data: np.ndarray, space: Space, layers: int, dtype: np.dtype) -> np.ndarray:
    """The inverse of `pack_ids`; ids beyond the experts are possible and must be checked by the caller."""
    ids = np.empty((len(data), layers, space.topk), dtype)
    for part in _chunks(len(data), layers * space.topk):
        values = _split_bits(data[part], id_bits(space.experts), layers * space.topk, 2)
        ids[part] = values.view("<u2").reshape(-1, layers, space.topk)
    return ids


def encode_sets(ids: np.ndarray, space: Space) -> tuple[np.ndarray, int]:
    """(uint8[row, row_bytes], -1 or the fault) of ids uint8|uint16[row, layer, k]."""
    rows, layers, topk = ids.shape
    out = np.zeros((rows, space.row_bytes(layers)), np.uint8)
    for part in _chunks(rows, layers):
        experts = ids[part].reshape(-1, topk)
        chosen, bad = _within_groups(experts.astype(np.int64), space)
        bad |= _bad_sets(experts, space.experts)
        if bad.any():
            return out, part.start * layers + int(bad.argmax())
        low, high = _rank(chosen, space)
        if space.order_bits:
            low, high = _or((low, high), _shift_up(_order_rank(experts), space.set_bits))
        values = np.stack([low, high], axis=1).astype("<u8").view(np.uint8)
        out[part] = _join_bits(values, space.bits, layers)
    return out, -1


def decode_sets(data: np.ndarray, space: Space, layers: int, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """(ids[row, layer, k], -1 or the fault); ascending within a set unless slot order was kept."""
    ids = np.zeros((len(data), layers, space.topk), dtype)
    for part in _chunks(len(data), layers):
        values = _split_bits(data[part], space.bits, layers, 16).view("<u8").astype(np.uint64)
        rank, order = _split_order((values[:, 0].copy(), values[:, 1].copy()), space)
        (total_low,), (total_high,) = words_of([space.total])
        bad = ~_less(rank, (total_low, total_high)) | (order > np.uint64(space.orders - 1))
        if bad.any():
            return ids, part.start * layers + int(bad.argmax())
        ids[part] = _unrank(rank, order, space).reshape(-1, layers, space.topk)
    return ids, -1


def _chunks(rows: int, per_row: int) -> Iterator[slice]:
    step = max(1, _CHUNK_SETS // max(1, per_row))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _bad_sets(ids: np.ndarray, experts: int) -> np.ndarray:
    ordered = np.sort(ids, axis=-1)
    return (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1) | (ordered[:, -1] >= experts)


def _within_groups(experts: np.ndarray, space: Space) -> tuple[np.ndarray, np.ndarray]:
    """(experts numbered within the chosen groups with the choice's rank as last column, sets that break the limit)."""
    if not space.groups:
        return np.column_stack([experts, np.zeros(len(experts), np.int64)]), np.zeros(len(experts), bool)
    group = np.minimum(experts // space.group_size, space.groups - 1)  # an expert out of range is found by others
    used = np.zeros((len(experts), space.groups), bool)
    np.put_along_axis(used, group, True, axis=1)
    bad = used.sum(axis=1) > space.group_topk
    room = space.group_topk - used.sum(axis=1, keepdims=True)
    used |= ~used & (np.cumsum(~used, axis=1) <= room)
    place = np.cumsum(used, axis=1) - 1
    local = experts + (np.take_along_axis(place, group, axis=1) - group) * space.group_size
    choice = space.rank_of_mask[(used << np.arange(space.groups)).sum(axis=1)]
    return np.column_stack([local, choice]), bad


def _rank(chosen: np.ndarray, space: Space) -> Words:
    experts, choice = chosen[:, :-1], chosen[:, -1]
    low, high = np.zeros(len(chosen), np.uint64), np.zeros(len(chosen), np.uint64)
    for j in range(space.topk):
        position = (experts < experts[:, j : j + 1]).sum(axis=1) + 1
        low, high = _add((low, high), (space.low[position, experts[:, j]], space.high[position, experts[:, j]]))
    if space.groups:
        base_low, base_high = words_of([rank * space.sets for rank in range(len(space.mask_of_rank))])
        low, high = _add((low, high), (base_low[choice], base_high[choice]))
    return low, high


def _unrank(rank: Words, order: np.ndarray, space: Space) -> np.ndarray:
    choice = np.zeros(len(rank[0]), np.int64)
    if space.groups:
        choices = len(space.mask_of_rank)
        stride = 1 << max(0, choices - 1).bit_length()
        choice, rank = _search(rank, words_of([r * space.sets if r < choices else (1 << 128) - 1 for r in range(stride)]))
    experts = np.empty((len(choice), space.topk), np.int64)
    for i in range(space.topk, 0, -1):
        experts[:, i - 1], rank = _search(rank, (space.low[i], space.high[i]))
    if space.groups:
        used = (space.mask_of_rank[choice].astype(np.int64)[:, None] >> np.arange(space.groups)) & 1
        numbers = np.argsort(1 - used, axis=1, kind="stable")  # the chosen groups first, ascending
        place = experts // space.group_size
        experts += (np.take_along_axis(numbers, place, axis=1) - place) * space.group_size
    return _reorder(experts, order) if space.order_bits else experts


def _search(rank: Words, table: Words) -> tuple[np.ndarray, Words]:
    """Largest index whose entry is <= rank, in a table whose length is a power of two; and what is left of the rank."""
    low, high = table
    found = np.zeros(len(rank[0]), np.int64)
    step = len(low) // 2
    while step:
        found += np.where(_less(rank, (low[found + step], high[found + step])), 0, step)
        step //= 2
    return found, _subtract(rank, (low[found], high[found]))


def _order_rank(ids: np.ndarray) -> np.ndarray:
    topk = ids.shape[1]
    rank = np.zeros(len(ids), np.uint64)
    for j in range(topk):
        smaller = (ids[:, j + 1 :] < ids[:, j : j + 1]).sum(axis=1).astype(np.uint64)
        rank = rank * np.uint64(topk - j) + smaller
    return rank


def _reorder(ascending: np.ndarray, order: np.ndarray) -> np.ndarray:
    count, topk = ascending.shape
    digits = np.empty((count, topk), np.int64)
    for base in range(1, topk + 1):
        digits[:, topk - base] = (order % np.uint64(base)).astype(np.int64)
        order = order // np.uint64(base)
    left, out = ascending, np.empty_like(ascending)
    for j in range(topk):
        digit = digits[:, j : j + 1]
        out[:, j] = np.take_along_axis(left, digit, axis=1)[:, 0]
        behind = np.arange(topk - j - 1)
        left = np.take_along_axis(left, behind + (behind >= digit), axis=1)
    return out


def _split_order(value: Words, space: Space) -> tuple[Words, np.ndarray]:
    low, high = value
    if not space.order_bits:
        return value, np.zeros(len(low), np.uint64)
    bits = space.set_bits
    if bits >= 64:
        shift = np.uint64(bits - 64)
        return (low, high & ((_ONE << shift) - _ONE)), high >> shift
    order = low >> np.uint64(bits) | high << np.uint64(64 - bits)
    return (low & ((_ONE << np.uint64(bits)) - _ONE), np.zeros_like(high)), order


def _shift_up(value: np.ndarray, bits: int) -> Words:
    if bits >= 64:
        return np.zeros_like(value), value << np.uint64(bits - 64)
    return value << np.uint64(bits), value >> np.uint64(64 - bits)


def _add(a: Words, b: Words) -> Words:
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0])


def _subtract(a: Words, b: Words) -> Words:
    return a[0] - b[0], a[1] - b[1] - (a[0] < b[0])


def _or(a: Words, b: Words) -> Words:
    return a[0] | b[0], a[1] | b[1]


def _less(a: Words, b: Words) -> np.ndarray:
    return (a[1] < b[1]) | ((a[1] == b[1]) & (a[0] < b[0]))


def _join_bits(values: np.ndarray, bits: int, per_row: int) -> np.ndarray:
    """uint8[row, ⌈per_row · bits / 8⌉] of little-endian values uint8[row · per_row, bytes], of which `bits` count."""
    single = np.unpackbits(values, axis=1, bitorder="little")[:, :bits]
    return np.packbits(single.reshape(-1, per_row * bits), axis=1, bitorder="little")


def _split_bits(rows: np.ndarray, bits: int, per_row: int, size: int) -> np.ndarray:
    """The inverse: uint8[row · per_row, size]."""
    single = np.unpackbits(rows, axis=1, count=per_row * bits, bitorder="little").reshape(-1, bits)
    return np.packbits(np.pad(single, ((0, 0), (0, 8 * size - bits))), axis=1, bitorder="little")
