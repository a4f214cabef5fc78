"""Starts the workers of a run, carries what they print, and sees to it that all of them end.

It imports no framework and no NumPy: it starts at once and holds no device. Death is what waitpid says.
A worker that has died by a signal is *lost*: the others are told, after it has been reaped, so that nothing
of it can write any more. A worker whose own code failed ends the run, and so does one that ran out of memory.

Here is its main loop: who has printed, said something or died, and whose business that is.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from duoka.checkpoint.memory_snapshot import SnapshotMemory
from duoka.runtime.crew import Crew, Starter, Worker
from duoka.runtime.decisions import Kept, Standing, State, exit_code, judge
from duoka.runtime.losses import History, Losses
from duoka.runtime.members import Members
from duoka.runtime.output import Fold, Logs
from duoka.runtime.plan import Plan
from duoka.runtime.poison import Deaths
from duoka.runtime.process import signal_name
from duoka.runtime.shutdown import Outcome, Shutdown
from duoka.runtime.vitals import is_stopped


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        start: Starter,
        fold: Fold,
        logs: Logs | None,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        history: History | None = None,
    ) -> None:
        self._plan = plan
        self._start = start
        self._fold = fold
        self._logs = logs
        self._say = say
        self._clock = clock
        self._outcome = Outcome()
        self._crew = Crew(plan, start, fold, logs, say, clock)
        self._watchman = self._crew.watchman
        self._members = Members(plan, self._crew, fold, say, clock)
        self._respawn = self._members.respawn
        self._shutdown = Shutdown(self._crew, self._respawn, self._outcome, say, clock, deadline_s=plan.deadline_s)
        self._history = history or History(Deaths(self._crew.describe))
        self._losses = Losses(plan, self._crew, self._members, self._shutdown, self._outcome, self._history, say, clock)

    def run(self, wakeup: int | None = None, signals: Callable[[], int | None] = lambda: None) -> Outcome:
        """Run to the end. `wakeup` becomes readable when `signals` has a signal to tell."""
        self._crew.open(self._make_snapshots())
        try:
            self._begin_all(signals)
            if wakeup is not None:
                self._crew.wake_by(wakeup)
            while self._crew.list_alive():
                self._turn(signals)
            while self._crew.list_dues_of_remains():
                self._crew.clear_remains()
                time.sleep(0.005)
        except BaseException:
            # An interrupt in a notebook, or our own mistake: nobody is left behind either way.
            self._shutdown.stop("the supervisor was interrupted", 130)
            while self._crew.list_alive():
                self._turn(lambda: None)
            raise
        finally:
            self._close()
        self._outcome.states = {w.number: w.state for w in self._crew.workers.values()}
        return self._outcome

    def _make_snapshots(self) -> SnapshotMemory | None:
        """The memory of the run, made by its first start."""
        if self._plan.takes_snapshots and self._history.snapshots is None:
            try:
                self._history.snapshots = SnapshotMemory(self._plan.num_workers)
            except OSError as error:
                raise self._crew.cannot_start(error) from error
        return self._history.snapshots

    def end_run(self) -> None:
        """No other start of this run follows: its snapshots are gone."""
        if self._history.snapshots is not None:
            self._history.snapshots.close()
            self._history.snapshots = None

    def make_next(self) -> Supervisor:
        """Another one for the same run, to start all workers anew. What has killed before is not forgotten."""
        following = Supervisor(
            self._plan, self._start, self._fold, self._logs, self._say, clock=self._clock, history=self._history
        )
        self._fold.move_main(0)
        return following

    def _begin_all(self, signals: Callable[[], int | None]) -> None:
        try:
            for worker in range(self._plan.num_workers):
                if (number := signals()) is not None:
                    # Starting many takes long, and Ctrl-C is not to wait for it.
                    self._shutdown.on_signal(number)
                    return
                self._crew.begin(worker)
        except OSError as error:
            raise self._crew.cannot_start(error) from error

    def _turn(self, signals: Callable[[], int | None]) -> None:
        for fd, kind, worker in self._crew.wait(self._patience()):
            if kind == "output":
                self._crew.read_output(worker, fd)
            elif kind == "link":
                self._read_link(worker)
            else:
                self._bury(worker)
        while (number := signals()) is not None:
            self._shutdown.on_signal(number)
        self._fold.flush_due()
        self._crew.clear_remains()
        self._respawn.see_to_late()
        self._look_after_the_late()
        self._shutdown.see_to_late()

    def _patience(self) -> float | None:
        moments = (self._fold.next_due(), self._watchman.next_look(), self._respawn.next_due())
        others = (*self._shutdown.list_dues(), *self._crew.list_dues_of_remains())
        if self._members.find_missed() is not None and not self._shutdown.has_begun:
            others = (*others, self._clock() + self._plan.deadline_s / 8)
        due = [moment for moment in (*moments, *others) if moment is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _look_after_the_late(self) -> None:
        """Kill whoever is stuck: it is reaped, and then a loss like any other."""
        if self._shutdown.has_begun:
            self._watchman.start_over()
            return
        self._look_for_the_last()
        for lost in self._watchman.look(self._members.list_awaited()):
            worker = self._crew.workers[lost.worker]
            if worker.stuck is None:  # else it is dying: what can be seen of it now is not why
                worker.stuck = lost
                worker.send_signal(signal.SIGKILL)

    def _look_for_the_last(self) -> None:
        """A newcomer waits for the only member, and so do we after a loss."""
        missed, board = self._members.find_missed(), self._crew.board
        if missed is None:
            self._watchman.miss_nobody()
            return
        work = board.read_work(missed.worker)
        deadline_s = max(self._plan.deadline_s, board.read_pace(missed.worker))
        is_late = self._clock() - missed.since >= deadline_s
        is_in_step = work.is_under_way and not work.is_left
        if is_late and (is_in_step or not missed.may_sleep or is_stopped(self._crew.workers[missed.worker].pid)):
            self._watchman.miss(missed.worker, missed.since, deadline_s, work.step)
        else:
            self._watchman.miss_nobody()

    def _read_link(self, worker: Worker) -> None:
        for message in self._crew.hear(worker):
            self._on_message(worker, message)

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> None:
        kind, termination = message["kind"], self._shutdown.termination
        if kind in ("joinable", "ready", "border", "given", "settled", "later"):
            newcomer = worker if worker.state is State.JOINING else None
            self._respawn.on_message(worker.number, newcomer, message)
        elif kind == "failed":
            worker.failure = message
            self._crew.note(worker.number, message["traceback"])
            # Not only once it is dead: a thread of its own may keep it from ending while the others wait.
            if worker.state is State.RUNNING:
                self._losses.on_failed(worker, int(message["exit_code"]))
        elif kind == "done":
            worker.standing = _standing(message)
            worker.result = message
        elif kind in ("waiting", "waited"):
            self._watchman.hear(worker.number, message)
        elif kind == "keeps":
            self._history.kept = Kept(str(message["directory"]), bool(message["resumes"]))
        elif kind == "saves":
            termination.savers[worker.number] = bool(message["is_caught"])
        elif kind == "terminated":
            self._shutdown.on_terminated(worker.number)
        elif kind == "trains":
            termination.is_training = bool(message["is_training"])
        elif kind == "ends":
            termination.begin_ending()
        elif kind == "differs":
            self._losses.on_differing(worker, message)
        elif kind == "promoted":
            self._members.promote(message["workers"])
        elif kind == "report":
            self._members.hear_report(worker.number, int(message["generation"]), _standing(message))

    def _bury(self, worker: Worker) -> None:
        """A worker has died. Nothing is told to others before this is done."""
        status = self._crew.reap(worker)
        if self._crew.has_line(worker):
            self._read_link(worker)
        self._crew.let_go(worker)
        was_joining = worker.state is State.JOINING
        if self._shutdown.termination.is_granted(status):
            self._outcome.exit_code, status = status, 0
        worker.state = judge(status, reported_failure=worker.failure is not None)
        self._fold.end(worker.number)
        if was_joining:
            self._on_newcomer_gone(worker, status)
        elif worker.removed is not None:
            self._losses.on_removed(worker)
        elif worker.state is State.LOST:
            self._losses.on_lost(worker, -status)
        elif worker.state is State.FAILED:
            self._losses.on_failed(worker, exit_code(status))
        else:
            self._on_left(worker)

    def _on_newcomer_gone(self, worker: Worker, status: int) -> None:
        how = f"was ended by {signal_name(-status)}" if status < 0 else f"exited with code {status}"
        worker.state = State.LOST  # to the run, it still is
        self._respawn.on_gone(worker, how, has_finished=status == 0)

    def _on_left(self, worker: Worker) -> None:
        if not (self._members.is_junior(worker.number) and self._members.has_running_original()):
            self._respawn.finish()  # else it may have come to its end too early: the others will find out
        if worker.result is not None:
            self._outcome.results[worker.number] = worker.result
        left = {"kind": "left", "worker": worker.number, "completed": worker.standing.completed}
        for other in self._crew.list_running():
            self._crew.tell(other.number, left)
        self._members.vote_again(worker)

    def _close(self) -> None:
        self._crew.close()
        self._fold.close()
        if self._logs is not None:
            self._logs.close()


def _standing(message: dict[str, Any]) -> Standing:
    return Standing(int(message["completed"]), int(message["steps"]))
