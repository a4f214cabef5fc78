"""Recorder in a rehearsed worker: notes lines, numbers and state, ends the script after its steps, or kills the worker.

The script runs as in any other run. The recorder acts at step boundaries only, where no exchange is under way, and in
the phases of an exchange when it has to kill its worker.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from duoka.checkpoint.files import load_state, save_state
from duoka.collectives.shm import SharedMemory
from duoka.frameworks.exchange.checks import State
from duoka.frameworks.saving import list_codecs
from duoka.runtime.rehearsal.record import Line, WorkerRecord, flatten
from duoka.runtime.rehearsal.settings import Rehearsal
from duoka.runtime.script import is_users_file

BEFORE = "before"  # a step: the phase that every step has


class Layers(Protocol):
    """Layers that make one replica differ from several."""

    def has_dropout(self) -> bool: ...

    def has_batchnorm(self) -> bool:
        """In training mode."""
        ...

    def switch_off_dropout(self) -> None: ...

    def hold_batchnorm(self) -> None:
        """Let BatchNorm use its running statistics, which then stay unchanged."""
        ...


@runtime_checkable
class Layered(Protocol):
    """A state whose layers are known."""

    @property
    def layers(self) -> Layers: ...


class Recorder:
    """The record of this worker."""

    def __init__(self, settings: Rehearsal, worker: int) -> None:
        self._settings = settings
        self._record = WorkerRecord(worker)
        self._phases: set[str] = set()
        self._printed: PrintedLines | None = None
        self._collective: SharedMemory | None = None
        self._get_state: Callable[[], State] | None = None
        self._step = 0
        self._is_written = False
        self._first_line: int | None = None  # that is compared: printed after training has begun

    def watch_output(self) -> None:
        self._printed = PrintedLines(sys.stdout)
        sys.stdout = self._printed

    def join(self, collective: SharedMemory) -> None:
        """Called once, when the script has made its strategy."""
        self._collective = collective
        collective.rehearsal = self
        collective.moment = self._see_phase

    @property
    def checkpoint_directory(self) -> str:
        return str(Path(self._settings.directory) / "checkpoints")

    # Called by the frameworks.

    def at_boundary(self, step: int, get_state: Callable[[], State]) -> None:
        """All steps before this one are complete."""
        if self._first_line is None and self._printed is not None:
            self._first_line = len(self._printed.lines)
        self._get_state, self._step = get_state, step
        death = self._own_death
        if death is not None and (step > death.step or (step == death.step and death.phase == BEFORE)):
            self._die(BEFORE)
        self._record.num_steps = min(step + 1, self._settings.num_steps)
        self._see_layers(get_state())
        if step >= self._settings.num_steps:
            self._write()
            raise SystemExit(0)  # as a script ends itself: `finally` blocks and exit handlers run

    def at_training_boundary(self, step: int, where: str, capture: Callable[[], Any]) -> None:
        """The state of the run can be saved here."""
        settings = self._settings
        if settings.stop is None or settings.resumes or step < settings.stop:
            return
        assert self._collective is not None
        if self._collective.worker == self._collective.main:
            save_state(settings.state, capture(), list_codecs())
        self._record.stopped = where
        self._write()
        raise SystemExit(0)

    def note_plain(self) -> None:
        """The script trains in a plain loop."""
        self._record.is_plain = True

    def load_state(self) -> Any:
        """The state from which this run continues; None if it begins."""
        return load_state(self._settings.state, list_codecs()) if self._settings.resumes else None

    def note_resumed(self) -> None:
        """The script is where the run was stopped: what it has printed on its way was printed before."""
        if self._printed is not None:
            self._first_line = len(self._printed.lines)

    def note_returned(self, returned: Any) -> None:
        self._record.calls.append(flatten(returned))

    def come_to_end(self) -> None:
        """The script has ended, with as many steps or with fewer."""
        if self._own_death is not None and self._get_state is not None and not self._is_written:
            self._die("the end of the script")
        self._write()

    # The end.

    @property
    def _own_death(self) -> Any:
        death = self._settings.death
        return death if death is not None and death.worker == self._record.worker else None

    def _see_phase(self, name: str) -> None:
        if self._get_state is None:
            return  # training has not begun
        self._phases.add(name)
        death = self._own_death
        if death is not None and self._step == death.step and death.phase == name:
            self._die(name)

    def _die(self, phase: str) -> None:
        self._record.killed = (self._step, phase)
        self._write()
        os.kill(os.getpid(), signal.SIGKILL)

    def _see_layers(self, state: State) -> None:
        if not isinstance(state, Layered):
            return
        self._record.knows_layers = True
        self._record.has_dropout |= state.layers.has_dropout()
        self._record.has_batchnorm |= state.layers.has_batchnorm()
        if not self._settings.dropout:
            state.layers.switch_off_dropout()
        if not self._settings.batchnorm:
            state.layers.hold_batchnorm()

    def _write(self) -> None:
        if self._is_written:
            return
        self._is_written = True
        record, collective = self._record, self._collective
        record.phases = sorted(self._phases)
        if self._printed is not None and self._first_line is not None:
            record.lines = self._printed.lines[self._first_line :]
        is_alive = record.killed is None
        record.is_main = is_alive and (collective is None or collective.worker == collective.main)
        state = None if self._get_state is None or not record.is_main else self._get_state()
        data = [] if state is None else [state.read(place).copy() for place in range(len(state.lines))]
        record.tensors = [] if state is None else list(zip(state.lines, [each.nbytes for each in data], strict=True))
        record.write(Path(self._settings.directory), data)


class PrintedLines:
    """Standard output that remembers its lines, and which statement of the user's code has printed each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open, self._where = "", ""
        self.lines: list[Line] = []

    def write(self, text: str) -> int:
        count = self._stream.write(text)
        if not self._open:
            self._where = _find_statement()
        *finished, self._open = (self._open + text).split("\n")
        for line in finished:
            self.lines.append(Line(line.rstrip("\r").rpartition("\r")[2], self._where))
        return count

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _find_statement() -> str:
    """Find the innermost line of the user's own code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
