"""The end of a run that has not come by itself: everybody is asked to end, and killed when that takes too long.

A signal is the user's wish for it. SIGTERM lets workers that save checkpoints finish their step first; see
`termination.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from duoka.runtime.crew import Crew, Worker, count_workers
from duoka.runtime.decisions import State, WayBack
from duoka.runtime.output import name_workers
from duoka.runtime.process import signal_name
from duoka.runtime.respawn import Respawn
from duoka.runtime.termination import TERMINATED, Activity, Termination
from duoka.runtime.vitals import read_vitals

GRACE_S = 3.0  # how long a worker may take to end after being asked to


@dataclass
class Outcome:
    """How a run ended."""

    exit_code: int = 0
    failed_worker: int | None = None
    failure: dict[str, Any] | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)  # (worker, signal)
    states: dict[int, State] = field(default_factory=dict)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_stopped: int = 0  # how many were still running when the run was ended
    last_line: str = ""  # to be said when everything else has been shown
    way_back: WayBack | None = None  # see `returning.py`


class Shutdown:
    def __init__(
        self,
        crew: Crew,
        respawn: Respawn,
        outcome: Outcome,
        say: Callable[[str], None],
        clock: Callable[[], float],
        *,
        deadline_s: float,
    ) -> None:
        self._crew, self._respawn, self._outcome, self._say, self._clock = crew, respawn, outcome, say, clock
        self._deadline_s = deadline_s
        self._kill_at: float | None = None
        self.termination = Termination(deadline_s)

    @property
    def has_begun(self) -> bool:
        return self._kill_at is not None

    def stop(self, why: str, code: int, ending: Worker | None = None) -> None:
        """Ask everybody but the one that is ending already to end. After the grace period all are killed."""
        if self._kill_at is None:
            self._outcome.exit_code = code
            self._kill_at = self._clock() + GRACE_S
            asked = [worker for worker in self._crew.list_running() if worker is not ending]
            self._outcome.num_stopped = len(asked)
            self._respawn.end()
            for worker in asked:
                self._crew.read_outputs(worker)  # what it has written until now is shown
                worker.is_bystander = ending is not None
                self._crew.tell(worker.number, {"kind": "stop", "why": why})
                worker.send_signal(signal.SIGINT)
                worker.send_signal(signal.SIGCONT)  # one that was stopped hears nothing

    def on_signal(self, number: int) -> None:
        if self._kill_at is not None:
            self._kill_at = self._clock()  # asked twice: at once
            if self._outcome.way_back is not None:  # it was going back: this is the end
                self._outcome.way_back = replace(self._outcome.way_back, is_wanted=False)
                self._outcome.exit_code = 128 + number
            return
        if number == signal.SIGTERM and self.termination.savers and not self.termination.is_second(None):
            self._let_save()
            return
        self._end(number)

    def _end(self, number: int) -> None:
        self.stop(f"{signal_name(number)} was received", 128 + number)
        if self.termination.is_wished:
            self._kill_at = self._clock()  # asked twice, too
        again = "; once more kills them at once" if number == signal.SIGINT else ""
        self._say(f"{signal_name(number)}: {count_workers(self._outcome.num_stopped)} asked to end{again}.")

    def on_terminated(self, worker: int) -> None:
        """A worker has got the SIGTERM that was meant for the run, or that was passed on to it."""
        if self._kill_at is not None:
            return
        if self.termination.is_second(worker):
            self._end(signal.SIGTERM)
        else:
            self._let_save()

    def _let_save(self) -> None:
        """Workers that save checkpoints finish their step, save, and end; they are not asked to end otherwise."""
        if self.termination.is_wished:
            return
        self.termination.wish(self._clock(), self._look())
        self._say("SIGTERM: the step is finished and saved, then the run ends; once more ends it at once.")
        self._crew.board.wish_end()
        for worker in self._crew.list_running():
            if self.termination.pass_to(worker.number):
                worker.send_signal(signal.SIGTERM)

    def _look(self) -> dict[int, Activity]:
        board = self._crew.board
        return {
            worker.number: Activity(
                board.read(worker.number), board.read_work(worker.number), read_vitals(worker.pid).cpu_s
            )
            for worker in self._crew.list_running()
        }

    # Time.

    def list_dues(self) -> list[float]:
        return [moment for moment in (self._kill_at, self.termination.due) if moment is not None]

    def see_to_late(self) -> None:
        self._give_up_saving()
        if self._kill_at is not None and self._clock() >= self._kill_at:
            self._kill()

    def _give_up_saving(self) -> None:
        if self.termination.due is not None and self._clock() >= self.termination.due:
            if self.termination.wait_on(self._clock(), self._look()):
                return
            self.termination.begin_ending()
            if self.termination.is_training:
                self._say(f"SIGTERM: nothing has moved for {self.termination.idle_s:g} s; the run ends without saving.")
            else:
                self._say(
                    "SIGTERM: training had ended, and saved its end; the script has not come to its own end within"
                    f" {self._deadline_s:g} s, and is ended."
                )
            self.stop("SIGTERM was received", TERMINATED)

    def _kill(self) -> None:
        late = self._crew.list_alive()
        for worker in late:
            worker.send_signal(signal.SIGKILL)
        if late and self._outcome.failed_worker is None:  # else there is an error to be read, and this is not it
            self._say(
                f"{count_workers(len(late))} did not end in time and {'was' if len(late) == 1 else 'were'} killed:"
                f" {name_workers(worker.number for worker in late)}."
            )
        self._kill_at = self._clock() + GRACE_S
