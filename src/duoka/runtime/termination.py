"""SIGTERM as a wish: the step is finished and saved, then the run ends. A second one ends it at once.

Schedulers signal the supervisor, or a worker, or all processes of a run: the second one is the second for the same
process.

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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from duoka.collectives.board import Row, Work
from duoka.runtime.link import SocketLink
from duoka.runtime.watching import IDLE_SHARE

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
            # The supervisor counts, and passes it on.
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


@dataclass(frozen=True)
class Activity:
    """What can be seen of a worker from outside: its calls and steps, what it computes, its seconds of CPU time."""

    row: Row
    work: Work
    cpu_s: float

    def has_moved_since(self, before: Activity, elapsed_s: float) -> bool:
        is_elsewhere = (self.row, self.work) != (before.row, before.work)
        return is_elsewhere or self.cpu_s - before.cpu_s > IDLE_SHARE * elapsed_s


class Termination:
    """In the supervisor: who saves, and until when a border may take to come.

    It may take as long as anything of the workers moves: whoever is to be killed after a minute is killed from outside.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._num_heard: Counter[int | None] = Counter()  # signals, by worker; None: the supervisor
        self._passed_to: set[int] = set()
        self._seen: dict[int, Activity] = {}
        self.idle_s = 0.0  # for how long nothing has moved
        self.savers: dict[int, bool] = {}  # and whether the signal may be sent to them: they catch it
        self.is_wished = False
        self.is_training = True  # else the last loop has ended, and what it has done is saved
        self.due: float | None = None  # when the wish is given up

    def is_second(self, process: int | None) -> bool:
        """Another signal has come to this process, the supervisor or a worker: whether it wants an end at once."""
        self._num_heard[process] += 1
        return self._num_heard[process] > 1 + (process in self._passed_to)

    def pass_to(self, worker: int) -> bool:
        """Whether the signal is to be sent on to this worker: it has not got it yet, and catches it."""
        if not self.savers.get(worker) or self._num_heard[worker]:
            return False
        self._passed_to.add(worker)
        return True

    def wish(self, now: float, seen: dict[int, Activity]) -> None:
        self.is_wished, self.due, self._seen = True, now + self._patience_s, seen

    def wait_on(self, now: float, seen: dict[int, Activity]) -> bool:
        """It is due. Whether the run is waited for once more: it trains, and has not stood still for too long."""
        before, self._seen = self._seen, seen
        is_moving = any(
            worker not in before or here.has_moved_since(before[worker], self._patience_s)
            for worker, here in seen.items()
        )
        self.idle_s = 0.0 if is_moving else self.idle_s + self._patience_s
        if not self.is_training or self.idle_s >= 2 * self._patience_s:
            return False
        self.due = now + self._patience_s
        return True

    def begin_ending(self) -> None:
        """A border has come; what is left is writing, which has a deadline of its own."""
        self.due = None

    def is_granted(self, exit_status: int) -> bool:
        """Whether a worker has ended because of the wish."""
        return self.is_wished and exit_status == TERMINATED
