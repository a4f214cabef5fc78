"""What /proc says of a worker: what its process is doing, and the CPU time of it and of everything it has started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from duoka.runtime.watching import STOPPED

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk",
    "T": "is stopped (SIGSTOP)",
    "t": "is held by a debugger",
}


@dataclass(frozen=True)
class Vitals:
    state: str  # one letter
    cpu_s: float


def read_vitals(pid: int) -> Vitals:
    """Of a worker, which leads a session of its own: its data loaders count with it."""
    state, cpu_s = "X", 0.0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _read_stat(entry)) is not None and int(fields[3]) == pid:
            # The time of children that have ended is counted where they were waited for.
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            if int(entry) == pid:
                state = fields[0]
    return Vitals(state, cpu_s)


def is_stopped(pid: int) -> bool:
    """Read at once, without those that it has started."""
    fields = _read_stat(str(pid))
    return fields is not None and fields[0] == STOPPED


def tell_state(letter: str) -> str:
    """
    >>> tell_state("T"), tell_state("Z")
    ('is stopped (SIGSTOP)', 'is in state Z')
    """
    return _STATES.get(letter, f"is in state {letter}")


def _read_stat(pid: str) -> list[str] | None:
    """From the state on: the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
