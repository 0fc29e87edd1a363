"""The trainer's ranks acting as one: what fails on one rank fails on all of them, with the same error.

    first(work): rank 0 works, everybody gets the result      all(work): everybody works, everybody gets everybody's result

Every rank makes the same calls in the same order. Works over the default process group, gloo or NCCL, or alone without one.
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moerl.errors import MoerlError, ReshardError
from moerl.reshard.deadline import Deadline

_GRACE_S = 30.0
"""Others wait this much longer than a working rank, so that its account of a failure still reaches them."""


def rank_and_world() -> tuple[int, int]:
    """This process's rank in the default group and the group's size; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def group_device() -> torch.device:
    """Where tensors of the default group's collectives must live."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def first[T](work: Callable[[], T], deadline: Deadline) -> T:
    """Rank 0's result of `work`, on every rank; only rank 0 calls it.

    Raises:
        ReshardError: what rank 0 ran into, on every rank; rank 0's own exception is its cause there.
    """
    rank, world = rank_and_world()
    outcome = _attempt(work) if rank == 0 else None
    if world > 1:
        outcome = _broadcast(outcome, deadline)
    return _results([outcome])[0]


def all[T](work: Callable[[], T], deadline: Deadline) -> list[T]:
    """Every rank's result of its own `work`, in rank order, on every rank.

    Raises:
        ReshardError: what some ranks ran into, on every rank; a rank's own exception is its cause there.
    """
    rank, world = rank_and_world()
    outcomes = [_attempt(work)]
    if world > 1:
        mine, outcomes = outcomes[0], []
        for source in range(world):
            outcomes.append(_broadcast(mine if source == rank else None, deadline, source))
    return _results(outcomes)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it, or they wait for nothing
        return None, error


def _results(outcomes: list[tuple[Any, Exception | None]]) -> list[Any]:
    errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    if not errors:
        return [value for value, _ in outcomes]
    rank, _ = rank_and_world()
    said = dict.fromkeys(str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}" for error in errors.values())
    raise ReshardError("; ".join(said)) from (errors[rank] if rank in errors else next(iter(errors.values())))


def _broadcast(outcome: Any, deadline: Deadline, source: int = 0) -> Any:
    device, (rank, _) = group_device(), rank_and_world()
    payload = _pickled(outcome) if rank == source else b""
    size = torch.tensor([len(payload)], device=device)
    _wait(dist.broadcast(size, source, async_op=True), deadline, source)
    flat = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        if payload
        else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    _wait(dist.broadcast(flat, source, async_op=True), deadline, source)
    return outcome if rank == source else pickle.loads(flat.cpu().numpy().tobytes())


def _pickled(outcome: tuple[Any, Exception | None]) -> bytes:
    """An exception travels as its words; its class stays where it was raised, unless it is ours."""
    value, error = outcome
    if error is not None:
        error = ReshardError(str(error)) if isinstance(error, MoerlError) else ReshardError(f"{type(error).__name__}: {error}")
    return pickle.dumps((value, error))


def _wait(work: dist.Work, deadline: Deadline, source: int) -> None:
    grace = Deadline(deadline.what, deadline.timeout_s + _GRACE_S, deadline.start)
    who = f"trainer rank {source}"
    try:
        work.wait(timedelta(seconds=grace.left(who)))
    except RuntimeError as error:
        grace.left(who)
        raise ReshardError(f"{deadline.what}: waited for {who}, but the connection failed: {error}") from error
