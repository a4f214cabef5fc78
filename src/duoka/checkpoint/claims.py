"""One run at a time in a folder of checkpoints: its workers share a lock on a file there, as long as they live.

The kernel gives the lock back when the last of them ends, however it ends. The file says which run has it, so that
workers that come later, or are started anew, are let in, and another run is not.
"""

from __future__ import annotations

import fcntl
import os
import time

from duoka.checkpoint.locks import IS_TAKEN
from duoka.errors import CheckpointError

FILE_NAME = ".run"
_LONGEST_NAME = 1000
_POLL_S = 0.05

_held: dict[str, int] = {}  # descriptors by folder: of this process, which belongs to one run
_is_watching_forks = False


def claim(folder: str, run: str, deadline_s: float = 10.0) -> None:
    """Take the folder for this run until this process ends; a CheckpointError if another run is in it.

    A run that is just ending is waited for. Where the file system knows no locks, nothing is kept out.
    """
    path = os.path.join(folder, FILE_NAME)
    if folder in _held:
        if _is_same_file(_held[folder], path):
            return
        os.close(_held.pop(folder))  # the folder was removed, and made anew
    _watch_forks()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        owner = _share(descriptor, run, time.monotonic() + deadline_s)
    except BaseException:
        os.close(descriptor)
        raise
    if owner != run:
        os.close(descriptor)
        raise CheckpointError(
            f"{folder} is in use: the run {owner} keeps its checkpoints there.",
            why="two runs in one folder would go on from one another's checkpoints, and remove them.",
            do="wait until that run has ended, or stop it; or give this run a folder of its own.",
        )
    _held[folder] = descriptor


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _share(descriptor: int, run: str, end: float) -> str:
    """Whose folder it is: ours, or the other run's."""
    while True:
        try:
            if _lock(descriptor, fcntl.LOCK_EX):  # nobody has it: what is written there is of a run that is gone
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, run.encode(), 0)
            # Not in one step: another run may come in between, and write its own name.
            is_shared = _lock(descriptor, fcntl.LOCK_SH)
        except OSError:
            return run  # there are no locks
        owner = os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace")
        if is_shared and owner == run:
            return run
        if is_shared:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if time.monotonic() >= end:
            return owner
        time.sleep(_POLL_S)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in IS_TAKEN:
            return False
        raise


def _watch_forks() -> None:
    global _is_watching_forks
    if not _is_watching_forks:
        _is_watching_forks = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """A child that lives longer is not to keep the folder. Closed, not unlocked: the lock is the parent's, too."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()
