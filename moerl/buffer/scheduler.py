"""Which prompts may start, which groups form a step, and what becomes of the rest. Explicit events in, decisions out.

    wants -> admit -> next_waiting -> dispatched -> sample_done | sample_failed ... -> scored -> take
                                                         overdue, late in take -> (abort them) -> refuse

Pacing: every admitted group has a last step in which it may be trained, `oldest version + max_lag`; while it has no token, that is
the version that the engines serve. `wants` admits only what the steps up to there have room for:

    admitted and not yet trained  <  prompts_per_step × (served version + max_lag - next step + 1)

and `take` hands out the oldest ready groups, but only if those that remain can still all be trained in time: for every version v, groups
with a token as old as v or older must fit into the steps up to v + max_lag. Taking the oldest of the ready ones first keeps that
true whenever any choice does; where it is not true, the policy says what happens. So nothing has to be generated and then dropped, and
with max_lag 0 every step consists of the next prompts of the stream in order, all sampled by the weights that it trains.

Order: prompts admitted at an older version start first, among them those that were long before; a prompt can be overtaken only by
prompts admitted at the same version.

Over-sampled completions that come too late are waste, and are not kept for the prompt's next visit: that is an epoch away, so
their tokens would be older than any useful lag, and a group that begins with completions known to be long is no sample of the policy.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moerl.buffer.ledger import Admitted, Delivered, Delivery, Event, Refused, State, Wasted
from moerl.config.schema import Buffer
from moerl.errors import ConfigError, LedgerError

Stage = Literal["waiting", "running", "scoring", "ready", "aborting"]
STAGES: tuple[Stage, ...] = ("waiting", "running", "scoring", "ready", "aborting")

Fate = Literal["running", "again", "complete", "aborting"]
"""Of a group after an event of one of its completions. running: nothing to do. again: begin that completion anew. complete: abort what
still runs of it, and score it. aborting: abort what still runs of it, then `refuse` it."""


@dataclass(slots=True)
class Ticket:
    """A group between its admission and its end.

    Attributes:
        position: in the stream of prompts.
        admitted: version that the engines served then.
        oldest: oldest version that its tokens may have; while it waits, None.
        started_s: when it was dispatched; infinity while it has no engine.
        running: completion -> served version when it began.
        lengths: response tokens of those that have ended.
        kept: oldest version among those.
        goal: completions that make it complete.
        retries: fresh completions begun.
        reason: why it is being aborted.
    """

    position: int
    prompt: int
    admitted: int
    goal: int
    stage: Stage = "waiting"
    oldest: int | None = None
    started_s: float = 0.0
    running: dict[int, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    kept: int | None = None
    retries: int = 0
    uniform: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Formed:
    """A step's groups, in the order of the stream.

    Attributes:
        late: running groups that were due and that the step does not wait for: abort them, then `refuse` them.
        capped: uniform groups are among them, because max_resamples_per_step was reached.
    """

    step: int
    groups: tuple[Delivery, ...]
    late: tuple[int, ...] = ()
    capped: bool = False


@dataclass(frozen=True)
class Wait:
    """A step that can't be formed yet.

    Attributes:
        missing: groups that must become ready, at least.
        blockers: positions of which some must become ready first; until one does, asking again is useless.
        due: the step has enough ready groups, but others must not be overtaken.
        text: who waits for whom, for the wait's message.
    """

    step: int
    missing: int
    blockers: frozenset[int]
    due: bool
    text: str


class Scheduler:
    """The state between the engines and the trainer of one run. Not thread-safe; times are seconds of the caller's clock."""

    def __init__(
        self,
        settings: Buffer,
        *,
        prompts_per_step: int,
        group_size: int,
        record: Callable[[Event], object],
        state: State | None = None,
        step: int = 0,
    ):
        """Begin or resume.

        Args:
            record: receives every event before it takes effect, for instance `Ledger.append`.
            state: what the ledger says; what it owes is admitted first.
            step: the next step, and so the trainer's version.

        Raises:
            ConfigError: the buffer cannot hold one step's groups.
        """
        capacity = settings.capacity_groups
        if capacity is not None and capacity < prompts_per_step:
            raise ConfigError(f"buffer.capacity_groups {capacity} cannot hold the {prompts_per_step} groups of one step; raise it")
        self.settings, self.prompts_per_step, self.group_size, self.step = settings, prompts_per_step, group_size, step
        self.version: int | None = None  # what all engines serve; None until the first publication
        self._record = record
        self._owed = sorted(state.owed, reverse=True) if state else []
        self._next_position = state.next_position if state else 0
        self._stages: dict[Stage, dict[int, Ticket]] = {stage: {} for stage in STAGES}
        self._ages: dict[Stage, Counter[int | None]] = {stage: Counter() for stage in STAGES}  # by oldest version
        self._order: list[tuple[int, float, int]] = []  # heap of the waiting ones
        self._lengths: dict[int, float] = {}  # prompt -> running average of its longest completion
        self._longest_sum, self._longest_count = 0.0, 0
        self._resampled = 0  # uniform groups refused since the last step was formed

    # ---- engines: versions, admission, dispatch

    def published(self, version: int) -> None:
        """All engines serve at least `version`, completely."""
        if not (self.version or 0) <= version <= self.step:
            raise LedgerError(f"engines cannot serve version {version}: they served {self.version}, and the trainer is at {self.step}")
        self.version = version

    def outstanding(self) -> int:
        """Groups that were admitted and will be trained."""
        return sum(len(self._stages[stage]) for stage in STAGES if stage != "aborting")

    def levels(self) -> dict[Stage, int]:
        """Groups by stage."""
        return {stage: len(members) for stage, members in self._stages.items()}

    def room(self) -> int:
        """How many groups may be admitted now."""
        if self.version is None:
            return 0
        limit = self.prompts_per_step * (self.version + self.settings.max_lag - self.step + 1)
        if self.settings.capacity_groups is not None:
            limit = min(limit, self.settings.capacity_groups)
        return max(0, limit - self.outstanding())

    def wants(self) -> list[int]:
        """Positions of the stream to admit now, in this order: first what a resumed run still owes."""
        room = self.room()
        again = self._owed[::-1][:room]
        return again + list(range(self._next_position, self._next_position + room - len(again)))

    def admit(self, position: int, prompt: int, now_s: float) -> None:
        """Promise the group of the first position that `wants` named."""
        if not self.room() or position != (self._owed[-1] if self._owed else self._next_position):
            raise LedgerError(f"group {position} may not be admitted now; `wants` names {self.wants()[:3]}")
        version = self._served()
        self._record(Admitted(position, prompt, version, now_s))
        if self._owed:
            self._owed.pop()
        else:
            self._next_position = position + 1
        self._place(Ticket(position, prompt, version, self.group_size), "waiting")
        length = self.expected_length(prompt) if self.settings.longest_first else 0.0
        heapq.heappush(self._order, (version, -length, position))

    def expected_length(self, prompt: int) -> float:
        """Running average of the prompt's longest completion in tokens; of an unseen prompt, the mean over all groups so far."""
        return self._lengths[prompt] if prompt in self._lengths else self._longest_sum / max(1, self._longest_count)

    def next_waiting(self) -> int | None:
        """Position of the admitted group to dispatch next, as soon as an engine can start it."""
        return self._order[0][2] if self._order else None

    def dispatched(self, position: int, now_s: float) -> range:
        """The group begins; returns the completions to generate, which are numbered."""
        if position != self.next_waiting():
            raise LedgerError(f"group {position} may not be dispatched now; next is {self.next_waiting()}")
        heapq.heappop(self._order)
        ticket, version = self._stages["waiting"][position], self._served()
        samples = range(self.group_size + self.settings.oversample)
        ticket.started_s, ticket.running = now_s, dict.fromkeys(samples, version)
        self._place(ticket, "running", version)
        return samples

    # ---- what happens to a running group

    def sample_done(self, position: int, sample: int, length: int, oldest_version: int) -> Fate:
        """A completion of `length` tokens has ended, whose oldest token is of `oldest_version`."""
        ticket = self._ticket(position, "running", "aborting")
        began = self._end_sample(ticket, sample)
        if not began <= oldest_version <= self.step:
            raise LedgerError(
                f"group {position}: a completion that began at version {began} cannot have tokens of version {oldest_version}, "
                f"with the trainer at {self.step}"
            )
        ticket.lengths.append(length)
        ticket.kept = oldest_version if ticket.kept is None else min(ticket.kept, oldest_version)
        return self._progress(ticket)

    def sample_failed(self, position: int, sample: int, reason: str, tokens: int = 0) -> Fate:
        """A completion came to nothing after `tokens` tokens, for a reason that has nothing to do with its length."""
        ticket = self._ticket(position, "running", "aborting")
        self._end_sample(ticket, sample)
        if tokens:
            self._record(Wasted(position, reason, tokens))
        left = len(ticket.lengths) + len(ticket.running)
        if ticket.stage == "running" and left < ticket.goal:
            if ticket.retries < self.settings.sample_retries:
                ticket.retries += 1
                ticket.running[sample] = self._served()
                self._age(ticket)
                return "again"
            ticket.goal = left
            if left < self.settings.min_group:
                self._abort(ticket, "failed")
        return self._progress(ticket)

    def stopped(self, position: int) -> None:
        """What ran of a group is lost with its engine; its time stands still until it is `restarted`."""
        self._ticket(position, "running", "aborting").started_s = math.inf

    def restarted(self, position: int, now_s: float) -> None:
        """Its completions have begun anew."""
        self._ticket(position, "running", "aborting").started_s = now_s

    def wasted(self, position: int, reason: str, tokens: int) -> None:
        """Tokens of completions that were aborted because their group was complete without them."""
        self._record(Wasted(position, reason, tokens))

    def overdue(self, now_s: float) -> list[int]:
        """Groups that have run longer than `group_timeout_s`: abort them, then `refuse` them."""
        limit = self.settings.group_timeout_s
        found = [] if limit is None else [one for one in self._stages["running"].values() if now_s - one.started_s > limit]
        for ticket in found:
            self._abort(ticket, "timeout")
        return [ticket.position for ticket in found]

    def scored(self, position: int, now_s: float, *, uniform: bool) -> bool:
        """A complete group has its rewards; False if it is refused, because they are all the same and dynamic sampling replaces it."""
        ticket = self._ticket(position, "scoring")
        ticket.uniform = uniform
        if uniform and self.settings.dynamic_sampling and self._resampled < self.settings.max_resamples_per_step:
            self._resampled += 1
            self.refuse(position, now_s, "uniform")
            return False
        self._place(ticket, "ready", ticket.oldest)
        return True

    def refuse(self, position: int, now_s: float, reason: str = "", *, cut: Sequence[int] = ()) -> None:
        """The group will not be trained.

        Args:
            reason: not needed for a group that the scheduler wanted aborted.
            cut: tokens of each completion that was cut.
        """
        ticket = self._ticket(position, "running", "scoring", "ready", "aborting")
        tokens, samples = sum(ticket.lengths) + sum(cut), len(ticket.lengths) + len(cut)
        self._record(Refused(position, ticket.reason or reason, tokens, samples, now_s))
        self._remove(ticket)

    # ---- trainer

    def take(self, step: int, now_s: float) -> Formed | Wait:
        """The groups of the next step, or what it waits for."""
        if step != self.step:
            raise LedgerError(f"step {step} was asked for, but the next one is {self.step}")
        policy, count, running = self.settings.policy, self.prompts_per_step, self._stages["running"].values()
        ready = self._stages["ready"].values()
        if len(ready) < count:
            return self._wait(self._in_flight(), count - len(ready), now_s, due=False)
        if policy != "mask" and (blocked := self._overtaken(step)):
            version, missing = blocked
            old = [one for one in self._in_flight() if (self._served() if one.oldest is None else one.oldest) <= version]
            return self._wait(old, missing, now_s, due=True)
        chosen = sorted(ready, key=lambda one: (one.oldest, one.position))[:count]
        chosen.sort(key=lambda one: one.position)
        groups = tuple(Delivery(one.position, tuple(one.lengths), step - (one.oldest or 0), one.uniform) for one in chosen)
        highest = max(group.lag for group in groups)
        if policy != "mask" and highest > self.settings.max_lag:
            raise LedgerError(f"step {step} would train a lag of {highest}, above {self.settings.max_lag}: the pacing failed")
        self._record(Delivered(step, groups, now_s))
        for ticket in chosen:
            self._remove(ticket)
        late = [one for one in running if policy == "refuse" and self._last_step(one) <= step]
        for ticket in late:
            self._abort(ticket, "late")
        capped = self.settings.dynamic_sampling and any(group.uniform for group in groups)
        self.step, self._resampled = step + 1, 0
        return Formed(step, groups, tuple(one.position for one in late), capped)

    def _overtaken(self, step: int) -> tuple[int, int] | None:
        """(version, groups): if the step took the oldest ready groups, so many groups as old as that version would be left too many."""
        count, max_lag = self.prompts_per_step, self.settings.max_lag
        ready, running, scoring = (self._ages[stage] for stage in ("ready", "running", "scoring"))
        waiting, served = len(self._stages["waiting"]), self._served()
        have = total = 0
        found = None
        for version in sorted({*ready, *running, *scoring, served}):
            last = version + max_lag
            given_up = self.settings.policy == "refuse" and last <= step
            have += ready[version]
            total += ready[version] + scoring[version] + (0 if given_up else running[version]) + (waiting if version == served else 0)
            excess = total - min(count, have) - count * max(0, last - step)
            if excess > 0:
                found = version, excess
        return found

    def _wait(self, groups: Collection[Ticket], missing: int, now_s: float, *, due: bool) -> Wait:
        oldest = sorted(groups, key=lambda one: (one.started_s if one.stage != "waiting" else now_s, one.position))
        names = ", ".join(f"group {one.position} (prompt {one.prompt}, {self._doing(one, now_s)})" for one in oldest[:4])
        more = f" and {len(oldest) - 4} more" if len(oldest) > 4 else ""
        whom = f"the trainer (step {self.step}) waits for {missing} " + ("of the groups that are due" if due else "more groups")
        text = f"{whom}: {names}{more}" if oldest else f"{whom}; none is admitted while the engines serve version {self.version}"
        return Wait(self.step, missing, frozenset(one.position for one in groups), due, text)

    @staticmethod
    def _doing(ticket: Ticket, now_s: float) -> str:
        if ticket.stage == "waiting":
            return "waiting"
        return f"{ticket.stage} for {now_s - ticket.started_s:.0f} s" if ticket.started_s < math.inf else "without an engine"

    # ---- bookkeeping

    def _served(self) -> int:
        if self.version is None:
            raise LedgerError("no version was published yet; call `published` once the engines serve one")
        return self.version

    def _in_flight(self) -> list[Ticket]:
        return [one for stage in ("running", "scoring", "waiting") for one in self._stages[stage].values()]

    def _last_step(self, ticket: Ticket) -> int:
        return (self._served() if ticket.oldest is None else ticket.oldest) + self.settings.max_lag

    def _ticket(self, position: int, *stages: Stage) -> Ticket:
        for stage in stages:
            if position in self._stages[stage]:
                return self._stages[stage][position]
        now = next((stage for stage in STAGES if position in self._stages[stage]), "not outstanding")
        raise LedgerError(f"group {position} is {now}; this event needs it to be {' or '.join(stages)}")

    def _end_sample(self, ticket: Ticket, sample: int) -> int:
        if sample not in ticket.running:
            raise LedgerError(f"group {ticket.position} has no running completion {sample}; running are {sorted(ticket.running)}")
        return ticket.running.pop(sample)

    def _progress(self, ticket: Ticket) -> Fate:
        if ticket.stage == "aborting":
            return "aborting"
        if len(ticket.lengths) < ticket.goal:
            return "running"
        ticket.running.clear()
        past, longest = self.settings.length_memory, float(max(ticket.lengths))
        before = self._lengths.get(ticket.prompt, longest)
        self._lengths[ticket.prompt] = past * before + (1 - past) * longest
        self._longest_sum, self._longest_count = self._longest_sum + longest, self._longest_count + 1
        self._place(ticket, "scoring", ticket.kept)
        return "complete"

    def _age(self, ticket: Ticket) -> None:
        """What was lost may have been the oldest."""
        versions = [*ticket.running.values(), *([] if ticket.kept is None else [ticket.kept])]
        self._place(ticket, ticket.stage, min(versions))

    def _abort(self, ticket: Ticket, reason: str) -> None:
        ticket.reason = reason
        self._place(ticket, "aborting", ticket.oldest)

    def _place(self, ticket: Ticket, stage: Stage, oldest: int | None = None) -> None:
        if ticket.position in self._stages[ticket.stage]:
            self._remove(ticket)
        ticket.stage, ticket.oldest = stage, oldest
        self._stages[stage][ticket.position] = ticket
        self._ages[stage][oldest] += 1

    def _remove(self, ticket: Ticket) -> None:
        del self._stages[ticket.stage][ticket.position]
        ages = self._ages[ticket.stage]
        ages[ticket.oldest] -= 1
        if not ages[ticket.oldest]:
            del ages[ticket.oldest]
