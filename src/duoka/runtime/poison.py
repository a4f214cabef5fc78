"""A poison batch: a replica and step that kill whoever computes them. The second death in turn ends the run.

Without this, a batch that crashes native code would go from worker to worker until none is left. What counts:

- a *crash*: a signal by which a process dies of its own doing (SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE, SIGTRAP,
  SIGSYS), or SIGKILL while the system counted a process that it killed for want of memory;
- two of them, of two workers, for the same step and the same replica: the second one had inherited it;
- or two workers in turn that were stuck, and were killed for that, in the same replica of the same step, or in the
  same place of the code at the same step.

A SIGKILL from outside does not count, nor SIGTERM, nor a worker that somebody has stopped: they say nothing about
the batch, and two of them at once are two losses that are made up for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from duoka.collectives.board import Work
from duoka.errors import DeadlineExceeded, DuokaError, WorkerLost
from duoka.runtime.process import signal_name
from duoka.runtime.watching import STOPPED, Lost, tell_seconds

_CRASHES = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,
}


@dataclass(frozen=True)
class Death:
    worker: int
    signal: int
    work: Work
    at: float = 0.0
    is_out_of_memory: bool = False  # the system was short of it, and kills processes then
    stuck: Lost | None = None  # why we have killed it

    @property
    def is_own_doing(self) -> bool:
        """What it did has ended it, and may well end the next one that does it."""
        if self.stuck is not None:
            return self.stuck.reading.state != STOPPED
        return self.signal in _CRASHES or self.is_out_of_memory

    def tell(self) -> str:
        """What became of this worker, after its name."""
        if self.stuck is None:
            short = " (the system was short of memory)" if self.is_out_of_memory else ""
            return f"was ended by {signal_name(self.signal)}{short}"
        idle = tell_seconds(self.stuck.idle_s)
        if self.stuck.reading.state == STOPPED:
            return f"was stopped (SIGSTOP) for {idle} while others waited, and was killed"
        return f"was stuck (no CPU time used, same stack for {idle}) while others waited, and was killed"


class Deaths:
    """The deaths of a run so far."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe
        self._crashes: list[Death] = []
        self._stuck: list[tuple[Death, tuple[int, str]]] = []  # with step and stack

    def note(self, death: Death) -> DuokaError | None:
        """Remember it; gives the error that ends the run if it is the second one of its kind."""
        if death.stuck is not None:
            return self._note_stuck(death, death.stuck)
        if not death.is_own_doing:
            return None
        before = next((each for each in self._crashes if each.work.overlaps(death.work)), None)
        self._crashes.append(death)
        return None if before is None else self._crash_error(before, death)

    def _note_stuck(self, death: Death, stuck: Lost) -> DuokaError | None:
        if stuck.reading.state == STOPPED or not stuck.reading.stack:
            return None  # from outside, or before it could tell where it is
        place = death.work.step, stuck.reading.stack
        # In turn: those that hang at the same time may hang for the same passing reason.
        earlier = [(each, there) for each, there in self._stuck if each.at <= stuck.since]
        before = next((each for each, there in earlier if there == place or each.work.overlaps(death.work)), None)
        self._stuck.append((death, place))
        return None if before is None else self._stuck_error(before, death, stuck.reading.stack)

    def _crash_error(self, before: Death, death: Death) -> WorkerLost:
        error = WorkerLost(
            f"{_capitalize(str(death.work))} has ended two workers in turn: {self._tell(before)}, then"
            f" {self._tell(death)}.",
            why="the rows of this batch, or the native code that computes them, crash whoever runs them.",
            do="see the logs of these workers for where it happened; leave these rows out, or run the script with"
            " one device and one replica to find them.",
        )
        error.exit_code = 128 + death.signal
        return error

    def _stuck_error(self, before: Death, death: Death, stack: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{_capitalize(self._describe(before.worker))} and then {self._describe(death.worker)} were stuck in the"
            f" same place, at {death.work}.",
            why=f"they did not compute, and did not move:\n{stack.strip()}",
            do="raise deadline_s if it may take that long there; otherwise see what it waits for.",
        )

    def _tell(self, death: Death) -> str:
        why = ", for want of memory" if death.is_out_of_memory else ""
        return f"{self._describe(death.worker)} by {signal_name(death.signal)}{why}"


class MemoryShortage:
    """Whether the system has killed a process for want of memory lately: any process, ours or not."""

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self._read = read or _count_kills
        self._count = self._read()

    def is_new(self) -> bool:
        """Since the last time that this was asked."""
        before, self._count = self._count, self._read()
        return self._count > before


def _count_kills() -> int:
    try:
        with open("/proc/vmstat") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
