"""Calls to several actors at once: one result per actor, errors as moerl's own, every wait with a deadline.

Ray wraps what an actor raises; here the wrapping comes off again, so that callers handle `EngineError` and `TaskError` and
never see Ray.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from moerl.errors import EngineError, MoerlError


class Calls:
    """One pending call per engine.

    Args:
        method: for messages.
        names: of the engines, in order.
        died: makes the error for an engine whose actor is gone.
    """

    def __init__(self, method: str, names: Sequence[str], references: Sequence[ray.ObjectRef], died: Callable[[int], EngineError]):
        self._method, self._names, self._references, self._died = method, names, list(references), died

    def check(self) -> None:
        """Raise what an engine has already raised; return at once otherwise."""
        ready, _ = ray.wait(self._references, num_returns=len(self._references), timeout=0)
        for reference in ready:
            self._get(self._references.index(reference), 0.0)

    def wait(self, deadline: Any) -> list[Any]:
        """All results, in engine order.

        Args:
            deadline: `left(waiting_for)` gives the seconds left, or raises.

        Raises:
            EngineError: the first failure that comes to light, without waiting for the other engines.
        """
        pending = list(self._references)
        while pending:
            left = deadline.left(f"{self._method} on {', '.join(self._names[self._references.index(r)] for r in pending)}")
            _, pending = ray.wait(pending, num_returns=1, timeout=min(left, 1.0))
            self.check()
        return [self._get(i, 1.0) for i in range(len(self._references))]

    def failures(self, deadline: Any) -> list[str]:
        """Why engines failed, each in its own words, once all have answered or the deadline has passed; empty where none did."""
        found = []
        for i in range(len(self._references)):
            try:
                self._get(i, deadline.left(self._names[i]))
            except MoerlError as error:
                found.append(str(error))
        return found

    def _get(self, i: int, timeout_s: float) -> Any:
        try:
            return ray.get(self._references[i], timeout=max(timeout_s, 0.001))
        except GetTimeoutError as error:
            raise EngineError(f"{self._names[i]}: the result of {self._method} did not arrive within {timeout_s:g} s") from error
        except RayActorError as error:
            raise self._died(i) from error
        except RayTaskError as error:
            raise own_error(error, f"{self._names[i]}: {self._method}") from error


def own_error(error: RayTaskError, what: str) -> MoerlError:
    """The error that an actor raised on purpose, or an EngineError that quotes what it raised otherwise."""
    if isinstance(error.cause, MoerlError):
        return error.cause
    return EngineError(f"{what} failed unexpectedly: {error}")
