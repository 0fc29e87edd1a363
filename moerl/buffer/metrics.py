"""Figures of the asynchronous loop: events and levels in, one flat dict per step out, for `metrics.jsonl`.

Levels (completions running, groups ready, what the trainer does) hold from the moment they are set; their means are over time.
"""

from collections import Counter
from typing import Literal

from moerl.buffer.ledger import Delivered, Event, Refused, Wasted

Doing = Literal["train", "sync", "wait_groups", "wait_due", "other"]
"""What the trainer does. wait_groups: too few groups are ready; wait_due: enough are, but older ones must not be overtaken."""


class Level:
    """A quantity that is constant between two settings; its mean over time since the last `take`."""

    def __init__(self, now_s: float = 0.0, value: float = 0.0):
        self.value, self.highest = value, value
        self._since_s, self._begin_s, self._area = now_s, now_s, 0.0

    def set(self, now_s: float, value: float) -> None:
        self._area += self.value * (now_s - self._since_s)
        self._since_s, self.value = now_s, value
        self.highest = max(self.highest, value)

    def add(self, now_s: float, change: float) -> None:
        self.set(now_s, self.value + change)

    def take(self, now_s: float) -> tuple[float, float]:
        """(mean, highest) since the last call; the present value if no time has passed."""
        self.set(now_s, self.value)
        span = now_s - self._begin_s
        result = (self._area / span if span > 0 else self.value), self.highest
        self._begin_s, self._area, self.highest = now_s, 0.0, self.value
        return result


class Meter:
    """Adds up what happened since the last report.

    Attributes:
        running: completions that occupy a slot of an engine.
        ready: groups that are ready to be trained.
        paced: slots that are free although the engines could work, because no further group may be admitted.
    """

    def __init__(self, slots: int, now_s: float = 0.0):
        """`slots`: completions that all engines can run at once."""
        self.slots = slots
        self.running, self.ready, self.paced = Level(now_s), Level(now_s), Level(now_s)
        self._doing: Doing = "other"
        self._doing_since_s = self._begin_s = now_s
        self._engines: dict[int, tuple[int, float]] = {}  # engine -> (tokens, seconds paused) that it last said
        self._reset()

    def _reset(self) -> None:
        self._seconds: Counter[Doing] = Counter()
        self._lags: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()
        self._trained = self._cut = (0, 0)  # (tokens, completions) of delivered and of refused groups
        self._uniform = 0
        self._of_engines: dict[int, tuple[int, float]] = dict.fromkeys(self._engines, (0, 0.0))

    def engine(self, number: int, tokens: int, paused_s: float) -> None:
        """What an engine has done in all: response tokens returned, seconds paused for updates. Fewer than before: it was replaced."""
        before = self._engines.get(number, (0, 0.0))
        if tokens < before[0] or paused_s < before[1]:
            before = 0, 0.0
        done = self._of_engines.get(number, (0, 0.0))
        self._of_engines[number] = done[0] + tokens - before[0], done[1] + paused_s - before[1]
        self._engines[number] = tokens, paused_s

    def see(self, event: Event) -> None:
        """Take in an event of the scheduler."""
        match event:
            case Delivered(groups=groups):
                for group in groups:
                    self._lags[group.lag] += 1
                    self._uniform += group.uniform
                tokens = sum(sum(group.lengths) for group in groups)
                self._trained = self._trained[0] + tokens, self._trained[1] + sum(len(group.lengths) for group in groups)
            case Refused(reason=reason, tokens=tokens, samples=samples):
                self._refused[reason] += 1
                self._wasted[reason] += tokens
                self._cut = self._cut[0] + tokens, self._cut[1] + samples
            case Wasted(reason=reason, tokens=tokens):
                self._wasted[reason] += tokens

    def trainer(self, now_s: float, doing: Doing) -> None:
        """From now on the trainer does this."""
        self._seconds[self._doing] += now_s - self._doing_since_s
        self._doing, self._doing_since_s = doing, now_s

    def report(self, now_s: float) -> dict[str, float]:
        """The figures since the last report; counting begins anew.

        Under `engine/N/`, response tokens per second that engine N returned, and seconds that it was paused for updates; the rest under
        `buffer/`, where `lag_k` is the number of groups trained with lag k. A refused group's length counts what was generated until it
        was cut, so the true difference to trained ones is at least what `length_refused` and `length_trained` (tokens per completion) show.
        """
        self.trainer(now_s, self._doing)
        span = now_s - self._begin_s
        share = {doing: self._seconds[doing] / span if span > 0 else 0.0 for doing in ("train", "sync", "wait_groups", "wait_due")}
        (running, _), (ready, ready_highest), (paced, _) = (level.take(now_s) for level in (self.running, self.ready, self.paced))
        groups, tokens, wasted = self._lags.total(), self._trained[0], self._wasted.total()
        figures = {
            "engines_busy_share": running / self.slots,
            "engines_paced_share": paced / self.slots,
            "trainer_busy_share": share["train"],
            "trainer_sync_share": share["sync"],
            "trainer_waits_for_groups_s": float(self._seconds["wait_groups"]),
            "trainer_waits_for_due_s": float(self._seconds["wait_due"]),
            "ready_groups": ready,
            "ready_groups_highest": ready_highest,
            "lag_mean": sum(lag * count for lag, count in self._lags.items()) / groups if groups else 0.0,
            "lag_highest": float(max(self._lags, default=0)),
            **{f"lag_{lag}": float(count) for lag, count in sorted(self._lags.items())},
            "refused_groups": float(self._refused.total()),
            **{f"refused_{reason}": float(count) for reason, count in sorted(self._refused.items())},
            "uniform_trained": float(self._uniform),
            "wasted_tokens": float(wasted),
            **{f"wasted_{reason}_tokens": float(count) for reason, count in sorted(self._wasted.items())},
            "wasted_share": wasted / (wasted + tokens) if wasted else 0.0,
            **({"length_trained": tokens / self._trained[1]} if self._trained[1] else {}),
            **({"length_refused": self._cut[0] / self._cut[1]} if self._cut[1] else {}),
        }
        engines = {
            f"engine/{number}/{name}": value
            for number, (tokens, paused_s) in sorted(self._of_engines.items())
            for name, value in (("tokens_per_s", tokens / span if span > 0 else 0.0), ("paused_s", paused_s))
        }
        self._begin_s = now_s
        self._reset()
        return {f"buffer/{name}": value for name, value in figures.items()} | engines
