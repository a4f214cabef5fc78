"""Looks after those that others wait for: reads /proc, asks for stacks, warns, and says who is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from duoka.runtime import stacks
from duoka.runtime.vitals import read_vitals, tell_state
from duoka.runtime.watching import STOPPED, SUPERVISOR, Expired, Lost, Reading, Wait, Warned, Watching, tell_seconds

_SHOWN_FRAMES = 12


@dataclass(frozen=True)
class Watched:
    """A running worker, and the file into which it writes its stack."""

    pid: int
    stack: int


class Watchman:
    def __init__(
        self,
        describe: Callable[[int], str],
        say: Callable[[str], None],
        note: Callable[[int, str], None],
        tell: Callable[[int, dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._describe, self._say, self._note, self._tell, self._clock = describe, say, note, tell, clock
        self._watching = Watching()
        self._watched: dict[int, Watched] = {}

    def begin(self, worker: int, watched: Watched) -> None:
        self._watched[worker] = watched

    def end(self, worker: int) -> None:
        self._watched.pop(worker, None)
        self._watching.forget(worker)

    def start_over(self) -> None:
        self._watching.start_over()

    def hear(self, worker: int, message: dict[str, Any]) -> None:
        if message["kind"] == "waited":
            self._watching.hear_end(worker)
        elif worker in self._watched:
            now = self._clock()
            wait = Wait(
                missing=tuple(int(other) for other in message["missing"]),
                is_late=bool(message["is_late"]),
                begun=now - float(message["waited_s"]),
                deadline_s=float(message["deadline_s"]),
                step=int(message["step"]),
                phase=str(message["phase"]),
                number=int(message["wait"]),
            )
            self._watching.hear(worker, wait, now)

    def miss(self, worker: int, since: float, deadline_s: float, step: int) -> None:
        """It is the last one that is left, and is awaited."""
        wait = Wait((worker,), True, since, deadline_s, step, "come to a border", 0)
        self._watching.hear(SUPERVISOR, wait, self._clock())

    def miss_nobody(self) -> None:
        self._watching.hear_end(SUPERVISOR)

    def next_look(self) -> float | None:
        return self._watching.next_look()

    def look(self, undecided: Collection[int]) -> list[Lost]:
        """Look if it is time to. Warns; gives those that are to be killed."""
        now, due = self._clock(), self._watching.next_look()
        if due is None or now < due:
            return []
        for worker in self._watching.list_new_suspects(undecided):
            if worker in self._watched:
                self._tell(worker, {"kind": "where"})
        lost = []
        for verdict in self._watching.look(now, self._read, undecided, self._watched.keys()):
            if isinstance(verdict, Warned):
                self._warn(verdict)
            elif isinstance(verdict, Lost):
                lost.append(verdict)
            else:
                self._expire(verdict)
        return lost

    def _read(self, worker: int) -> Reading:
        """With the stack that it was asked for when it was looked at the last time."""
        watched = self._watched[worker]
        vitals = read_vitals(watched.pid)
        reading = Reading(vitals.state, vitals.cpu_s, stacks.read(watched.stack))
        if vitals.state != STOPPED:
            stacks.ask(watched.pid, watched.stack)
        return reading

    def _warn(self, warned: Warned) -> None:
        wait, reading = warned.wait, warned.reading
        others = f"{warned.num_waiting} other{'s wait' if warned.num_waiting > 1 else ' waits'} for it"
        pid = self._watched[warned.worker].pid
        late = f"has not {wait.phase} at step {wait.step} for {tell_seconds(warned.late_s)}"
        text = f"{self._describe(warned.worker)} {late}; {others}. Its process {pid} {tell_state(reading.state)}"
        if warned.is_moving:
            text += " and computes: nobody is lost, the run goes on when it is done."
        else:
            text += (
                f". If neither its CPU time nor its stack moves for {tell_seconds(wait.deadline_s)}, it counts as"
                " lost and is killed: raise deadline_s if it may sleep that long."
            )
        if reading.stack:
            text += "\n  Its stack, innermost call first:\n" + shorten_stack(reading.stack)
            self._note(warned.worker, f"duoka: late at step {wait.step}; stack:\n{reading.stack}\n")
        self._say(text)

    def _expire(self, expired: Expired) -> None:
        for waiter, wait in expired.waits.items():
            if waiter != SUPERVISOR:
                self._tell(waiter, {"kind": "expired", "wait": wait.number})


def shorten_stack(stack: str) -> str:
    lines = stack.splitlines()
    shown = [f"  {line}" for line in lines[:_SHOWN_FRAMES]]
    if len(lines) > _SHOWN_FRAMES:
        shown.append(f"    ... {len(lines) - _SHOWN_FRAMES} more, in its log")
    return "\n".join(shown)
