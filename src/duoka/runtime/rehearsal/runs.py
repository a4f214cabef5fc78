"""Rehearsed runs: start the script in processes of its own, wait for its end with a deadline, and read its record."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from duoka.runtime import run as supervisor_program
from duoka.runtime.command import Command
from duoka.runtime.plan import Plan
from duoka.runtime.process import die_with_parent
from duoka.runtime.rehearsal.record import Record, read_record
from duoka.runtime.rehearsal.settings import Death, Rehearsal

_GRACE_S = 10.0  # for a supervisor that was asked to end: its workers take 3 s at most
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Finished:
    """How a process ended. Without an exit code it was killed, because it took longer than its deadline."""

    exit_code: int | None
    stderr: str
    seconds: float

    @property
    def is_late(self) -> bool:
        return self.exit_code is None

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr: the traceback, if there is one."""
        lines = self.stderr.rstrip().splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])


@dataclass(frozen=True)
class Run:
    """One rehearsed run. Without a record it failed, or took too long."""

    finished: Finished
    record: Record | None

    @property
    def failure(self) -> str:
        """Why there is nothing to compare; empty if the run ended well."""
        if self.finished.is_late:
            return f"it was killed after {self.finished.seconds:.0f} s"
        if self.finished.exit_code:
            return f"it exited with code {self.finished.exit_code}"
        return "" if self.record is not None else "its main worker left no record"


class Runs:
    """The runs of one rehearsal: `directory` holds their records, and `title` names their logs below runs/."""

    def __init__(self, command: Command, title: str, directory: Path, num_steps: int, timeout_s: float) -> None:
        self._command, self._title, self._directory = command, title, directory
        self._num_steps, self._timeout_s = num_steps, timeout_s

    def run(
        self,
        name: str,
        plan: Plan,
        *,
        death: Death | None = None,
        dropout: bool = True,
        batchnorm: bool = True,
        stop: int | None = None,
        resumes: bool = False,
    ) -> Run:
        """`stop`: after so many steps, with a state that the next run `resumes`."""
        directory = self._directory / name
        directory.mkdir()
        title, state = f"{self._title}/{name}", str(self._directory / "stopped.state")
        steps = self._num_steps
        settings = Rehearsal(title, str(directory), steps, death, dropout, batchnorm, stop, state, resumes)
        plan = replace(plan, rehearsal=settings)
        words = [*self._command.interpreter, os.path.abspath(supervisor_program.__file__)]
        finished = run_program(
            [*words, plan.to_json(), self._command.to_json()], self._command.directory, self._timeout_s
        )
        return Run(finished, None if finished.exit_code != 0 else read_record(directory))


def run_program(words: Sequence[str], directory: str, timeout_s: float) -> Finished:
    """Run a program to its end, or kill it at its deadline. It dies with this process."""
    parent, start = os.getpid(), time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(words),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the program
            preexec_fn=lambda: die_with_parent(parent),
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        err.seek(0)
        return Finished(exit_code, err.read().decode(errors="replace"), time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the supervisor to end its workers. If it does not, kill it: the kernel then kills the workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
