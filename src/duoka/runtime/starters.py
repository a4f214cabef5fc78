"""Two ways to start a worker: the user's script in a new process, or a function in a forked one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from duoka.runtime.command import Command
from duoka.runtime.crew import Started
from duoka.runtime.environment import worker_environment
from duoka.runtime.identity import VARIABLE, Identity
from duoka.runtime.plan import Plan
from duoka.runtime.plumbing import Plumbing
from duoka.runtime.screen import count_columns
from duoka.topology.membership import Membership

# By its path: with -m, modules in the working directory would come before those of the standard library.
_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")


def _identity(
    plan: Plan,
    worker: int,
    plumbing: Plumbing,
    link: int,
    joins: Membership | None,
    run_directory: str = "",
    columns: int = 0,
) -> Identity:
    return Identity(
        worker=worker,
        supervisor=os.getpid(),
        link=link,
        inbox=plumbing.inboxes[worker],
        outboxes=plumbing.outboxes,
        board=plumbing.board,
        arena=plumbing.arena,
        chronicle=plumbing.chronicle,
        parcel=plumbing.parcel,
        stack=plumbing.stacks[worker],
        plan=plan.to_json(),
        run_directory=run_directory,
        columns=columns,
        snapshots=() if plumbing.snapshots is None else plumbing.snapshots.descriptors_of(worker),
        generation=0 if joins is None else joins.generation,
        members=None if joins is None else joins.workers,
    )


class ScriptStarter:
    def __init__(
        self, plan: Plan, command: Command, environ: Mapping[str, str], run_directory: Path | None = None
    ) -> None:
        self._plan, self._command, self._environ = plan, command, environ
        self._run_directory = "" if run_directory is None else str(run_directory)

    def __call__(
        self, worker: int, plumbing: Plumbing, link: int, keep_out: Sequence[int], joins: Membership | None = None
    ) -> Started:
        identity = _identity(self._plan, worker, plumbing, link, joins, self._run_directory, count_columns())
        environ = worker_environment(self._environ, self._plan, worker) | {VARIABLE: identity.to_json()}
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        # Held back until the worker is ready for it: Python shows an interrupt during its start as a crash.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [*self._command.interpreter, _WORKER, self._command.to_json()],
                env=environ,
                cwd=self._command.directory,
                stdin=subprocess.DEVNULL,
                stdout=out[1],
                stderr=err[1],
                pass_fds=identity.descriptors(),
                start_new_session=True,
            )
        except BaseException:
            _close(out[0], err[0])
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _close(out[1], err[1])
        process.returncode = 0  # the supervisor reaps it; Popen is neither to do so nor to warn that nobody has
        return Started(process.pid, out[0], err[0])


class ForkStarter:
    """Runs `body` in forks of this process: for notebooks, where there is no script to start again."""

    def __init__(self, plan: Plan, body: Callable[[Identity], int]) -> None:
        self._plan, self._body = plan, body

    def __call__(
        self, worker: int, plumbing: Plumbing, link: int, keep_out: Sequence[int], joins: Membership | None = None
    ) -> Started:
        identity = _identity(self._plan, worker, plumbing, link, joins)
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except BaseException:
            _close(*out, *err)
            raise
        if pid == 0:
            code = 70
            try:
                os.setsid()
                for fd in (*keep_out, out[0], err[0]):
                    os.close(fd)
                _print_into(out[1], err[1])
                code = self._body(identity)
            finally:
                os._exit(code)
        _close(out[1], err[1])
        return Started(pid, out[0], err[0])


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)


def _print_into(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    # Notebooks and test runners put objects of their own here, whose threads did not survive the fork.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
