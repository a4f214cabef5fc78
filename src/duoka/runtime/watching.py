"""Stuck is not dead: who of those that others wait for is to be warned about, waited for, or declared lost.

Workers whose wait is past its deadline say whom they miss. Whoever is missed, and does not wait itself, is a
*suspect*, and is looked at again and again: what its process is doing, how much CPU time it has used, where its
Python code is. It is lost when it has been stopped for another deadline, or when neither its CPU time nor its
stack has moved for another deadline. One that computes is waited for, however long it takes.

Decisions only: clock, readings and stacks come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

STOPPED = "T"
SUPERVISOR = -1  # who waits for the last worker that is left: no other one can say so
_HELD = "t"  # by a debugger: somebody is looking at it
_RUNS = "R"  # or would, if a core were free
_LEAST_CPU_S = 0.02  # two ticks: less than that cannot be told from rounding
IDLE_SHARE = 0.01  # of a core: what timers and idle threads of libraries use
_NEXT_LINE = 4  # a line when it has taken as long as the deadline, four times as long, sixteen times, ...
_LONGEST_SILENCE_S = 3600.0
_SECOND_LOOK_S = 0.25  # enough for a stack to be written, and for a few ticks of a busy core


@dataclass(frozen=True)
class Wait:
    """A worker waits, and has said so. Nobody is named as missing while a loss is being decided on."""

    missing: tuple[int, ...]
    is_late: bool
    begun: float
    deadline_s: float
    step: int
    phase: str
    number: int


@dataclass(frozen=True)
class Reading:
    """What can be seen of a process from outside."""

    state: str  # the letter that /proc shows
    cpu_s: float  # of all its threads and its children
    stack: str = ""  # of its main thread; empty while it is not known


@dataclass(frozen=True)
class Warned:
    """To be told to the user: this worker is late."""

    worker: int
    wait: Wait
    num_waiting: int
    late_s: float
    reading: Reading
    is_moving: bool


@dataclass(frozen=True)
class Lost:
    """This worker is to be killed."""

    worker: int
    wait: Wait
    since: float  # when it was looked at first
    idle_s: float
    reading: Reading


@dataclass(frozen=True)
class Expired:
    """These wait for one another, or for nobody: it will not end, and there is nobody to blame."""

    waits: Mapping[int, Wait]


Verdict = Warned | Lost | Expired


@dataclass
class _Suspect:
    since: float
    reading: Reading  # when something moved last
    moved_at: float
    looked_at: float
    idle_s: float = 0.0
    stopped_s: float = 0.0
    is_moving: bool = False
    next_line_s: float = 0.0  # after so much waiting

    def look(self, now: float, reading: Reading, longest_gap_s: float) -> None:
        # Time in which nobody looked does not count: all of us may have been frozen.
        elapsed = min(now - self.looked_at, max(longest_gap_s, _SECOND_LOOK_S))
        self.looked_at = now
        self.stopped_s = self.stopped_s + elapsed if reading.state == STOPPED else 0.0
        self.is_moving = reading.state in (_RUNS, _HELD) or self._has_moved(now, reading)
        if self.is_moving:
            self.reading, self.moved_at, self.idle_s = reading, now, 0.0
        else:
            self.idle_s += elapsed
            if not self.reading.stack:  # now it is known; before, nothing was
                self.reading = Reading(self.reading.state, self.reading.cpu_s, reading.stack)

    def _has_moved(self, now: float, reading: Reading) -> bool:
        least = max(_LEAST_CPU_S, IDLE_SHARE * (now - self.moved_at))
        if abs(reading.cpu_s - self.reading.cpu_s) > least:  # less, too: a child that was counted has ended
            return True
        return bool(reading.stack and self.reading.stack and reading.stack != self.reading.stack)


@dataclass
class Watching:
    """What the supervisor knows of those who wait, and of those they wait for."""

    _waits: dict[int, Wait] = field(default_factory=dict)
    _suspects: dict[int, _Suspect] = field(default_factory=dict)
    _nobody_since: float | None = None  # since when all who are late wait for one another
    _next_look: float | None = None

    def hear(self, waiter: int, wait: Wait, now: float) -> None:
        if self._next_look is None or not self._late_waits():
            self._next_look = now  # else it is soon, and not to come before a stack that was asked for
        self._waits[waiter] = wait

    def hear_end(self, waiter: int) -> None:
        self._waits.pop(waiter, None)

    def forget(self, worker: int) -> None:
        """It has ended."""
        self._waits.pop(worker, None)
        self._suspects.pop(worker, None)

    def start_over(self) -> None:
        """A worker was lost: everybody who waits is woken, and begins to wait anew."""
        self._waits.clear()
        self._suspects.clear()
        self._nobody_since = self._next_look = None

    def next_look(self) -> float | None:
        return self._next_look if self._waits else None

    def list_new_suspects(self, undecided: Collection[int]) -> list[int]:
        """Those of whom nothing is known yet: they are asked whether they wait themselves."""
        return [worker for worker in self._blame(undecided) if worker not in self._suspects]

    def look(
        self, now: float, read: Callable[[int], Reading], undecided: Collection[int], running: Collection[int]
    ) -> list[Verdict]:
        """Look at all suspects. `undecided`: those whose report is awaited after a loss."""
        blamed = {worker: waits for worker, waits in self._blame(undecided).items() if worker in running}
        is_anybody_new = any(worker not in self._suspects for worker in blamed)
        for worker in set(self._suspects) - set(blamed):
            del self._suspects[worker]  # it has come, or waits itself
        verdicts: list[Verdict] = []
        for worker, waits in blamed.items():
            verdicts += self._judge(worker, waits, now, read(worker))
        verdicts += self._judge_nobody(now, bool(blamed))
        lost = {verdict.worker for verdict in verdicts if isinstance(verdict, Lost)}
        late = self._late_waits()
        if lost and lost >= set(running) and SUPERVISOR not in late:  # nobody would be left to go on
            verdicts = [Expired(late)]
        pause_s = _SECOND_LOOK_S if is_anybody_new else self._interval()
        self._next_look = now + pause_s if self._late_waits() else None
        return verdicts

    def _late_waits(self) -> dict[int, Wait]:
        return {waiter: wait for waiter, wait in self._waits.items() if wait.is_late}

    def _blame(self, undecided: Collection[int]) -> dict[int, list[Wait]]:
        blamed: dict[int, list[Wait]] = {}
        for wait in self._late_waits().values():
            for worker in wait.missing or undecided:
                if worker not in self._waits:
                    blamed.setdefault(worker, []).append(wait)
        return blamed

    def _judge(self, worker: int, waits: list[Wait], now: float, reading: Reading) -> list[Verdict]:
        wait = max(waits, key=lambda wait: wait.deadline_s)
        if worker not in self._suspects:
            # Nothing is said before the second look: it may answer that it waits itself, or come.
            self._suspects[worker] = _Suspect(now, reading, now, now)
            return []
        suspect = self._suspects[worker]
        suspect.look(now, reading, longest_gap_s=2 * self._interval())
        late_s = now - min(wait.begun for wait in waits)
        verdicts: list[Verdict] = []
        if late_s >= suspect.next_line_s:
            suspect.next_line_s = min(_NEXT_LINE * late_s, late_s + _LONGEST_SILENCE_S)
            verdicts.append(Warned(worker, wait, len(waits), late_s, reading, suspect.is_moving))
        idle_s = max(suspect.idle_s, suspect.stopped_s)
        if idle_s >= wait.deadline_s:
            verdicts.append(Lost(worker, wait, suspect.since, idle_s, reading))
        return verdicts

    def _judge_nobody(self, now: float, is_anybody: bool) -> list[Verdict]:
        late = self._late_waits()
        if is_anybody or not late:
            self._nobody_since = None
            return []
        if self._nobody_since is None:
            self._nobody_since = now
        longest = max(wait.deadline_s for wait in late.values())
        if now - self._nobody_since < longest:
            return []
        self._nobody_since = now
        return [Expired(late)]

    def _interval(self) -> float:
        """Between two looks: an eighth of the deadline, from a twentieth of a second to five."""
        shortest = min((wait.deadline_s for wait in self._late_waits().values()), default=0.0)
        return min(max(shortest / 8, 0.05), 5.0)


def tell_seconds(seconds: float) -> str:
    """
    >>> tell_seconds(0.62), tell_seconds(1), tell_seconds(61.4)
    ('0.62 s', '1 s', '61 s')
    """
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
