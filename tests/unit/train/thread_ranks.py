"""Ranks as threads of one process, for functions that communicate only through what they are given."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

Collective = Callable[[torch.Tensor], torch.Tensor]


def on_ranks[T](size: int, work: Callable[[int, Collective, Collective], T]) -> list[T]:
    """work(rank, sum over ranks, maximum over ranks) of each rank; ranks that don't make the same calls break the barrier."""
    barrier, slots = Barrier(size, timeout=20), [None] * size

    def meet(rank: int, combine: Callable[[torch.Tensor], torch.Tensor]) -> Collective:
        def collective(values: torch.Tensor) -> torch.Tensor:
            assert not values.requires_grad, "ranks exchange values, not graphs"
            slots[rank] = values.clone()
            barrier.wait()
            result = combine(torch.stack(slots))
            barrier.wait()
            return result

        return collective

    def one(rank: int) -> Any:
        return work(rank, meet(rank, lambda all_: all_.sum(0)), meet(rank, lambda all_: all_.amax(0)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
