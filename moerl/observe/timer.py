"""Seconds by phase of a step: `with timer("rollout"): ...`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up wall-clock seconds by phase.

    A phase that runs inside another counts in both, so name inner ones `outer/inner`. A phase that raises still counts.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None):
        """`on_phase` is called with each phase's name as it begins, for instance to show it."""
        self._seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._on_phase is not None:
            self._on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            before = self._seconds.setdefault(phase, 0.0)
            self._seconds[phase] = before + time.perf_counter() - start

    def take(self, prefix: str = "time/") -> dict[str, float]:
        """Seconds by phase since the last call, in the order in which the phases first ran, under `prefix`."""
        taken, self._seconds = self._seconds, {}
        return {prefix + phase: seconds for phase, seconds in taken.items()}
