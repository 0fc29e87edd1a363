"""Sampling masks: their algebra against lists of lists, their bytes, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import RolloutError
from moerl.rollout.mask import SamplingMask, check, from_bytes, join, of_rows, place, take, to_bytes, unrestricted

VOCAB = 50
rows_of_ids = st.lists(st.lists(st.integers(0, VOCAB - 1), unique=True, max_size=6), max_size=8)


def lists(mask: SamplingMask) -> list[list[int]]:
    return [mask.ids[start:stop].tolist() for start, stop in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]


@given(rows_of_ids)
def test_rows_are_kept_in_ascending_order(rows: list[list[int]]) -> None:
    mask = of_rows(rows)
    assert lists(mask) == [sorted(row) for row in rows]
    assert (mask.ids.dtype, mask.offsets.dtype, mask.rows) == (np.uint32, np.int64, len(rows))


@given(rows_of_ids)
def test_bytes_and_back(rows: list[list[int]]) -> None:
    assert lists(from_bytes(to_bytes(of_rows(rows)))) == [sorted(row) for row in rows]


@given(rows_of_ids, rows_of_ids, st.data())
def test_packing_and_cutting(first: list[list[int]], second: list[list[int]], data: st.DataObject) -> None:
    """Two responses behind prompts of 2 and 1 rows, then any rows of that, as ranks take them."""
    packed = join([place(of_rows(first), 2, len(first) + 3), place(of_rows(second), 1, len(second) + 1)])
    wanted = [[], [], *map(sorted, first), [], [], *map(sorted, second)]
    assert lists(packed) == wanted
    chosen = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=12))
    assert lists(take(packed, np.array(chosen, np.int64))) == [wanted[row] for row in chosen]


@given(rows_of_ids, st.data())
def test_the_sampled_tokens_own_mask_is_accepted(rows: list[list[int]], data: st.DataObject) -> None:
    tokens = [data.draw(st.sampled_from(row)) if row else 7 for row in rows]
    mask = of_rows(rows)
    assert check(mask, np.array(tokens, np.int64), VOCAB, "sample 0") is mask


def test_rows_that_were_not_cut_may_be_any_token() -> None:
    assert lists(unrestricted(3)) == [[], [], []]
    check(unrestricted(3), np.array([1, 2, 3]), VOCAB, "sample 0")


def raw(ids: list[int], offsets: list[int]) -> SamplingMask:
    return SamplingMask(np.array(ids, np.uint32), np.array(offsets, np.int64))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (raw([1, 2, 3], [0, 2, 3]), r"row 0 does not hold token 5, which was sampled there \(2 rows"),
        (raw([5, 5, 6], [0, 2, 3]), "row 0 is not ascending, or names a token twice"),
        (raw([5, 4, 6], [0, 2, 3]), "row 0 is not ascending"),
        (raw([5, 6, 99], [0, 1, 3]), "row 1 names token 99 of a vocabulary of 50"),
        (raw([5, 6], [0, 2]), "2 offsets, .* do not divide 2 ids among 2 sampled tokens"),
        (raw([5, 6], [0, 1, 3]), "do not divide 2 ids"),
        (raw([5, 6], [1, 1, 2]), "do not divide"),
        (raw([5, 6], [0, 3, 2]), "do not divide"),
    ],
)
def test_what_does_not_belong_to_the_tokens_is_refused(mask: SamplingMask, message: str) -> None:
    with pytest.raises(RolloutError, match=f"sample 3: .*{message}"):
        check(mask, np.array([5, 6]), VOCAB, "sample 3")


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(RolloutError, match="99.*not ascending.*does not hold"):
        check(raw([4, 3, 99], [0, 2, 3]), np.array([5, 6]), VOCAB, "sample 3")


@pytest.mark.parametrize("row", [[-1], [1 << 32]])
def test_numbers_that_are_no_ids(row: list[int]) -> None:
    with pytest.raises(RolloutError, match="expected numbers from 0 to 4294967295"):
        of_rows([[3], row])


def test_damaged_or_foreign_bytes_are_refused() -> None:
    record = to_bytes(of_rows([[1, 2], [3]]))
    for position in range(len(record)):
        changed = bytearray(record)
        changed[position] ^= 1
        with pytest.raises(RolloutError):
            from_bytes(bytes(changed))
    for size in range(len(record)):
        with pytest.raises(RolloutError):
            from_bytes(record[:size])
