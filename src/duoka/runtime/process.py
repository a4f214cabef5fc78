"""How processes of a run are tied together, so that none outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


# Looked up now: a forked child must not meet the lock of the loader. There is none outside of Linux.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. If it is dead already, end now."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def keep_from_children(descriptors: Iterable[int]) -> None:
    """Children forked by user code (data loaders) hold none of these descriptors and die with their parent."""
    descriptors = tuple(descriptors)
    for fd in descriptors:
        os.set_inheritable(fd, False)
    owner = os.getpid()
    forked_by_main_thread = False

    def before_fork() -> None:
        nonlocal forked_by_main_thread
        forked_by_main_thread = threading.current_thread() is threading.main_thread()

    def after_fork() -> None:
        if os.getppid() == owner:  # else a grandchild, whose parent has closed them
            for fd in descriptors:
                try:
                    os.close(fd)
                except OSError:
                    pass
        # The kernel's "parent" is the forking *thread*: a child forked by a passing thread would die
        # with that thread. Those are left to the supervisor, which kills the whole process group.
        if forked_by_main_thread:
            die_with_parent(os.getppid())

    os.register_at_fork(before=before_fork, after_in_child=after_fork)


def flush_streams() -> None:
    """Whatever a script has put in the place of its streams: closed, None, or without a reader."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


def signal_group(pid: int, number: int) -> None:
    """To a worker and all its children; it leads a process group of its own."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def is_gone(group: int) -> bool:
    """No process of this group is left, but for dead ones that a slow init has not reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return not any(_is_alive_in(group, entry) for entry in os.listdir("/proc") if entry.isdigit())


def _is_alive_in(group: int, pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, _, its_group = file.read().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in "ZX"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
