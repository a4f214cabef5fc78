"""Checkpoints written while training goes on: the state is copied at once, the disk is waited for by a thread."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from duoka.checkpoint.codec import Codec
from duoka.checkpoint.snapshot import Room, Snapshot, take
from duoka.checkpoint.store import Store
from duoka.errors import CheckpointError, DeadlineExceeded


@dataclass
class Receipt:
    """For a state that was given to be saved: what has become of it so far."""

    step: int
    stall_s: float = 0.0  # for how long the one who gave it was held up
    is_saved: bool = False  # it is on the disk
    failure: CheckpointError | None = None  # it is not, and will not be
    is_replaced: bool = False  # it is not, for a newer one came before its turn


@dataclass(frozen=True)
class _Job:
    snapshot: Snapshot
    room: Room
    receipt: Receipt


class BackgroundWriter:
    """Takes states from one thread, and writes them to a store on a thread of its own.

    There is memory for two states at most, the second only once it is needed: one is being written, one waits for that.
    A third takes the place of the one that waits: training never waits for a disk, and the newest state is written.
    A save that fails is said loudly, and kept in `failure` until one succeeds; training goes on.

    At the interpreter's exit the last save gets `exit_deadline_s`. A forked child has no part in any of this.
    """

    def __init__(
        self,
        store: Store,
        codecs: Sequence[Codec],
        *,
        exit_deadline_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store, self._codecs, self._clock = store, codecs, clock
        self.failure: CheckpointError | None = None
        self.saved_step: int | None = None  # the newest that is on the disk, of this writer's
        self._exit_deadline_s, self._pid = exit_deadline_s, os.getpid()
        self._changed = threading.Condition()
        self._free = [Room(), Room()]
        self._waiting: deque[_Job] = deque()
        self._writing: _Job | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, step: int, facts: dict[str, Any], state: Any) -> Receipt:
        """Copy a state and let it be written. What becomes of it is known from the receipt, at the latest after `wait`.

        A state that cannot be saved at all is a CheckpointError here; trouble with memory or the disk is only said.
        """
        begin, receipt = self._clock(), Receipt(step)
        self._check_usable()
        snapshot = take(step, facts, state, self._codecs)
        room = self._take_room(step)
        try:
            job = _Job(room.hold(snapshot), room, receipt)
        except (MemoryError, OSError) as error:
            self._give_back(room)
            self._fail(receipt, CheckpointError("There is no memory to copy the state to.", why=f"{error}"))
            receipt.stall_s = self._clock() - begin
            return receipt
        except BaseException:
            self._give_back(room)
            raise
        with self._changed:
            self._waiting.append(job)
            self._start()
            self._changed.notify_all()
        receipt.stall_s = self._clock() - begin
        return receipt

    def reserve(self, state: Any) -> None:
        """Let memory for a state like this be made meanwhile: the first save takes no longer than the others then."""
        self._check_usable()
        nbytes = take(0, {}, state, self._codecs).nbytes
        with self._changed:
            room = self._free.pop() if self._free else None
        if room is not None:
            threading.Thread(target=self._make, args=(room, nbytes), name="duoka-memory", daemon=True).start()

    def wait(self, deadline_s: float) -> None:
        """Until everything given is on the disk, or has failed: see `failure`. Too long is a DeadlineExceeded."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if not self._changed.wait_for(self._is_idle, deadline_s):
                job = self._writing or self._waiting[0]
                raise DeadlineExceeded(
                    f"The checkpoint of step {job.snapshot.step} is not on the disk after {deadline_s:g} s.",
                    why=f"{self.store.directory} takes long to write {job.snapshot.nbytes / 1e6:,.0f} MB.",
                    do="look at the disk; older checkpoints are as they were.",
                )

    def close(self, deadline_s: float) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait(deadline_s)
        finally:
            atexit.unregister(self._at_exit)
            if os.getpid() == self._pid:
                with self._changed:
                    self._is_closed = True
                    self._changed.notify_all()

    def _take_room(self, step: int) -> Room:
        """Memory that nobody needs, or that of a state that a newer one replaces."""
        with self._changed:
            # Only memory that is just being reserved can be waited for here, not the disk.
            self._changed.wait_for(lambda: self._free or self._waiting, self._exit_deadline_s)
            if self._free:
                return self._free.pop()
            job = self._waiting.pop() if self._waiting else None
        if job is None:
            raise DeadlineExceeded(f"Memory for the checkpoint of step {step} was not made in time.")
        job.receipt.is_replaced = True
        job.receipt.failure = CheckpointError(
            f"The checkpoint of step {job.snapshot.step} was not written: that of step {step} took its place."
        )
        self._say(
            f"the checkpoint of step {job.snapshot.step} is not written, that of step {step} takes its place: "
            f"{self.store.directory} is written to more slowly than states come. Save less often."
        )
        return job.room

    def _give_back(self, room: Room) -> None:
        with self._changed:
            self._free.append(room)
            self._changed.notify_all()

    def _make(self, room: Room, nbytes: int) -> None:
        try:
            with suppress(MemoryError, OSError):  # the save will say so
                room.make(nbytes)
        finally:
            self._give_back(room)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a disk that never answers must not keep the interpreter from ending. _at_exit waits, for a time.
            self._thread = threading.Thread(target=self._run, name="duoka-checkpoint", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                job = self._writing = self._waiting.popleft()
            try:
                self._write(job)
            finally:
                with self._changed:
                    self._writing = None
                    self._free.append(job.room)
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        try:
            self.store.write(job.snapshot)
        except CheckpointError as error:
            self._fail(job.receipt, error)
        except Exception as error:  # a mistake of ours must not end the thread: later saves are tried, too
            self._fail(job.receipt, CheckpointError(f"{type(error).__name__}: {error}"))
        else:
            self.failure, self.saved_step, job.receipt.is_saved = None, job.snapshot.step, True

    def _fail(self, receipt: Receipt, error: CheckpointError) -> None:
        self.failure = receipt.failure = error
        reason = " ".join(part for part in (error.what, error.why) if part)
        self._say(
            f"WARNING: the checkpoint of step {receipt.step} was not saved. {reason} Training goes on without it, and"
            " the next save is tried."
        )

    def _say(self, line: str) -> None:
        with suppress(Exception):  # a screen that is gone is no reason to stop saving
            self.store.say(line)

    def _is_idle(self) -> bool:
        return not self._waiting and self._writing is None

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(
                "A forked process cannot save checkpoints.",
                why=f"the thread that writes them is in process {self._pid}.",
            )
        if self._is_closed:
            raise CheckpointError("The writer of checkpoints is closed.")

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self.wait(self._exit_deadline_s)
        except DeadlineExceeded as error:
            self._say(f"WARNING: {error.what} {error.why}")
