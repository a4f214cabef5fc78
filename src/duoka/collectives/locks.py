"""A lock on a file that the processes of a run share: held for a moment, and released by the kernel with its holder.

A holder that is stopped in that moment would keep all others waiting. So the wait has a deadline, past which the
supervisor hears for whom this worker waits, as in a meeting; when that one is killed the wait ends. Where nobody
watches, the wait ends with an error.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from duoka.errors import DeadlineExceeded

DEADLINE_S = 60.0  # where nobody watches
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: kind, whence, start, length, process
_PAUSES_S = (0.0005, 0.05)  # between two tries: the first, and the longest

Watch = Callable[[], AbstractContextManager[Callable[[int], None]]]  # within it: tell which process is waited for


@contextmanager
def locked(fd: int, name: str, watch: Watch | None = None) -> Iterator[None]:
    """Keep other processes out. `name`: what is locked, for the error of one who waits in vain."""
    if not _try(fd):
        _wait(fd, name) if watch is None else _wait_watched(fd, watch)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _try(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # both mean that another process has it
        return False
    return True


def _wait(fd: int, name: str) -> None:
    end = time.monotonic() + DEADLINE_S
    for _ in _tries(fd):
        if time.monotonic() >= end:
            raise DeadlineExceeded(
                f"{name[:1].upper()}{name[1:]} has been locked for {DEADLINE_S:g} s.",
                why=f"process {find_holder(fd)} holds the lock, which takes a moment: it is stopped, or hangs.",
                do="end that process, or let it go on (kill -CONT).",
            )


def _wait_watched(fd: int, watch: Watch) -> None:
    with watch() as tell:
        for _ in _tries(fd):
            tell(find_holder(fd))


def _tries(fd: int) -> Iterator[None]:
    """Until the lock is ours."""
    pause_s, longest_s = _PAUSES_S
    while not _try(fd):
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def find_holder(fd: int) -> int:
    """The process that has the lock; 0 if nobody has."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(process)
