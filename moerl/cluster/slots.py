"""Who occupies the engines' slots: groups, as far as the stream knows, and what engines say of themselves.

    groups that were given to an engine --Slots--> completions that may run there; where a further group fits
    engines --Look, a few times a second--> which of those have ended though others of their group still run

A group is one call of an engine and returns as a whole, so its quick completions would seem to hold their slots until its slowest has
ended: where lengths have a long tail, for most of the time. Invariant: without a look, or where it is in doubt, slots count as taken.
"""

from collections import Counter
from dataclasses import dataclass

SETTLE_S = 1.0
"""How long a group may take to reach an engine, before which a look says nothing of it."""


@dataclass(frozen=True)
class Look:
    """An engine at one moment.

    Attributes:
        running: requests that it runs or has waiting.
        tokens: response tokens of all calls that have returned.
        paused_s: seconds that it was paused for weight updates.
    """

    running: int
    tokens: int
    paused_s: float


@dataclass(frozen=True)
class _Held:
    engine: int
    completions: int
    since_s: float


class Slots:
    """Slots of some engines, which are numbered.

    Args:
        limit: completions that an engine may be given at once.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._groups: dict[int, _Held] = {}
        self._ended: Counter[int] = Counter()

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def __len__(self) -> int:
        """Groups that occupy slots."""
        return len(self._groups)

    def occupy(self, group: int, engine: int, completions: int, now_s: float) -> None:
        self._groups[group] = _Held(engine, completions, now_s)

    def release(self, group: int) -> None:
        """The group's call is over. Safe to call twice."""
        held = self._groups.pop(group, None)
        if held is not None:
            # All of its completions have ended, and may have been counted as such.
            self._ended[held.engine] = max(0, self._ended[held.engine] - held.completions)

    def settled(self, now_s: float) -> Counter[int]:
        """Engine -> completions of groups that must have reached it."""
        return self._given(now_s - SETTLE_S)

    def looked(self, engine: int, settled: int, running: int) -> None:
        """An engine said what it runs, after `settled` was counted."""
        self._ended[engine] = max(0, min(settled, self._given()[engine]) - running)

    def load(self) -> Counter[int]:
        """Engine -> completions that may run there."""
        given = self._given()
        return Counter({engine: max(0, count - self._ended[engine]) for engine, count in given.items()})

    def room(self, engines: int, completions: int) -> int | None:
        """The engine with the least to do, if so many completions more fit there."""
        load = self.load()
        engine = min(range(engines), key=load.__getitem__)
        return engine if load[engine] + completions <= max(self._limit, completions) else None

    def _given(self, until_s: float = float("inf")) -> Counter[int]:
        given: Counter[int] = Counter()
        for held in self._groups.values():
            if held.since_s <= until_s:
                given[held.engine] += held.completions
        return given
