"""What becomes of a run when one of its workers is lost, fails, or differs from the others.

The others continue without one that was lost. A junior yields: whatever it does otherwise than they, also an error of
its own, removes it and never ends the run. Any other worker whose own code failed ends the run, and so does one that
ran out of memory, and the second one that the same batch has killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from duoka.checkpoint.memory_snapshot import Entry, SnapshotMemory
from duoka.collectives.decision import Difference
from duoka.devices.memory_limit import explain_death
from duoka.errors import DuokaError
from duoka.runtime.crew import Crew, Worker, count_workers
from duoka.runtime.decisions import Kept, State, WayBack
from duoka.runtime.members import Members
from duoka.runtime.plan import Plan
from duoka.runtime.poison import Death, Deaths, MemoryShortage
from duoka.runtime.shutdown import Outcome, Shutdown

# Raised on workers that have done nothing wrong themselves.
_OF_ALL = {"WorkerLost", "WorkerLeft", "WorkerFailed", "DeadlineExceeded", "ReplicasDiffer", "ReplicaFailed"}


@dataclass
class History:
    """What is known of a run, however often all its workers are started anew."""

    deaths: Deaths
    kept: Kept | None = None
    snapshots: SnapshotMemory | None = None

    def find_snapshot(self) -> Entry | None:
        """The newest one that is complete."""
        return None if self.snapshots is None else self.snapshots.ledger.newest()


class Losses:
    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        members: Members,
        shutdown: Shutdown,
        outcome: Outcome,
        history: History,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._plan, self._crew, self._members, self._shutdown = plan, crew, members, shutdown
        self._outcome, self._history, self._say, self._clock = outcome, history, say, clock
        self._last_death: Death | None = None
        self._shortage = MemoryShortage()

    # One that was ended by a signal.

    def on_lost(self, worker: Worker, number: int) -> None:
        if self._shutdown.has_begun:
            return
        words, device = worker.last_words.decode(errors="replace"), self._plan.devices[worker.number]
        if not self._yields(worker.number, "") and (explained := explain_death(words, device)):
            self._fail_for(worker, explained)
            return
        death = self._last_death = self._look_at_death(worker, number)
        if poison := self._history.deaths.note(death):
            self._outcome.lost.append((worker.number, number))
            self._fail_for(worker, poison)
            return
        self._go_on_without(worker, f"{self._crew.describe(worker.number)} {death.tell()}", number)

    def _look_at_death(self, worker: Worker, number: int) -> Death:
        is_memory_short = self._shortage.is_new() and number == signal.SIGKILL and worker.stuck is None
        work = self._crew.board.read_work(worker.number)
        return Death(worker.number, number, work, self._clock(), is_memory_short, worker.stuck)

    def _go_on_without(self, worker: Worker, text: str, number: int) -> None:
        self._outcome.lost.append((worker.number, number))
        was_main = self._move_main(worker)
        respawn, num_survivors = self._members.respawn, len(self._crew.list_running())
        if self._members.has_running_original():
            # One that finished too early, and was found out after another loss, has been left out at that one.
            is_member = worker.number in self._members.membership.workers
            generation = self._members.membership.generation + is_member
            verb = "goes" if num_survivors == 1 else "go"
            self._say(f"{text}; {count_workers(num_survivors)} {verb} on (generation {generation}).")
            if not is_member:
                return
            self._members.regroup()
            is_own_doing = self._last_death is not None and self._last_death.is_own_doing
            reason = "" if worker.removed is None else worker.removed.reason
            respawn.on_lost(worker.number, removed_for=reason, is_own_doing=is_own_doing)
            return
        # One that has not reported after a loss, stopped or stuck, has kept us from starting others.
        is_anybody_coming = respawn.has_newcomers or (worker.stuck is not None and respawn.has_vacancies)
        is_anybody_coming |= num_survivors > 0
        respawn.end()
        has_finished = any(self._has_finished(w, worker) for w in self._crew.workers.values())
        if num_survivors:
            self._dismiss_juniors(0 if has_finished else 128 + number)
        if has_finished:
            self._end_after_others(text, was_main=was_main)
            return
        self._outcome.exit_code = 128 + number
        self._outcome.last_line = f"{text}; no worker is left."
        if self._history.find_snapshot() is not None:
            self._outcome.way_back = self._find_way(f"{text}; no worker is left")
        elif is_anybody_coming:  # nobody to join, but there may be something to go on from
            what = f"{text}; no worker is left that others could join"
            if self._history.kept is None:
                self._outcome.last_line = f"{what}. With strategy.checkpoint a run goes on from the last one by itself."
            else:
                self._outcome.way_back = self._find_way(what)

    def _end_after_others(self, text: str, *, was_main: bool) -> None:
        """The last worker is lost in what its script does at the end."""
        self._outcome.last_line = f"{text}; the others have finished."
        if was_main:
            self._outcome.last_line += (
                " It was the main worker, so what only the main worker prints and writes may be missing."
            )

    def _has_finished(self, worker: Worker, lost: Worker) -> bool:
        """Whether this one has come to the end of its script: a junior may have left too early."""
        is_junior, steps = self._members.is_junior(worker.number), self._crew.board.read(lost.number).steps
        return worker.state is State.LEFT and (not is_junior or worker.standing.steps >= steps)

    def _move_main(self, worker: Worker) -> bool:
        """Returns whether this was the main worker, and had not finished. Another one prints and saves from now on."""
        board = self._crew.board
        is_main = worker.number == board.read_main() and worker.result is None
        if is_main and self._members.has_running_original():
            board.move_main(self._members.find_main())
        return is_main

    def _fail_for(self, worker: Worker, error: DuokaError) -> None:
        """End the run with an error that a dead worker could not raise itself."""
        name = type(error).__name__
        worker.failure = {"error": name, "traceback": f"{type(error).__module__}.{name}: {error}\n"}
        self.on_failed(worker, error.exit_code)

    # One whose own code has failed.

    def on_failed(self, worker: Worker, code: int) -> None:
        if self._shutdown.has_begun:
            self._take_cause(worker)
            return
        told = {} if worker.failure is None or worker.state is State.LOST else worker.failure  # by the worker itself
        if told.get("error") == "WorkerLeft" and self._members.is_junior(worker.number):
            # Its script counts steps by itself, and not those that it has not run. The others have finished theirs.
            self._members.respawn.tell_overrun(worker.number)
            return
        error = str(told.get("error", ""))
        if worker.state is not State.LOST and self._yields(worker.number, error):
            what = f"failed with {tell_error(told)}" if told else f"exited with code {code}"
            self._remove(worker, Difference(f"fails {error or code}", what))
            return
        if told.get("error") == "WorkerLost" and self._outcome.lost:
            code = 128 + self._outcome.lost[0][1]
            self._outcome.way_back = self._find_way_after_loss()
        if told.get("error") == "ReplicasDiffer" and self._history.kept is not None:
            self._outcome.way_back = self._find_way(str(told["what"]).rstrip("."), int(told["agreed_step"]))
        self._outcome.failed_worker = worker.number
        self._outcome.failure = worker.failure
        self._shutdown.stop(f"worker {worker.number} failed", code or 1, ending=worker)

    def _take_cause(self, worker: Worker) -> None:
        """The run is ending, and this is not why, unless the run ends for an error that another worker had.

        The worker whose function raised reports at the same time as those that only hear of it.
        """
        shown, told = self._outcome.failure or {}, worker.failure or {}
        if shown.get("error") == "ReplicaFailed" and told.get("error") not in (None, "ReplicaFailed"):
            self._outcome.failed_worker, self._outcome.failure = worker.number, worker.failure

    def _find_way_after_loss(self) -> WayBack | None:
        death = self._last_death
        if death is None or (self._history.kept is None and self._history.find_snapshot() is None):
            return None
        return self._find_way(
            f"{self._crew.describe(death.worker)} was lost at step {death.work.step}, which cannot be done again"
        )

    def _find_way(self, why: str, agreed_step: int | None = None) -> WayBack:
        """Not gone without respawn: whoever leaves that out starts runs again himself."""
        kept, snapshots = self._history.kept, self._history.snapshots
        if snapshots is not None and agreed_step is not None:
            snapshots.ledger.void_after(agreed_step)
        snapshot = self._history.find_snapshot()
        resumes = kept is not None and kept.resumes
        is_possible = resumes or (snapshot is not None and agreed_step is None)
        is_wanted = is_possible and self._plan.respawn and not self._shutdown.termination.is_wished
        directory = kept.directory if kept is not None and (resumes or agreed_step is not None) else ""
        return WayBack(why, directory, is_wanted, agreed_step, snapshot, self._clock())

    # One that differs from the others.

    def _yields(self, number: int, error: str) -> bool:
        """Whether this is a junior's own failure: the others come by the same line, and end the run if they fail."""
        workers, members = self._crew.workers.values(), self._members
        others = (w for w in workers if w.number != number and not members.is_junior(w.number))
        is_led = any(other.state in (State.RUNNING, State.LEFT) for other in others)
        return members.is_junior(number) and is_led and error not in _OF_ALL

    def on_differing(self, sender: Worker, message: dict[str, Any]) -> None:
        """Workers have found that some differ, and wait for their end. A junior may have found it of itself."""
        if self._shutdown.has_begun:
            return
        # If somebody was lost since, they will find it again; but not of one that has ended.
        is_new = int(message["generation"]) == self._members.membership.generation
        difference = Difference(str(message["reason"]), str(message["what"]))
        for worker in [self._crew.workers[int(number)] for number in message["workers"]]:
            is_running = worker.state is State.RUNNING and (is_new or worker is sender)
            if worker.removed is None and (worker.state is State.LEFT or is_running):
                self._crew.note(worker.number, f"duoka: {message['listing']}\n")
                self._remove(worker, difference)

    def _remove(self, worker: Worker, difference: Difference) -> None:
        if worker.removed is not None:
            return
        worker.removed = difference
        if worker.state is State.RUNNING:
            worker.send_signal(signal.SIGKILL)
        else:
            self.on_removed(worker)

    def on_removed(self, worker: Worker) -> None:
        worker.state = State.LOST
        self._outcome.results.pop(worker.number, None)
        if not self._shutdown.has_begun:
            assert worker.removed is not None
            self._last_death = self._look_at_death(worker, signal.SIGKILL)
            text = f"{self._crew.describe(worker.number)} was removed: it {worker.removed.what}"
            if self._members.is_junior(worker.number):
                text += " (it had rejoined; strategy.register hands over what a script keeps)"
            self._go_on_without(worker, text, signal.SIGKILL)

    def _dismiss_juniors(self, code: int) -> None:
        """No original is left, and juniors have not been compared for long enough to go on by themselves."""
        self._shutdown.stop("no original worker is left", code)
        for worker in self._crew.list_running():
            worker.send_signal(signal.SIGKILL)


def tell_error(failure: dict[str, Any]) -> str:
    """An error in one line: the last one of its traceback that begins with its name.

    >>> tell_error({"error": "TypeError", "traceback": "Traceback:\\n  File x\\nTypeError: no number\\n"})
    'TypeError (no number)'
    """
    name = str(failure["error"])
    found = [line for line in str(failure["traceback"]).splitlines() if line.split(":")[0].split(".")[-1] == name]
    text = found[-1].partition(": ")[2].rstrip(".")[:200] if found else ""
    return f"{name} ({text})" if text else name
