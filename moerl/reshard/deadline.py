"""`Deadline`: one budget of seconds shared by all waits of an operation, so that their sum is bounded too."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moerl.errors import WaitTimeout

_POLL_S = (0.0005, 0.02)


@dataclass(frozen=True)
class Deadline:
    """Attributes:
    what: the operation, as it reads in an error.
    timeout_s: seconds from construction.
    """

    what: str
    timeout_s: float
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start

    def left(self, waiting_for: str) -> float:
        """Seconds left.

        Raises:
            WaitTimeout: none is left; says what was waited for.
        """
        left = self.timeout_s - self.elapsed_s
        if left <= 0:
            raise WaitTimeout(
                f"{self.what}: waited for {waiting_for}, but the deadline of {self.timeout_s:g} s has passed; "
                "raise sync.timeout_s if the machine is merely slow"
            )
        return left

    def poll(self, ready: Callable[[], bool], waiting_for: str) -> None:
        """Return once `ready()` is true; it may raise to end the wait early.

        Raises:
            WaitTimeout: the deadline passed first.
        """
        pause, longest = _POLL_S
        while not ready():
            time.sleep(min(pause, self.left(waiting_for)))
            pause = min(2 * pause, longest)
