"""The processes of a run, as the supervisor holds them: started, heard, and buried once they have died.

Nothing is decided here. What a worker prints goes to the screen and to its log, what it says is handed on, and
what it has started and left behind is ended after it.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from duoka.checkpoint.memory_snapshot import SnapshotMemory
from duoka.collectives.board import Board, Work
from duoka.collectives.decision import Difference
from duoka.collectives.mailbox import wake
from duoka.errors import LaunchError, Stopped
from duoka.runtime.decisions import Standing, State
from duoka.runtime.guardian import REMAINS_S, Guardian
from duoka.runtime.link import SocketLink, make_pair
from duoka.runtime.output import Fold, Logs
from duoka.runtime.plan import Plan
from duoka.runtime.plumbing import Plumbing
from duoka.runtime.process import is_gone, signal_group
from duoka.runtime.watching import Lost
from duoka.runtime.watchman import Watched, Watchman
from duoka.topology.membership import Membership

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
    is_bystander: bool = False  # it is stopped because another one has failed
    stuck: Lost | None = None  # why we have killed it
    removed: Difference | None = None  # or what it did otherwise than the others

    def send_signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass


class Ready(NamedTuple):
    """Something to be read, or a death."""

    fd: int
    kind: str  # "output", "link" or "death"
    worker: Worker


class Crew:
    def __init__(
        self,
        plan: Plan,
        start: Starter,
        fold: Fold,
        logs: Logs | None,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._plan, self._start, self._fold, self._logs, self._clock = plan, start, fold, logs, clock
        self._selector = selectors.DefaultSelector()
        self._remains: dict[int, float] = {}  # process groups of dead workers, and when they are killed
        self.workers: dict[int, Worker] = {}
        self.watchman = Watchman(self.describe, say, self.note, self.tell, clock)

    def open(self, snapshots: SnapshotMemory | None = None) -> None:
        """Make what the workers share. Nothing is left open if that cannot be done."""
        self._guardian = Guardian()
        try:
            self._plumbing = Plumbing(self._plan.num_workers, snapshots)
        except OSError as error:
            self._guardian.close()
            raise self.cannot_start(error) from error
        self.board = Board.of_fd(self._plumbing.board, self._plan.num_workers)

    def cannot_start(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"{self._plan.num_workers} workers cannot be started: {len(self.workers)} were, then none.",
            why=f"the system refused: {error.strerror or error}.",
            do="use fewer devices, or raise the limit (`ulimit -n` for open files, `ulimit -u` for processes).",
        )

    def list_running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.state is State.RUNNING]

    def list_alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.state in (State.RUNNING, State.JOINING)]

    def describe(self, number: int) -> str:
        return f"worker {number} ({self._plan.devices[number].name})"

    # Starting.

    def begin(self, number: int, joins: Membership | None = None) -> Worker:
        self.board.write_work(number, Work())  # what another one in its place has done is not its own
        ours, theirs = make_pair()
        keep_out = [ours.fileno(), *self._guardian.descriptors()]
        for other in self.workers.values():
            keep_out += [other.link.fileno()] if other.link.fileno() >= 0 else []
            keep_out += [other.pidfd, *other.outputs] if other in self.list_alive() else []
        try:
            started = self._start(number, self._plumbing, theirs.fileno(), keep_out, joins)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._guardian.watch(started.pid)
        worker = Worker(number, started.pid, -1, SocketLink(ours), {started.stdout: "out", started.stderr: "err"})
        try:
            self._listen_to(worker)
        except BaseException:
            self._undo(worker)
            raise
        self.workers[number] = worker
        self.watchman.begin(number, Watched(started.pid, self._plumbing.stacks[number]))
        return worker

    def _listen_to(self, worker: Worker) -> None:
        worker.pidfd = os.pidfd_open(worker.pid)
        for fd in worker.outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, ("output", worker))
        self._selector.register(worker.link, selectors.EVENT_READ, ("link", worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, ("death", worker))

    def _undo(self, worker: Worker) -> None:
        """It was started, and cannot be watched: it ends, and nothing of it is kept."""
        worker.send_signal(signal.SIGKILL)
        self.reap(worker)
        held = [worker.link.fileno(), *worker.outputs, *([worker.pidfd] if worker.pidfd >= 0 else [])]
        for fd in held:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        worker.link.close()
        for fd in held[1:]:
            os.close(fd)

    def begin_newcomer(self, number: int, joins: Membership) -> Worker:
        """In the place of one that was lost."""
        self._plumbing.drain(number)
        worker = self.begin(number, joins)
        worker.state = State.JOINING
        return worker

    # Hearing and telling.

    def wake_by(self, fd: int) -> None:
        """Let `wait` end when this can be read, too."""
        self._selector.register(fd, selectors.EVENT_READ, ("wakeup", None))

    def wait(self, timeout_s: float | None) -> list[Ready]:
        ready = []
        for key, _ in self._selector.select(timeout_s):
            kind, worker = key.data
            if kind == "wakeup":
                os.read(key.fd, 4096)
            else:
                ready.append(Ready(key.fd, kind, worker))
        # The dead come last: what they printed and said before is heard first.
        return sorted(ready, key=lambda each: each.kind == "death")

    def read_output(self, worker: Worker, fd: int) -> bool:
        """True while there may be more."""
        if fd not in worker.outputs:  # it was read to its end, and closed, while this was waiting to be seen to
            return False
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
        # A newcomer repeats what the others have said long ago. What frameworks write, at length, about a graph that is
        # stopped in its middle is not the error that the user has to read.
        if worker.state is not State.JOINING and not (worker.is_bystander and stream == "err"):
            self._fold.feed(worker.number, "out" if stream == "out" else "err", data)
        return True

    def read_outputs(self, worker: Worker) -> None:
        for fd in list(worker.outputs):
            # Not for ever: a process that left the group may hold it open, and go on printing.
            for _ in range(_MOST_READS):
                if not self.read_output(worker, fd):
                    break

    def hear(self, worker: Worker) -> Iterator[dict[str, Any]]:
        """What it has said until now, message by message."""
        try:
            while (message := worker.link.receive(0)) is not None:
                yield message
        except Stopped:
            self._selector.unregister(worker.link)

    def tell(self, number: int, message: dict[str, Any]) -> None:
        """A message that must be heard even by a worker that sleeps in a meeting."""
        self.workers[number].link.send(message)
        wake(self._plumbing.outboxes[number])

    def note(self, number: int, text: str) -> None:
        """Write into the log of a worker."""
        if self._logs is not None:
            self._logs.write(number, text.encode(errors="replace"))

    # Burying.

    def reap(self, worker: Worker) -> int:
        """The exit status of a worker that has died, as subprocess gives it."""
        _, status = os.waitpid(worker.pid, 0)
        # Its children; those that it forked, and that could write where it did, the kernel has killed.
        signal_group(worker.pid, signal.SIGTERM)
        self._remains[worker.pid] = self._clock() + REMAINS_S
        return os.waitstatus_to_exitcode(status)

    def has_line(self, worker: Worker) -> bool:
        """Whether there may be something to `hear` from it."""
        return worker.link.fileno() >= 0 and worker.link.fileno() in self._selector.get_map()

    def let_go(self, worker: Worker) -> None:
        """Carry the last that a dead worker has printed, and close what was kept for it."""
        self.read_outputs(worker)
        for fd in worker.outputs:
            self._selector.unregister(fd)
            os.close(fd)
        worker.outputs.clear()
        if self.has_line(worker):  # its other end is open: something that it started holds it, and never speaks
            self._selector.unregister(worker.link)
        worker.link.close()
        self.watchman.end(worker.number)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)

    def clear_remains(self) -> None:
        """End what dead workers have started and left behind."""
        for group, due in list(self._remains.items()):
            if self._clock() >= due:
                signal_group(group, signal.SIGKILL)
            if is_gone(group) or self._clock() >= due + REMAINS_S:
                del self._remains[group]
                self._guardian.forget(group)

    def list_dues_of_remains(self) -> list[float]:
        """When they are to be seen to; nothing is left of the dead if there are none."""
        return list(self._remains.values())

    def close(self) -> None:
        for worker in self.workers.values():
            for fd in worker.outputs:
                os.close(fd)
            worker.link.close()
        self._selector.close()
        self.board.close()
        self._plumbing.close()
        self._guardian.close()


def count_workers(num_workers: int) -> str:
    return f"{num_workers} worker{'s' if num_workers != 1 else ''}"
