"""Three gloo ranks that act as a crew. Prints "crew right" from every rank, or what was wrong."""

import time

import torch.distributed as dist

from moerl.errors import EngineError, ReshardError
from moerl.reshard import crew
from moerl.reshard.deadline import Deadline


def fails(work) -> str:
    try:
        work()
    except ReshardError as error:
        return str(error)
    raise AssertionError("it should have failed")


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = crew.rank_and_world()
    deadline = Deadline("a test", 60)
    calls: list[int] = []

    assert crew.first(lambda: calls.append(rank) or {"answer": 42}, deadline) == {"answer": 42}
    assert calls == ([0] if rank == 0 else []), "only rank 0 works"
    assert crew.all(lambda: rank * 10, deadline) == [0, 10, 20]
    assert crew.all(lambda: bytes(1_000_000 * rank), deadline)[2] == bytes(2_000_000)

    def trouble(who: set[int], error: Exception):
        if rank in who:
            raise error
        return rank

    assert fails(lambda: crew.first(lambda: trouble({0}, EngineError("no engine")), deadline)) == "no engine"
    assert fails(lambda: crew.all(lambda: trouble({1}, ReshardError("one is ill")), deadline)) == "one is ill"
    same = fails(lambda: crew.all(lambda: trouble({0, 1, 2}, ReshardError("all are ill")), deadline))
    assert same == "all are ill", "the same words are said once"
    both = fails(lambda: crew.all(lambda: trouble({1, 2}, ReshardError(f"rank {rank} is ill")), deadline))
    assert both == "rank 1 is ill; rank 2 is ill"
    unexpected = fails(lambda: crew.all(lambda: trouble({2}, ZeroDivisionError("by nought")), deadline))
    assert unexpected == "ZeroDivisionError: by nought"
    assert crew.all(lambda: rank, deadline) == list(range(world)), "after failures they are still in step"

    late = Deadline("a late test", 0.5)
    start = time.monotonic()
    answers = crew.all(lambda: time.sleep(2.0 if rank == 1 else 0.0) or rank, late)
    assert answers == [0, 1, 2], "a rank's account is waited for a little longer than its deadline"
    assert time.monotonic() - start < 20
    print("crew right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
