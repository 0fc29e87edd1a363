"""Which tokens the engine's top-p or top-k left to choose from, at each position it sampled: a sparse record, row after row.

    engine's lists --of_rows--> SamplingMask of a response --check, to_bytes--> bytes in the rollout --from_bytes-->
        --place, join, take--> rows of a packed microbatch, cut as its tokens are --> train.objective.masked_logprobs

Row i of a response's mask is of its token i. In a microbatch row i is of the label of position i, and rows without any token are not
restricted: those of prompts and padding, and of tokens that were sampled from the whole vocabulary. Invariants of a checked mask: ids
ascend within a row and are below the vocabulary's size, and each sampled token is in its own row. numpy only.

A position takes 4 bytes and 4 more for each token left; with top-p 0.95 that is a few tokens at most positions of a trained policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from moerl.errors import RolloutError, TraceError
from moerl.routing.record import open_record, seal

MAGIC = b"MOEMASK1"
ANY_VOCABULARY = 1 << 32
"""Size to check against where the ids were checked against the model's when they were recorded."""


@dataclass(frozen=True)
class SamplingMask:
    """Attributes:
    ids: uint32[m] token ids, row after row.
    offsets: int64[n + 1] where each row begins in `ids`; from 0 to m.
    """

    ids: np.ndarray
    offsets: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64[n] tokens left in each row."""
        return np.diff(self.offsets)


class _Header(msgspec.Struct, frozen=True):
    rows: int
    ids: int


def of_rows(rows: Sequence[Sequence[int]]) -> SamplingMask:
    """From the ids of each position in any order, as SGLang's `meta_info["output_token_sampling_mask"]` lists them.

    Raises:
        RolloutError: an id that is no unsigned 32-bit number.
    """
    flat = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
    if len(flat) and not 0 <= flat.min() <= flat.max() < 1 << 32:
        raise RolloutError(f"a sampling mask names tokens from {flat.min()} to {flat.max()}, expected numbers from 0 to {(1 << 32) - 1}")
    offsets = _offsets(np.array([len(row) for row in rows], np.int64))
    order = np.lexsort((flat, np.repeat(np.arange(len(rows)), np.diff(offsets))))
    return SamplingMask(flat[order].astype(np.uint32), offsets)


def unrestricted(rows: int) -> SamplingMask:
    """Rows that may be any token."""
    return SamplingMask(np.zeros(0, np.uint32), np.zeros(rows + 1, np.int64))


def check(mask: SamplingMask, tokens: np.ndarray, vocab: int, name: str) -> SamplingMask:
    """The mask itself, if it can be that of the sampled tokens int[n], one per row.

    Raises:
        RolloutError: it is not; the message starts with `name` and lists all that is wrong.
    """
    offsets = mask.offsets
    if len(offsets) != len(tokens) + 1 or offsets[0] != 0 or offsets[-1] != len(mask.ids) or (np.diff(offsets) < 0).any():
        raise RolloutError(
            f"{name}: the sampling mask's {len(offsets)} offsets, from {offsets[:1]} to {offsets[-1:]}, do not divide {len(mask.ids)} ids "
            f"among {len(tokens)} sampled tokens"
        )
    wrong, row_of = [], np.repeat(np.arange(mask.rows), mask.lengths)
    if len(beyond := np.flatnonzero(mask.ids >= vocab)):
        wrong.append(
            f"row {row_of[beyond[0]]} names token {mask.ids[beyond[0]]} of a vocabulary of {vocab} ({len(beyond)} ids are out of range)"
        )
    unsorted = (row_of[1:] == row_of[:-1]) & (mask.ids[1:] <= mask.ids[:-1])
    if unsorted.any():
        wrong.append(f"row {row_of[1:][unsorted][0]} is not ascending, or names a token twice ({int(unsorted.sum())} such places)")
    holds = np.bincount(row_of, mask.ids == np.asarray(tokens)[row_of], minlength=mask.rows) > 0
    if len(lost := np.flatnonzero(~holds & (mask.lengths > 0))):
        wrong.append(f"row {lost[0]} does not hold token {tokens[lost[0]]}, which was sampled there ({len(lost)} rows do not hold theirs)")
    if wrong:
        raise RolloutError(f"{name}: the sampling mask is not that of its tokens: {'; '.join(wrong)}")
    return mask


def join(masks: Sequence[SamplingMask]) -> SamplingMask:
    """One after another."""
    lengths = [np.zeros(0, np.int64), *(mask.lengths for mask in masks)]
    ids = [np.zeros(0, np.uint32), *(mask.ids for mask in masks)]
    return SamplingMask(np.concatenate(ids), _offsets(np.concatenate(lengths)))


def place(mask: SamplingMask, first: int, rows: int) -> SamplingMask:
    """As rows first, first + 1, ... of `rows`; the others are unrestricted."""
    return join([unrestricted(first), mask, unrestricted(rows - first - mask.rows)])


def take(mask: SamplingMask, rows: np.ndarray) -> SamplingMask:
    """The rows int[k], in their order: how a rank's part of a microbatch is cut."""
    lengths = mask.lengths[rows]
    offsets = _offsets(lengths)
    where = np.arange(offsets[-1]) + np.repeat(mask.offsets[:-1][rows] - offsets[:-1], lengths)
    return SamplingMask(mask.ids[where], offsets)


def to_bytes(mask: SamplingMask) -> bytes:
    """One record, with a checksum: the length of each row, then the ids, as little-endian uint32."""
    words = np.concatenate([mask.lengths.astype("<u4"), mask.ids.astype("<u4")])
    return seal(MAGIC, _Header(mask.rows, len(mask.ids)), words.view(np.uint8))


def from_bytes(record: bytes) -> SamplingMask:
    """The mask of a record; it still has to be checked against its tokens.

    Raises:
        RolloutError: not a sampling mask, or a damaged one.
    """
    try:
        header, payload = open_record(record, MAGIC, _Header, "sampling mask")
    except TraceError as error:
        raise RolloutError(str(error)) from error
    if min(header.rows, header.ids) < 0 or 4 * (header.rows + header.ids) != len(payload):
        raise RolloutError(f"the sampling mask claims {header.rows} rows and {header.ids} ids, but holds {len(payload)} bytes of them")
    words = np.frombuffer(payload, "<u4") if len(payload) else np.zeros(0, "<u4")
    offsets = _offsets(words[: header.rows].astype(np.int64))
    if offsets[-1] != header.ids:
        raise RolloutError(f"the sampling mask's rows take {offsets[-1]} ids, but it holds {header.ids}")
    return SamplingMask(words[header.rows :].astype(np.uint32, copy=False), offsets)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
