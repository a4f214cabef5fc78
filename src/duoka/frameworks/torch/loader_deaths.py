"""A process of a DataLoader that the system has killed (SIGKILL) is no error of the user's code.

PyTorch raises one all the same, in the middle of whatever line is running. Where there are several workers, this one
dies of it instead: a loss like any other, which others make up for. A process that crashes is an error of the script:
it reads ahead, so that nobody could tell for which step it did.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE_S = 0.5
_STDERR = 2
_KILLED = f"is killed by signal: {signal.strsignal(signal.SIGKILL)}"  # in PyTorch's words
_is_one_of_many = False


def follow_from_now_on() -> None:
    """This worker is one of several, and dies with such a process."""
    global _is_one_of_many
    _is_one_of_many = True


class Following(Iterator[Any]):
    """The batches of a loader that has started processes."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        _follow()

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except (ConnectionError, EOFError):
            time.sleep(_PATIENCE_S)  # what it has read from may have died, and word of that is on its way
            raise


def _follow() -> None:
    """PyTorch has its own handler of their deaths in place by now."""
    theirs: Any = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is threading.main_thread() and not isinstance(theirs, _Handler | int | None):
        signal.signal(signal.SIGCHLD, _Handler(theirs))


class _Handler:
    def __init__(self, theirs: Callable[[int, Any], None]) -> None:
        self._theirs = theirs

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self._theirs(number, frame)
        except RuntimeError as error:
            if _KILLED not in str(error) or not _is_one_of_many:
                raise
            # Not by print: the line that is interrupted may be printing.
            os.write(_STDERR, f"{str(error).strip()} This worker ends with it.\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
