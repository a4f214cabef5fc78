"""SIGTERM as a wish: the step is finished and saved, then the run ends. A second one ends it at once.

Both sides are here: what a worker does with the signal, and what the supervisor keeps in mind.

A script may have a handler of its own, before or after it asks for checkpoints. It is called, and the wish is heard
all the same: ours is put in front of it, and again at the next border if another one was installed meanwhile. In a
supervised run the wish stands on the board, too, whatever becomes of the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from duoka.runtime.link import SocketLink

TERMINATED = 143


class Wish:
    """In a worker, or in a process alone, that saves checkpoints."""

    def __init__(self, link: SocketLink | None, is_told: Callable[[], bool] = lambda: False) -> None:
        self._link, self._is_told = link, is_told
        self._has_heard = False
        self._depth = 0  # of handlers that call one another

    def is_there(self) -> bool:
        self._catch()
        return self._has_heard or self._is_told()

    def listen(self) -> None:
        """From now on SIGTERM is a wish."""
        is_caught = self._catch()
        # Loaders and pools end their processes with SIGTERM.
        os.register_at_fork(after_in_child=_forget)
        if self._link is not None:
            self._link.send({"kind": "saves", "is_caught": is_caught})

    def tell_end(self) -> None:
        """The border has come, and this worker is about to save and to end."""
        if self._link is not None:
            self._link.send({"kind": "ends"})

    def tell_whether_it_trains(self, is_training: bool) -> None:
        """No border may come after the end of a loop, and nothing is unsaved there."""
        if self._link is not None:
            self._link.send({"kind": "trains", "is_training": is_training})

    def _catch(self) -> bool:
        """See to it that the signal comes here first. One that is ignored stays ignored."""
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, _Handler):
            return True
        if handler in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, _Handler(self, handler))
        return True

    def hear(self, call_theirs: Callable[[], None]) -> None:
        if self._depth:  # the user's handler calls the one that it has replaced, which is ours
            call_theirs()
            return
        is_second, self._has_heard = self._has_heard, True
        if self._link is not None:
            # The supervisor counts, and passes it on: schedulers signal it, or a worker, or all processes of a run.
            self._link.send({"kind": "terminated"})
        elif is_second:
            _forget()
            os.kill(os.getpid(), signal.SIGTERM)
        if not is_second:
            self._depth += 1
            try:
                call_theirs()
            finally:
                self._depth -= 1


class _Handler:
    """Ours, in front of the one that was there."""

    def __init__(self, wish: Wish, theirs: Any) -> None:
        self._wish, self.theirs = wish, theirs

    def __call__(self, number: int, frame: Any) -> None:
        self._wish.hear(lambda: self._call_theirs(number, frame))

    def _call_theirs(self, number: int, frame: Any) -> None:
        """What it raises would leave the step in the middle. The end that it wants comes after the step is saved."""
        if not callable(self.theirs):
            return
        try:
            self.theirs(number, frame)
        except (SystemExit, KeyboardInterrupt):
            pass
        except BaseException:
            print("duoka: SIGTERM: the script's own handler raised this; the step is saved first:", file=sys.stderr)
            traceback.print_exc()


def _forget() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGTERM, handler.theirs)


class Termination:
    """In the supervisor: who saves, and until when a border may take to come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.savers: dict[int, bool] = {}  # and whether the signal may be sent to them: they catch it
        self.is_wished = False
        self.is_training = True  # else the last loop has ended, and what it has done is saved
        self.due: float | None = None  # when the wish is given up

    def wish(self, now: float) -> None:
        self.is_wished, self.due = True, now + self._patience_s

    def begin_ending(self) -> None:
        """A border has come; what is left is writing, which has a deadline of its own."""
        self.due = None

    def is_granted(self, exit_status: int) -> bool:
        """Whether a worker has ended because of the wish."""
        return self.is_wished and exit_status == TERMINATED
