"""Where a worker's Python code is, asked from outside: also while native code holds the interpreter.

A worker lets the standard library's faulthandler write the stack of its main thread into a file without a name,
when a signal comes that nobody else uses. The handler is C code, which needs neither the interpreter's lock nor
its memory. System calls go on afterwards; those that never do (sleep, poll) Python calls again.
"""

from __future__ import annotations

import faulthandler
import os
import signal

SIGNAL = signal.SIGRTMAX - 7
_HEADER = "Stack (most recent call first):\n"
_LONGEST_BYTES = 1 << 16
_RUNTIME = os.path.dirname(os.path.abspath(__file__))


def make_file() -> int:
    """Shared by the supervisor and one worker, its position included."""
    return os.memfd_create("duoka-stack", os.MFD_CLOEXEC)


def show_when_asked(file: int) -> None:
    """In the worker, before any user code."""
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)


def ask(pid: int, file: int) -> None:
    """In the supervisor: the answer can be read a moment later. A worker that is not ready would die of the signal."""
    if _is_ready(pid):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            pass


def read(file: int) -> str:
    """The newest answer, innermost call first, without the frames that start every script; empty if there is none."""
    text = os.pread(file, _LONGEST_BYTES, 0).decode(errors="replace").rpartition(_HEADER)[2]
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    while lines and f'"{_RUNTIME}' in lines[-1]:
        del lines[-1]
    return "\n".join(lines)


def _is_ready(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
