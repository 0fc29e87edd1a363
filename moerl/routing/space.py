"""How many bits a set of experts takes, and the tables that number the sets: Python integers in, numpy tables out.

A set {c_1 < … < c_k} of n experts has the rank sum C(c_i, i), the combinatorial number system: 0 … C(n, k) - 1. Where a router
first chooses `group_topk` of `groups` equal blocks of experts, there are only C(groups, group_topk) · C(experts in them, k)
values: the rank of the blocks times the sets within them, plus the rank of the set within them. A set that touches fewer blocks
than allowed counts its lowest unused blocks as chosen. Slot order, where it is kept, is a Lehmer code above the set's bits.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from moerl.errors import TraceError

MAX_BITS = 128
MAX_TOPK = 20  # 20! is the largest factorial below 2**64
MAX_GROUPS = 16
MAX_TABLE = 1 << 17  # entries: 1 MiB per word


@dataclass(frozen=True, eq=False)
class Space:
    """The values that a row and layer can take.

    Attributes:
        experts, topk: of the model.
        groups, group_topk: blocks of experts and how many of them a token may use; 0 without a limit.
        set_bits, order_bits: width of a value; order_bits is 0 where slot order is dropped.
        stride: row length of the tables, a power of two.
        low, high: uint64[topk + 1, stride] words of C(c, i) at [i, c]; all ones where c is no expert.
        sets: sets within one choice of groups.
        total: values of a set.
        orders: k! where slot order is kept, else 1.
        rank_of_mask: uint16[2**groups] rank of a choice of groups by its bit mask.
        mask_of_rank: uint16[choices].
        group_of: uint8[experts] group of each expert.
    """

    experts: int
    topk: int
    groups: int
    group_topk: int
    set_bits: int
    order_bits: int
    stride: int
    low: np.ndarray
    high: np.ndarray
    sets: int
    total: int
    orders: int
    rank_of_mask: np.ndarray
    mask_of_rank: np.ndarray
    group_of: np.ndarray

    @property
    def bits(self) -> int:
        return self.set_bits + self.order_bits

    @property
    def short_topk(self) -> int:
        """Largest k for which the rank of k of the experts fits 63 bits, whatever they are."""
        pool = self.group_size * self.group_topk if self.groups else self.experts
        return next((i - 1 for i in range(1, self.topk + 1) if math.comb(pool, i) >= 1 << 63), self.topk)

    @property
    def group_size(self) -> int:
        return self.experts // self.groups if self.groups else self.experts

    def row_bytes(self, layers: int) -> int:
        """Bytes of a row of `layers` values; every row begins at a byte."""
        return -(-layers * self.bits // 8)


@lru_cache(maxsize=32)
def set_space(experts: int, topk: int, groups: int = 0, group_topk: int = 0, keep_order: bool = False) -> Space:
    """The space of `topk` distinct experts.

    Raises:
        TraceError: a group limit that cannot be, or more values than 128 bits hold.
    """
    limited = bool(groups)
    if limited and not (0 < group_topk <= groups <= MAX_GROUPS and experts % groups == 0 and topk <= group_topk * (experts // groups)):
        raise TraceError(
            f"a limit of {group_topk} of {groups} groups does not fit {experts} experts and top-{topk}: expected equal groups, at most "
            f"{MAX_GROUPS}, that hold {topk} experts"
        )
    pool = group_topk * (experts // groups) if limited else experts
    stride = 1 << max(0, pool - 1).bit_length()
    if not 0 < topk <= min(pool, MAX_TOPK) or (topk + 1) * stride > MAX_TABLE:
        raise TraceError(
            f"the set codec takes at most top-{MAX_TOPK} and {MAX_TABLE} table entries, got top-{topk} of {pool} experts; use 'packed'"
        )
    sets, choices = math.comb(pool, topk), math.comb(groups, group_topk) if limited else 1
    orders = math.factorial(topk) if keep_order else 1
    set_bits, order_bits = max(1, (sets * choices - 1).bit_length()), (orders - 1).bit_length()
    if set_bits + order_bits > MAX_BITS:
        raise TraceError(
            f"the set codec takes at most {MAX_BITS} bits, and top-{topk} of {experts} experts{' in order' if keep_order else ''} take "
            f"{set_bits + order_bits}; use 'packed'"
        )
    low, high = _words([[math.comb(c, i) if c < pool else (1 << 128) - 1 for c in range(stride)] for i in range(topk + 1)])
    masks = sorted(sum(1 << group for group in chosen) for chosen in combinations(range(groups), group_topk)) if limited else []
    rank_of_mask = np.zeros(1 << groups, np.uint16)
    rank_of_mask[masks] = np.arange(len(masks))
    return Space(
        experts, topk, groups, group_topk if limited else 0, set_bits, order_bits, stride, low, high, sets, sets * choices, orders,
        rank_of_mask, np.array(masks, np.uint16), (np.arange(experts) // (experts // groups if limited else experts)).astype(np.uint8),
    )  # fmt: skip


@lru_cache(maxsize=32)
def id_space(experts: int, topk: int) -> Space:
    """The space of one expert number after another: ⌈log2 experts⌉ bits each, in slot order. Values are ids, not sets."""
    none = np.zeros(0, np.uint16)
    words = np.zeros((0, 0), np.uint64)
    return Space(experts, topk, 0, 0, id_bits(experts) * topk, 0, 0, words, words, 0, 0, 1, none, none, none.astype(np.uint8))


def id_bits(experts: int) -> int:
    return max(1, (experts - 1).bit_length())


def words_of(values: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) uint64 words of numbers below 2**128."""
    low, high = _words([values])
    return low[0], high[0]


def _words(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    mask = (1 << 64) - 1
    low = np.array([[value & mask for value in row] for row in rows], np.uint64)
    high = np.array([[value >> 64 for value in row] for row in rows], np.uint64)
    return np.ascontiguousarray(low), np.ascontiguousarray(high)
