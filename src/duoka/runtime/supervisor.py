"""Starts the workers of a run, carries what they print, and sees to it that all of them end.

It imports no framework and no NumPy: it starts at once and holds no device. Death is what waitpid says.
A worker that has died by a signal is *lost*: the others are told, after it has been reaped, so that nothing
of it can write any more. A worker whose own code failed ends the run, and so does one that ran out of memory.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from duoka.collectives.board import Board, Work
from duoka.collectives.mailbox import wake
from duoka.devices.memory_limit import explain_death
from duoka.errors import DuokaError, LaunchError, Stopped
from duoka.runtime.comebacks import Comebacks
from duoka.runtime.decisions import Kept, Standing, State, Vote, WayBack, exit_code, judge
from duoka.runtime.guardian import REMAINS_S, Guardian
from duoka.runtime.link import SocketLink, make_pair
from duoka.runtime.output import Fold, Logs, name_workers
from duoka.runtime.plan import Plan
from duoka.runtime.plumbing import Plumbing
from duoka.runtime.poison import Death, Deaths, MemoryShortage
from duoka.runtime.process import is_gone, signal_group, signal_name
from duoka.runtime.respawn import Respawn
from duoka.runtime.termination import TERMINATED, Termination
from duoka.runtime.watching import Lost
from duoka.runtime.watchman import Watched, Watchman
from duoka.topology.membership import Membership

GRACE_S = 3.0  # how long a worker may take to end after being asked to
_LAST_WORDS_BYTES = 8192
_MOST_READS = 64  # of 64 KB: more than a pipe can hold


@dataclass(frozen=True)
class Started:
    """A worker process just started, and the ends of the pipes that it prints into."""

    pid: int
    stdout: int
    stderr: int


class Starter(Protocol):
    def __call__(
        self, worker: int, plumbing: Plumbing, link: int, keep_out: Sequence[int], joins: Membership | None = None
    ) -> Started:
        """Start a worker. A forked one closes the descriptors of `keep_out`, which are the supervisor's own.

        A newcomer is told whom it joins.
        """
        ...


@dataclass
class Worker:
    number: int
    pid: int
    pidfd: int
    link: SocketLink
    outputs: dict[int, str]
    state: State = State.RUNNING
    failure: dict[str, Any] | None = None
    standing: Standing = field(default_factory=Standing)
    result: dict[str, Any] | None = None
    last_words: bytes = b""  # the end of what it wrote to stderr
    stuck: Lost | None = None  # why we have killed it
    unfit: str = ""  # or what it did otherwise than the others, after it had come back


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
    ) -> None:
        self._plan = plan
        self._start = start
        self._fold = fold
        self._logs = logs
        self._say = say
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._membership = Membership(0, tuple(range(plan.num_workers)))
        self._vote: Vote | None = None
        self._outcome = Outcome()
        self._kill_at: float | None = None
        self._termination = Termination(plan.deadline_s)
        self._remains: dict[int, float] = {}  # process groups of dead workers, and when they are killed
        self._respawn = Respawn(self, say, clock, is_wanted=plan.respawn, deadline_s=plan.deadline_s)
        self._deaths = Deaths(self.describe)
        self._last_death: Death | None = None
        self._kept: Kept | None = None
        self._shortage = MemoryShortage()
        self._watchman = Watchman(self.describe, say, self._note, self.tell_member, clock)

    def run(self, wakeup: int | None = None, signals: Callable[[], int | None] = lambda: None) -> Outcome:
        """Run to the end. `wakeup` becomes readable when `signals` has a signal to tell."""
        self._guardian = Guardian()
        try:
            self._plumbing = Plumbing(self._plan.num_workers)
        except OSError as error:
            self._guardian.close()
            raise self._cannot_start(error) from error
        self._board = Board.of_fd(self._plumbing.board, self._plan.num_workers)
        try:
            self._begin_all(signals)
            if wakeup is not None:
                self._selector.register(wakeup, selectors.EVENT_READ, ("wakeup", None))
            while self._alive():
                self._turn(signals)
            while self._remains:
                self._clear_remains()
                time.sleep(0.005)
        except BaseException:
            # An interrupt in a notebook, or our own mistake: nobody is left behind either way.
            self.stop("the supervisor was interrupted", 130)
            while self._alive():
                self._turn(lambda: None)
            raise
        finally:
            self._close()
        self._outcome.states = {w.number: w.state for w in self._workers.values()}
        return self._outcome

    def make_next(self) -> Supervisor:
        """Another one for the same run, to start all workers anew. What has killed before is not forgotten."""
        following = Supervisor(self._plan, self._start, self._fold, self._logs, self._say, clock=self._clock)
        following._deaths, following._kept = self._deaths, self._kept
        self._fold.move_main(0)
        return following

    def stop(self, why: str, code: int, ending: Worker | None = None) -> None:
        """Ask everybody but the one that is ending already to end. After the grace period all are killed."""
        if self._kill_at is None:
            self._outcome.exit_code = code
            self._kill_at = self._clock() + GRACE_S
            asked = [worker for worker in self._running() if worker is not ending]
            self._outcome.num_stopped = len(asked)
            self._respawn.end()
            for worker in asked:
                self._tell(worker, {"kind": "stop", "why": why})
                _signal(worker.pid, signal.SIGINT)
                _signal(worker.pid, signal.SIGCONT)  # one that was stopped hears nothing

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.state is State.RUNNING]

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.state in (State.RUNNING, State.JOINING)]

    def _begin_all(self, signals: Callable[[], int | None]) -> None:
        try:
            for worker in range(self._plan.num_workers):
                if (number := signals()) is not None:
                    self._on_signal(number)  # starting many takes long, and Ctrl-C is not to wait for it
                    return
                self._begin(worker)
        except OSError as error:
            raise self._cannot_start(error) from error

    def _cannot_start(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"{self._plan.num_workers} workers cannot be started: {len(self._workers)} were, then none.",
            why=f"the system refused: {error.strerror or error}.",
            do="use fewer devices, or raise the limit (`ulimit -n` for open files, `ulimit -u` for processes).",
        )

    def _begin(self, number: int, joins: Membership | None = None) -> Worker:
        self._board.write_work(number, Work())  # what another one in its place has done is not its own
        ours, theirs = make_pair()
        keep_out = [ours.fileno(), *self._guardian.descriptors()]
        for other in self._workers.values():
            keep_out += [other.link.fileno()] if other.link.fileno() >= 0 else []
            keep_out += [other.pidfd, *other.outputs] if other in self._alive() else []
        started = self._start(number, self._plumbing, theirs.fileno(), keep_out, joins)
        theirs.close()
        self._guardian.watch(started.pid)
        outputs = {started.stdout: "out", started.stderr: "err"}
        worker = Worker(number, started.pid, os.pidfd_open(started.pid), SocketLink(ours), outputs)
        self._workers[number] = worker
        self._watchman.begin(number, Watched(started.pid, self._plumbing.stacks[number]))
        for fd in outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, ("output", worker))
        self._selector.register(worker.link, selectors.EVENT_READ, ("link", worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, ("death", worker))
        return worker

    # What `Respawn` asks for.

    @property
    def membership(self) -> Membership:
        return self._membership

    def start_newcomer(self, number: int) -> Worker:
        self._workers[number].link.close()
        self._plumbing.drain(number)
        worker = self._begin(number, self._membership)
        worker.state = State.JOINING
        return worker

    def tell_member(self, number: int, message: dict[str, Any]) -> None:
        self._tell(self._workers[number], message)

    def tell_newcomer(self, newcomer: Worker, message: dict[str, Any]) -> None:
        newcomer.link.send(message)

    def admit(self, newcomer: Worker, membership: Membership) -> None:
        for worker in self._alive():
            self._read_outputs(
                worker
            )  # what was printed before belongs to the old main worker, and to a newcomer's log
        newcomer.state = State.RUNNING
        self._membership = membership
        self._move_main()

    def describe(self, number: int) -> str:
        return f"worker {number} ({self._plan.devices[number].name})"

    def _turn(self, signals: Callable[[], int | None]) -> None:
        ready = [(key.fd, key.data) for key, _ in self._selector.select(self._patience())]
        # The dead come last: what they printed and said before is heard first.
        for fd, data in sorted(ready, key=lambda item: item[1][0] == "death"):
            kind, worker = data
            if kind == "wakeup":
                os.read(fd, 4096)
            elif kind == "output":
                self._read_output(worker, fd)
            elif kind == "link":
                self._read_link(worker)
            else:
                self._bury(worker)
        while (number := signals()) is not None:
            self._on_signal(number)
        self._fold.flush_due()
        self._clear_remains()
        self._respawn.see_to_late()
        self._look_after_the_late()
        self._give_up_saving()
        if self._kill_at is not None and self._clock() >= self._kill_at:
            self._kill()

    def _kill(self) -> None:
        late = self._alive()
        for worker in late:
            _signal(worker.pid, signal.SIGKILL)
        if late and self._outcome.failed_worker is None:  # else there is an error to be read, and this is not it
            self._say(
                f"{count_workers(len(late))} did not end in time and {'was' if len(late) == 1 else 'were'} killed:"
                f" {name_workers(worker.number for worker in late)}."
            )
        self._kill_at = self._clock() + GRACE_S

    def _patience(self) -> float | None:
        moments = (self._fold.next_due(), self._kill_at, self._watchman.next_look(), self._respawn.next_due())
        others = (self._termination.due, *self._remains.values())
        due = [moment for moment in (*moments, *others) if moment is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _look_after_the_late(self) -> None:
        """Kill whoever is stuck: it is reaped, and then a loss like any other."""
        if self._kill_at is not None:
            self._watchman.start_over()
            return
        awaited = self._respawn.list_awaited()
        if self._vote is not None:
            awaited = set(self._vote.membership.workers) - set(self._vote.reports)
        for lost in self._watchman.look(awaited):
            self._workers[lost.worker].stuck = lost
            _signal(self._workers[lost.worker].pid, signal.SIGKILL)

    def _on_signal(self, number: int) -> None:
        if self._kill_at is not None:
            self._kill_at = self._clock()  # asked twice: at once
            if self._outcome.way_back is not None:  # it was going back: this is the end
                self._outcome.way_back = replace(self._outcome.way_back, is_wanted=False)
                self._outcome.exit_code = 128 + number
            return
        if number == signal.SIGTERM and self._termination.savers and not self._termination.is_wished:
            self._let_save()
            return
        self.stop(f"{signal_name(number)} was received", 128 + number)
        if self._termination.is_wished:
            self._kill_at = self._clock()  # asked twice, too
        again = "; once more kills them at once" if number == signal.SIGINT else ""
        self._say(f"{signal_name(number)}: {count_workers(self._outcome.num_stopped)} asked to end{again}.")

    def _let_save(self) -> None:
        """Workers that save checkpoints finish their step, save, and end; they are not asked to end otherwise."""
        self._termination.wish(self._clock())
        self._say("SIGTERM: the step is finished and saved, then the run ends; once more ends it at once.")
        for worker in self._running():
            if worker.number in self._termination.savers:
                _signal(worker.pid, signal.SIGTERM)

    def _give_up_saving(self) -> None:
        if self._termination.due is not None and self._clock() >= self._termination.due:
            self._termination.begin_ending()
            self._say(f"SIGTERM: no step has ended within {self._plan.deadline_s:g} s; the run ends without saving.")
            self.stop("SIGTERM was received", TERMINATED)

    def _read_output(self, worker: Worker, fd: int) -> bool:
        """True while there may be more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(fd)
            del worker.outputs[fd]
            os.close(fd)
            return False
        stream = worker.outputs[fd]
        if stream == "err":
            worker.last_words = (worker.last_words + data)[-_LAST_WORDS_BYTES:]
        if self._logs is not None:
            self._logs.write(worker.number, data)
        if worker.state is not State.JOINING:  # a newcomer repeats what the others have said long ago
            self._fold.feed(worker.number, "out" if stream == "out" else "err", data)
        return True

    def _read_outputs(self, worker: Worker) -> None:
        for fd in list(worker.outputs):
            # Not for ever: a process that left the group may hold it open, and go on printing.
            for _ in range(_MOST_READS):
                if not self._read_output(worker, fd):
                    break

    def _read_link(self, worker: Worker) -> None:
        try:
            while (message := worker.link.receive(0)) is not None:
                self._on_message(worker, message)
        except Stopped:
            self._selector.unregister(worker.link)

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("joinable", "ready", "border", "given", "settled", "later"):
            newcomer = worker if worker.state is State.JOINING else None
            self._respawn.on_message(worker.number, newcomer, message)
        elif kind == "failed":
            worker.failure = message
            if self._logs is not None:
                self._logs.write(worker.number, message["traceback"].encode(errors="replace"))
            # Not only once it is dead: a thread of its own may keep it from ending while the others wait.
            if worker.state is State.RUNNING:
                self._on_failed(worker, int(message["exit_code"]))
        elif kind == "done":
            worker.standing = _standing(message)
            worker.result = message
        elif kind in ("waiting", "waited"):
            self._watchman.hear(worker.number, message)
        elif kind == "keeps":
            self._kept = Kept(str(message["directory"]), bool(message["resumes"]))
        elif kind == "saves":
            self._termination.savers.add(worker.number)
        elif kind == "terminated" and not self._termination.is_wished and self._kill_at is None:
            self._let_save()
        elif kind == "ends":
            self._termination.begin_ending()
        elif kind == "differs":
            self._on_differing(message)
        elif kind == "report" and self._vote is not None:
            self._vote.report(worker.number, int(message["generation"]), _standing(message))
            self._decide()

    def _bury(self, worker: Worker) -> None:
        """A worker has died. Nothing is told to others before this is done."""
        _, status = os.waitpid(worker.pid, 0)
        status = os.waitstatus_to_exitcode(status)
        # Its children; those that it forked, and that could write where it did, the kernel has killed.
        signal_group(worker.pid, signal.SIGTERM)
        self._remains[worker.pid] = self._clock() + REMAINS_S
        if worker.link.fileno() in self._selector.get_map():
            self._read_link(worker)
        self._read_outputs(worker)
        for fd in worker.outputs:
            self._selector.unregister(fd)
            os.close(fd)
        worker.outputs.clear()
        self._watchman.end(worker.number)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        was_joining = worker.state is State.JOINING
        if self._termination.is_granted(status):
            self._outcome.exit_code, status = status, 0
        worker.state = judge(status, reported_failure=worker.failure is not None)
        self._fold.end(worker.number)
        if was_joining:
            self._on_newcomer_gone(worker, status)
        elif worker.unfit:
            self._on_unfit_gone(worker)
        elif worker.state is State.LOST:
            self._on_lost(worker, -status)
        elif worker.state is State.FAILED:
            self._on_failed(worker, exit_code(status))
        else:
            self._on_left(worker)

    def _on_newcomer_gone(self, worker: Worker, status: int) -> None:
        how = f"was ended by {signal_name(-status)}" if status < 0 else f"exited with code {status}"
        worker.state = State.LOST  # to the run, it still is
        self._respawn.on_gone(worker, how)

    def _clear_remains(self) -> None:
        """End what dead workers have started and left behind."""
        for group, due in list(self._remains.items()):
            if self._clock() >= due:
                signal_group(group, signal.SIGKILL)
            if is_gone(group) or self._clock() >= due + REMAINS_S:
                del self._remains[group]
                self._guardian.forget(group)

    def _on_left(self, worker: Worker) -> None:
        self._respawn.end()
        if worker.result is not None:
            self._outcome.results[worker.number] = worker.result
        for other in self._running():
            self._tell(other, {"kind": "left", "worker": worker.number, "completed": worker.standing.completed})
        self._vote_again(worker)

    def _on_failed(self, worker: Worker, code: int) -> None:
        if self._kill_at is not None:
            return  # the run is ending, and this is not why
        told = {} if worker.failure is None or worker.state is State.LOST else worker.failure  # by the worker itself
        if told.get("error") == "WorkerLeft" and self._comebacks.has_come_back(worker.number):
            # Its script counts steps by itself, and not those that it has not run. The others have finished theirs.
            self._respawn.tell_overrun(worker.number)
            return
        if worker.state is not State.LOST and self._stumbles(worker, told):
            self._take_out(worker, f"failed with {tell_error(told)}" if told else f"exited with code {code}")
            return
        if told.get("error") == "WorkerLost" and self._outcome.lost:
            code = 128 + self._outcome.lost[0][1]
            self._outcome.way_back = self._find_way_after_loss()
        if told.get("error") == "ReplicasDiffer" and self._kept is not None:
            self._outcome.way_back = self._find_way(str(told["what"]).rstrip("."), int(told["agreed_step"]))
        self._outcome.failed_worker = worker.number
        self._outcome.failure = worker.failure
        self.stop(f"worker {worker.number} failed", code or 1, ending=worker)

    # One that has come back, and does not fit to the others; see `comebacks.py`.

    @property
    def _comebacks(self) -> Comebacks:
        return self._respawn.comebacks

    def _stumbles(self, worker: Worker, told: dict[str, Any]) -> bool:
        others = [w.number for w in self._workers.values() if w.state in (State.RUNNING, State.LEFT) and not w.unfit]
        work, steps = self._board.read_work(worker.number), self._board.read(worker.number).steps
        return self._comebacks.stumbles(worker.number, str(told.get("error", "")), work, steps, others)

    def _on_differing(self, message: dict[str, Any]) -> None:
        """Workers have found that some who came back do otherwise than they, and wait for their end."""
        if self._kill_at is not None or int(message["generation"]) != self._membership.generation:
            return  # somebody was lost since: they will find it again
        for worker in [self._workers[int(number)] for number in message["workers"]]:
            if not worker.unfit and worker.state in (State.RUNNING, State.LEFT):
                self._note(worker.number, f"duoka: {message['listing']}\n")
                self._take_out(worker, str(message["what"]))

    def _take_out(self, worker: Worker, what: str) -> None:
        if worker.unfit:
            return
        worker.unfit = what
        if worker.state is not State.RUNNING:
            self._on_unfit_gone(worker)
            return
        try:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_unfit_gone(self, worker: Worker) -> None:
        worker.state = State.LOST
        self._outcome.results.pop(worker.number, None)
        if self._kill_at is None:
            self._last_death = self._look_at_death(worker, signal.SIGKILL)
            text = f"{self.describe(worker.number)} had come back, and {worker.unfit}; it is not started again"
            self._go_on_without(worker, text, signal.SIGKILL)

    def _find_way_after_loss(self) -> WayBack | None:
        death = self._last_death
        if death is None or self._kept is None:
            return None
        return self._find_way(
            f"{self.describe(death.worker)} was lost at step {death.work.step}, which cannot be done again"
        )

    def _find_way(self, why: str, agreed_step: int | None = None) -> WayBack:
        """Not gone without respawn: whoever leaves that out starts runs again himself."""
        assert self._kept is not None
        is_wanted = self._kept.resumes and self._plan.respawn and not self._termination.is_wished
        return WayBack(why, self._kept.directory, is_wanted, agreed_step)

    def _on_lost(self, worker: Worker, number: int) -> None:
        if self._kill_at is not None:
            return
        if explained := explain_death(worker.last_words.decode(errors="replace"), self._plan.devices[worker.number]):
            self._fail_for(worker, explained)
            return
        death = self._last_death = self._look_at_death(worker, number)
        if poison := self._deaths.note(death):
            self._outcome.lost.append((worker.number, number))
            self._fail_for(worker, poison)
            return
        self._go_on_without(worker, f"{self.describe(worker.number)} {death.tell()}", number)

    def _go_on_without(self, worker: Worker, text: str, number: int) -> None:
        self._outcome.lost.append((worker.number, number))
        survivors = self._running()
        if survivors:
            generation = self._membership.generation + 1
            verb = "goes" if len(survivors) == 1 else "go"
            self._say(f"{text}; {count_workers(len(survivors))} {verb} on (generation {generation}).")
            self._regroup(survivors)
            is_own_doing = self._last_death is not None and self._last_death.is_own_doing
            self._respawn.on_lost(worker.number, is_unfit=bool(worker.unfit), is_own_doing=is_own_doing)
            return
        is_anybody_coming = self._respawn.has_newcomers
        self._respawn.end()
        if any(w.state is State.LEFT for w in self._workers.values()):
            self._outcome.last_line = f"{text}; the others have finished."
            return
        self._outcome.exit_code = 128 + number
        self._outcome.last_line = f"{text}; no worker is left."
        if is_anybody_coming and self._kept is not None:  # there is nobody to join, but something to go on from
            self._outcome.way_back = self._find_way(f"{text}; no worker is left that others could join")

    def _look_at_death(self, worker: Worker, number: int) -> Death:
        is_memory_short = self._shortage.is_new() and number == signal.SIGKILL and worker.stuck is None
        work = self._board.read_work(worker.number)
        return Death(worker.number, number, work, self._clock(), is_memory_short, worker.stuck)

    def _fail_for(self, worker: Worker, error: DuokaError) -> None:
        """End the run with an error that a dead worker could not raise itself."""
        name = type(error).__name__
        worker.failure = {"error": name, "traceback": f"{type(error).__module__}.{name}: {error}\n"}
        self._on_failed(worker, error.exit_code)

    def _regroup(self, survivors: Sequence[Worker]) -> None:
        lost = {w.number for w in self._workers.values() if w.state is not State.RUNNING}
        self._membership = self._membership.lose(lost)
        self._vote = Vote(self._membership)
        self._watchman.start_over()
        for other in survivors:
            self._tell(other, {"kind": "lost", "generation": self._membership.generation})
        self._move_main()

    def _move_main(self) -> None:
        self._fold.move_main(self._comebacks.by_age(worker.number for worker in self._running())[0])

    def _vote_again(self, worker: Worker) -> None:
        """Somebody finished while the others were deciding: do it without that one."""
        if self._vote is not None and worker.number in self._membership.workers and self._running():
            self._membership = self._membership.lose({worker.number})
            self._vote = Vote(self._membership)
            for other in self._running():
                self._tell(other, {"kind": "lost", "generation": self._membership.generation})

    def _decide(self) -> None:
        assert self._vote is not None
        left = [w.standing for w in self._workers.values() if w.state is State.LEFT]
        furthest = self._vote.outcome(left)
        if furthest is not None:
            members = self._vote.membership
            decided = {"kind": "decided", "generation": members.generation, "workers": members.workers}
            for worker in self._running():
                worker.link.send(decided | asdict(furthest))
            self._vote = None
            self._respawn.fill()  # not before: the survivors come first

    def _note(self, number: int, text: str) -> None:
        if self._logs is not None:
            self._logs.write(number, text.encode(errors="replace"))

    def _tell(self, worker: Worker, message: dict[str, Any]) -> None:
        """A message that must be heard even by a worker that sleeps in a meeting."""
        worker.link.send(message)
        wake(self._plumbing.outboxes[worker.number])

    def _close(self) -> None:
        for worker in self._workers.values():
            for fd in worker.outputs:
                os.close(fd)
            worker.link.close()
        self._selector.close()
        self._board.close()
        self._plumbing.close()
        self._guardian.close()
        self._fold.close()
        if self._logs is not None:
            self._logs.close()


def tell_error(failure: dict[str, Any]) -> str:
    """An error in one line: the last one of its traceback that begins with its name.

    >>> tell_error({"error": "TypeError", "traceback": "Traceback:\\n  File x\\nTypeError: no number\\n"})
    'TypeError (no number)'
    """
    name = str(failure["error"])
    found = [line for line in str(failure["traceback"]).splitlines() if line.split(":")[0].split(".")[-1] == name]
    text = found[-1].partition(": ")[2].rstrip(".")[:200] if found else ""
    return f"{name} ({text})" if text else name


def count_workers(num_workers: int) -> str:
    return f"{num_workers} worker{'s' if num_workers != 1 else ''}"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _standing(message: dict[str, Any]) -> Standing:
    return Standing(int(message["completed"]), int(message["steps"]))
