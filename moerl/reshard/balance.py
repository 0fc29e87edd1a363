"""Who sends what, where several trainer ranks hold the same bytes.

    Demand (blocks, each with a group of ranks that could send it) --level--> bytes that each rank takes of each group
                                                                  --choose_senders--> blocks with one sender each

Loads are levelled by block-coordinate descent on the sum of their squares: each step pours one group's demand onto the group's members
like water, given what they already carry for other groups. The demand of a group is then laid out in a line, receiver by receiver, and
cut at the members' quotas, so that a receiver hears from few senders; receivers on a member's own node come first.

All arithmetic is in integers: every rank must come to the same plan, whatever its processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moerl.reshard.boxes import cut, elements

_SWEEPS = 50
_COARSE = 64
"""Blocks smaller than 1 / _COARSE of a member's average quota are not cut to meet it exactly."""


@dataclass(frozen=True)
class Demand:
    """Blocks that must reach receivers: n rows.

    Attributes:
        group: int64[n] which ranks hold the block (index into a list of groups).
        receiver: int64[n] engine rank.
        boxes: int64[n, 3, 2].
        itemsize: int64[n] bytes per element on the wire.
    """

    group: np.ndarray
    receiver: np.ndarray
    boxes: np.ndarray
    itemsize: np.ndarray

    @property
    def nbytes(self) -> np.ndarray:
        return elements(self.boxes) * self.itemsize


def totals(index: np.ndarray, amounts: np.ndarray, size: int) -> np.ndarray:
    """int64[size] sums of `amounts` per index."""
    found = np.zeros(size, dtype=np.int64)
    np.add.at(found, index, amounts)
    return found


def level(groups: Sequence[np.ndarray], demand: np.ndarray, senders: int) -> list[np.ndarray]:
    """Spread each group's demand over its members so that the highest load is as low as it can be.

    Args:
        groups: ranks, int64, of each group.
        demand: int64[groups] bytes.

    Returns:
        For each group the bytes that each of its members sends, int64, adding up to its demand.
    """
    load = np.zeros(senders, dtype=np.int64)
    quotas = [np.zeros(len(ranks), dtype=np.int64) for ranks in groups]
    for _ in range(_SWEEPS):
        moved = 0
        for number, ranks in enumerate(groups):
            load[ranks] -= quotas[number]
            poured = _pour(load[ranks], int(demand[number]))
            moved += int(np.abs(poured - quotas[number]).sum())
            quotas[number] = poured
            load[ranks] += poured
        if moved * 1000 <= int(demand.sum()):
            break
    return quotas


def lower_bound(groups: Sequence[np.ndarray], demand: np.ndarray, senders: int) -> int:
    """No assignment has a smaller highest load (bytes): some ranks alone hold what nobody else can send."""
    bound = -(-int(demand.sum()) // senders)
    members = [frozenset(ranks.tolist()) for ranks in groups]
    unions = {frozenset().union(*(other for other in members if other & one)) for one in members}
    for candidates in {*members, *unions}:
        inside = sum(int(amount) for ranks, amount in zip(members, demand, strict=True) if ranks <= candidates)
        bound = max(bound, -(-inside // len(candidates)))
    return bound


def choose_senders(
    demand: Demand, groups: Sequence[np.ndarray], senders: int, sender_node: np.ndarray, receiver_node: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give every block a sender, cutting blocks where the balance asks for it.

    Returns:
        (row of `demand` that each resulting block is of [m], its box int64[m, 3, 2], its sender [m]).
    """
    nbytes = demand.nbytes
    quotas = level(groups, totals(demand.group, nbytes, len(groups)), senders)
    order = np.lexsort((demand.receiver, demand.group))
    bounds = np.searchsorted(demand.group[order], np.arange(len(groups) + 1))
    rows, boxes, chosen = [], [], []
    for number, ranks in enumerate(groups):
        mine = order[bounds[number] : bounds[number + 1]]
        if len(ranks) == 1:
            rows.append(mine)
            boxes.append(demand.boxes[mine])
            chosen.append(np.full(len(mine), ranks[0]))
            continue
        for index, part, members in _share_out(demand, mine, quotas[number], sender_node[ranks], receiver_node):
            rows.append(index)
            boxes.append(part)
            chosen.append(ranks[members])
    return np.concatenate(rows), np.concatenate(boxes), np.concatenate(chosen)


def _pour(load: np.ndarray, amount: int) -> np.ndarray:
    """Add `amount` to the lowest loads until they are level; returns what each gets."""
    order = np.argsort(load, kind="stable")
    low = load[order]
    filled = np.arange(1, len(low) + 1) * low - np.cumsum(low)  # what it takes to raise all lower ones to this one
    count = int(np.searchsorted(filled, amount, side="right"))
    surface, rest = divmod(amount + int(low[:count].sum()), count)
    poured = np.zeros_like(load)
    poured[order[:count]] = surface - low[:count]
    poured[order[:rest]] += 1
    return poured


def _share_out(demand: Demand, rows: np.ndarray, quota: np.ndarray, member_node: np.ndarray, receiver_node: np.ndarray):
    """Yield (rows, boxes, members) for one group's rows: first from members on the receiver's node, then from whoever has quota left."""
    room, boxes = quota.copy(), demand.boxes[rows]
    for node in np.intersect1d(member_node, receiver_node[demand.receiver[rows]]):
        here = receiver_node[demand.receiver[rows]] == node
        members = np.nonzero(member_node == node)[0]
        index, part, owner = _fill(boxes[here], demand.itemsize[rows[here]], room[members])
        index, done = rows[here][index], owner < len(members)
        yield index[done], part[done], members[owner[done]]
        np.subtract.at(room, members[owner[done]], elements(part[done]) * demand.itemsize[index[done]])
        rows, boxes = np.concatenate((index[~done], rows[~here])), np.concatenate((part[~done], boxes[~here]))
    if len(rows):
        index, part, owner = _fill(boxes, demand.itemsize[rows], np.maximum(room, 0))
        yield rows[index], part, np.minimum(owner, len(quota) - 1)


def _fill(boxes: np.ndarray, itemsize: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay blocks end to end and cut the line into lengths of `room` bytes.

    Returns:
        (block that each piece is of, box of the piece, which length it lies in: `len(room)` beyond the last).
    """
    sizes = elements(boxes) * itemsize
    ends = np.cumsum(sizes)
    starts, limits = ends - sizes, np.cumsum(room)
    owner = np.searchsorted(limits, starts + sizes // 2, side="right")
    straddling = np.minimum(np.searchsorted(ends, limits, side="right"), len(ends) - 1)
    inside = (starts[straddling] < limits) & (limits < ends[straddling])
    large = np.unique(straddling[inside & (sizes[straddling] > limits[-1] // len(room) // _COARSE)])
    if not len(large):
        return np.arange(len(boxes)), boxes, owner
    index, part, owners = [], [], []
    for number in large:
        for member, piece in _cut_at(boxes[number], int(itemsize[number]), limits - starts[number]):
            index.append(number)
            part.append(piece)
            owners.append(member)
    rest = np.setdiff1d(np.arange(len(boxes)), large)
    index = np.concatenate((rest, np.array(index, dtype=np.int64)))
    order = np.argsort(index, kind="stable")
    return (
        index[order],
        np.concatenate((boxes[rest], np.stack(part)))[order],
        np.concatenate((owner[rest], np.array(owners, dtype=np.int64)))[order],
    )


def _cut_at(box: np.ndarray, itemsize: int, limits: np.ndarray):
    """Yield (length, piece) of one block cut at those `limits` (bytes from its start, ascending) that lie inside it."""
    left, start, size = [box], 0, int(elements(box[None])[0]) * itemsize
    for member in np.nonzero((limits > 0) & (limits < size))[0]:
        taken, left = _take(left, (int(limits[member]) - start) // itemsize)
        for piece in taken:
            start += int(elements(piece[None])[0]) * itemsize
            yield int(member), piece
    last = int(np.searchsorted(limits, size - 1, side="right"))
    for piece in left:
        yield last, piece


def _take(boxes: list[np.ndarray], count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split a sequence of boxes after about `count` elements."""
    taken: list[np.ndarray] = []
    for number, box in enumerate(boxes):
        size = int(elements(box[None])[0])
        if size > count:
            before, after = cut(box, max(count, 0))
            return taken + before, after + boxes[number + 1 :]
        taken.append(box)
        count -= size
    return taken, []
