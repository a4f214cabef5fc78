"""One writer at a time in a folder, and no reader meanwhile: by a lock on the folder itself, without a file for it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_S = 0.02
IS_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def exclusive(folder: str, deadline_s: float) -> Iterator[bool]:
    """Whether the folder is ours now. Not if its file system knows no locks, or somebody keeps it past the deadline.

    The kernel gives it back when a process ends, however it ends.
    """
    with _locked(folder, fcntl.LOCK_EX, deadline_s) as is_ours:
        yield is_ours


@contextmanager
def shared(folder: str, deadline_s: float) -> Iterator[bool]:
    """The same for readers, who do not keep one another out."""
    with _locked(folder, fcntl.LOCK_SH, deadline_s) as is_ours:
        yield is_ours


@contextmanager
def _locked(folder: str, kind: int, deadline_s: float) -> Iterator[bool]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_ours = _wait_for(descriptor, kind, time.monotonic() + deadline_s)
        try:
            yield is_ours
        finally:
            if is_ours:
                # Said in words: a child forked meanwhile has the same descriptor and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, kind: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in IS_TAKEN or time.monotonic() >= end:
                return False
        time.sleep(_POLL_S)
