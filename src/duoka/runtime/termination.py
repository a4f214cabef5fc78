"""SIGTERM as a wish: the step is finished and saved, then the run ends. A second one ends it at once.

Both sides are here: what a worker does with the signal, and what the supervisor keeps in mind.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from duoka.runtime.link import SocketLink

TERMINATED = 143


class Wish:
    """In a worker, or in a process alone, that saves checkpoints."""

    def __init__(self, link: SocketLink | None) -> None:
        self._link = link
        self._is_there = False

    def is_there(self) -> bool:
        return self._is_there

    def listen(self) -> None:
        """From now on SIGTERM is a wish. A handler of the user's own stays what it is."""
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if is_free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)
            # Loaders and pools end their processes with SIGTERM.
            os.register_at_fork(after_in_child=self._forget)
            if self._link is not None:
                self._link.send({"kind": "saves"})

    def tell_end(self) -> None:
        """The border has come, and this worker is about to save and to end."""
        if self._link is not None:
            self._link.send({"kind": "ends"})

    def _hear(self, number: int, frame: Any) -> None:
        if self._link is not None:
            # The supervisor counts, and passes it on: schedulers signal it, or a worker, or all processes of a run.
            self._link.send({"kind": "terminated"})
        elif self._is_there:
            self._forget()
            os.kill(os.getpid(), signal.SIGTERM)
        self._is_there = True

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Termination:
    """In the supervisor: who saves, and until when a border may take to come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.savers: set[int] = set()
        self.is_wished = False
        self.due: float | None = None  # when the wish is given up

    def wish(self, now: float) -> None:
        self.is_wished, self.due = True, now + self._patience_s

    def begin_ending(self) -> None:
        """A border has come; what is left is writing, which has a deadline of its own."""
        self.due = None

    def is_granted(self, exit_status: int) -> bool:
        """Whether a worker has ended because of the wish."""
        return self.is_wished and exit_status == TERMINATED
