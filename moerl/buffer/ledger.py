"""What was promised, delivered and refused: one JSON line per event in the run folder's `ledger/groups.jsonl`.

    events of the scheduler --append--> groups.jsonl --replay--> what a resumed run still owes

A group is named by its position in the endless stream of prompts (`rollout.curriculum`). A line counts once its newline is on file; a
torn last line is cut off when the ledger is opened again, and what it would have said has not happened, since a line is written before
anything acts on it. A step's delivery is one line, so that no crash delivers half a step. Delivered groups belong to the step
that trains them: a run that resumes at step *c* says so, which takes back the deliveries of step *c* and later.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moerl.errors import LedgerError

NAME = "groups.jsonl"


class _Event(msgspec.Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    pass


class Admitted(_Event, frozen=True, tag="admitted"):
    """A group was promised, while the engines served `version`."""

    position: int
    prompt: int
    version: int
    at_s: float


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group of a delivered step.

    Attributes:
        lengths: response tokens of each of its samples.
        lag: of its oldest token, in versions.
        uniform: its rewards are all the same, so that it teaches nothing.
    """

    position: int
    lengths: tuple[int, ...]
    lag: int
    uniform: bool = False


class Delivered(_Event, frozen=True, tag="delivered"):
    """All groups of a step were handed to the trainer."""

    step: int
    groups: tuple[Delivery, ...]
    at_s: float


class Refused(_Event, frozen=True, tag="refused"):
    """A group will not be trained.

    Attributes:
        reason: a word, such as uniform, late, timeout or failed.
        tokens: response tokens that were generated for it.
        samples: completions those tokens belong to, cut ones included.
    """

    position: int
    reason: str
    tokens: int
    samples: int
    at_s: float


class Wasted(_Event, frozen=True, tag="wasted"):
    """Tokens that belong to no sample of a trained group, though the group itself may be trained: over-sampled or failed samples."""

    position: int
    reason: str
    tokens: int


class Opened(_Event, frozen=True, tag="opened"):
    """A run began or resumed: it trains `step` next. What it was still owed is admitted again; deliveries of `step` and later are
    taken back. In the first line, `position` is where the ledger's part of the stream begins.
    """

    step: int
    position: int


Event = Admitted | Delivered | Refused | Wasted | Opened

_decoder = msgspec.json.Decoder(Event)


@dataclass
class State:
    """What the events so far amount to.

    Attributes:
        next_position: first position of the stream that was never admitted.
        owed: positions that were admitted and are neither delivered nor refused.
        lapsed: those of them that a run which has ended had admitted; they must be admitted again.
        delivered: position -> the step that trains it.
        refused: position -> reason.
        first_step: the step at which the ledger begins.
        steps: the steps that were delivered.
    """

    next_position: int = 0
    owed: set[int] = field(default_factory=set)
    lapsed: set[int] = field(default_factory=set)
    delivered: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    first_step: int | None = None
    steps: set[int] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Take in the next event.

        Raises:
            LedgerError: it contradicts those before it.
        """
        match event:
            case Opened(step=step, position=position):
                self._open(step, position)
            case Admitted(position=position):
                if position < self.next_position and position not in self.lapsed:
                    raise LedgerError(f"group {position} was admitted twice")
                self.lapsed.discard(position)
                self.owed.add(position)
                self.next_position = max(self.next_position, position + 1)
            case Delivered(step=step, groups=groups):
                if step in self.steps:
                    raise LedgerError(f"step {step} was delivered twice")
                for group in groups:
                    self._end(group.position, f"delivered to step {step}")
                    self.delivered[group.position] = step
                self.steps.add(step)
            case Refused(position=position, reason=reason):
                self._end(position, f"refused ({reason})")
                self.refused[position] = reason

    def _open(self, step: int, position: int) -> None:
        if self.first_step is None:
            self.first_step, self.next_position = step, position
        back = {position for position, trained in self.delivered.items() if trained >= step}
        self.delivered = {position: trained for position, trained in self.delivered.items() if trained < step}
        self.steps = {other for other in self.steps if other < step}
        self.owed |= back
        self.lapsed = set(self.owed)

    def _end(self, position: int, how: str) -> None:
        if position not in self.owed or position in self.lapsed:
            if position in self.delivered:
                was = f"delivered to step {self.delivered[position]}"
            else:
                was = f"refused ({self.refused[position]})" if position in self.refused else "not admitted"
            raise LedgerError(f"group {position} was {how}, but had been {was}")
        self.owed.discard(position)


def replay(path: Path) -> State:
    """The state that the complete lines of a ledger amount to; a torn last line counts for nothing, and no file for an empty ledger.

    Raises:
        LedgerError: a line is damaged, or contradicts those before it.
    """
    return _read(path)[0]


class Ledger:
    """An open ledger: every event is on file (flushed) when `append` returns, and on disk (fsync) if it is a delivery."""

    def __init__(self, folder: Path, *, step: int = 0, position: int = 0):
        """Continue the ledger in `folder`, or begin one.

        Args:
            step: the first step that this run will train; deliveries of it and of later ones are taken back.
            position: where in the stream a new ledger begins; one that exists knows better.

        Raises:
            LedgerError: damaged, contradictory, or without the deliveries of the steps before `step`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self.state, complete = _read(self.path)
        begins = self.state.first_step if self.state.first_step is not None else step
        if missing := sorted(set(range(begins, step)) - self.state.steps):
            raise LedgerError(
                f"{self.path} holds no delivery of step {missing[0]}, so it is not known what the checkpoint before step {step} was "
                "trained on; resume from a checkpoint before that step, or start a new run.dir"
            )
        self._file = self.path.open("ab")
        self._file.truncate(complete)
        self.append(Opened(step, position))

    def append(self, event: Event) -> None:
        """Write one event; it is taken into `state` first, which refuses what contradicts the past."""
        self.state.apply(event)
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()
        if isinstance(event, Delivered):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def events(path: Path) -> Iterator[Event]:
    """The complete lines of a ledger, oldest first; see `replay`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise LedgerError(f"{path} line {number} is damaged: {error}; only the last line may be torn") from error


def _read(path: Path) -> tuple[State, int]:
    """(state, bytes of all complete lines)"""
    state = State()
    for number, event in enumerate(events(path), 1):
        try:
            state.apply(event)
        except LedgerError as error:
            raise LedgerError(f"{path} line {number}: {error}") from error
    raw = path.read_bytes() if path.is_file() else b""
    return state, raw.rfind(b"\n") + 1
