"""A run of the user's script, from the first line on the screen to the exit code."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from duoka.devices.device import Device
from duoka.errors import DuokaError
from duoka.runtime.command import Command
from duoka.runtime.crew import count_workers
from duoka.runtime.output import Fold, Logs, make_run_directory
from duoka.runtime.plan import Plan
from duoka.runtime.process import flush_streams
from duoka.runtime.returning import run_to_the_end
from duoka.runtime.shutdown import Outcome
from duoka.runtime.starters import ScriptStarter
from duoka.runtime.supervisor import Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HERE = os.path.abspath(__file__)
_SCREEN_BYTES = 4096  # a pipe that can be written takes this much without blocking


def say(text: str) -> None:
    """Talk goes to stderr; stdout belongs to the script."""
    print(f"duoka: {text}", file=sys.stderr, flush=True)


def become_supervisor(plan: Plan, command: Command) -> NoReturn:
    """Replace this process by the supervisor of a run: what it has imported and holds is gone."""
    flush_streams()
    os.chdir(command.directory)
    # By its path: with -m, modules in the working directory would come before those of the standard library.
    os.execv(command.interpreter[0], [*command.interpreter, _HERE, plan.to_json(), command.to_json()])


def run_script(plan: Plan, command: Command) -> int:
    signals = _Signals()
    out, err = (_Screen(fd, is_hurried=lambda: signals.have_come) for fd in (1, 2))
    fold = Fold(out.write, err.write, time.monotonic, one_screen=os.isatty(1) and os.isatty(2))

    def say(text: str) -> None:
        fold.announce(f"duoka: {text}".encode(errors="replace"))

    title = None if plan.rehearsal is None else plan.rehearsal.title
    run_directory = make_run_directory(Path(command.directory) / "runs", title)
    for note in (*plan.notes, *([run_directory.note] if run_directory.note else [])):
        say(note)
    say(f"{describe_plan(plan)}; logs in {_short(run_directory.path, command.directory)}")
    logs = Logs(run_directory.path, say)
    supervisor = Supervisor(plan, ScriptStarter(plan, command, os.environ, run_directory.path), fold, logs, say)
    outcome = run_to_the_end(supervisor, say, signals.wakeup, signals.next)
    ending = describe_ending(outcome, plan)
    if ending.line:
        say(ending.line)
    err.write(ending.traceback.encode(errors="replace"))
    return outcome.exit_code


def describe_plan(plan: Plan) -> str:
    """One line on what runs where.

    >>> from duoka.devices.device import Device
    >>> describe_plan(Plan((Device("cpu", 0),), num_replicas=4, threads=1))
    '4 replicas on 1 worker (cpu:0), 1 thread each, seed 0'
    >>> describe_plan(Plan((Device("gpu", 0), Device("gpu", 1)), num_replicas=2, threads=1, transport="nccl"))
    '2 replicas on 2 workers (gpu:0, gpu:1), 1 thread each, seed 0, PyTorch by torch.distributed (NCCL)'
    >>> halves = [Device("gpu", 0, virtual=number, memory_limit_mb=1024) for number in (0, 1)]
    >>> describe_plan(Plan(tuple(halves), num_replicas=2, threads=1))
    '2 replicas on 2 workers (gpu:0/v0 with 1024 MB, gpu:0/v1 with 1024 MB), 1 thread each, seed 0'
    """
    names = [_with_limit(device) for device in plan.devices]
    shown = ", ".join(names) if len(names) <= 8 else f"{names[0]} ... {names[-1]}"
    workers = count_workers(plan.num_workers)
    replicas = f"{plan.num_replicas} replica{'s' if plan.num_replicas > 1 else ''}"
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''} each"
    library = {"gloo": "Gloo", "nccl": "NCCL"}.get(plan.transport)
    carried = f", PyTorch by torch.distributed ({library})" if library and plan.num_workers > 1 else ""
    return f"{replicas} on {workers} ({shown}), {threads}, seed {plan.seed}{carried}"


def _with_limit(device: Device) -> str:
    return device.name if device.memory_limit_mb is None else f"{device} with {device.memory_limit_mb} MB"


class Ending(NamedTuple):
    """What is said about the end of a run: one line, and the first failure's own traceback."""

    line: str = ""
    traceback: str = ""


def describe_ending(outcome: Outcome, plan: Plan) -> Ending:
    if outcome.failed_worker is None:
        return Ending(outcome.last_line)
    who = f"worker {outcome.failed_worker} ({plan.devices[outcome.failed_worker].name})"
    what = f"exited with code {outcome.exit_code}."
    if outcome.failure is not None:
        where = outcome.failure.get("where", "")
        what = f"failed {where}:" if where else "failed:"
    if outcome.num_stopped:
        what = f"{count_workers(outcome.num_stopped)} stopped because {who} {what}"
    else:
        what = f"{who} {what}"
    return Ending(what, "" if outcome.failure is None else outcome.failure["traceback"])


class _Signals:
    """Signals to end that have come. One that was ignored when we started stays ignored: nohup means it."""

    def __init__(self) -> None:
        self.wakeup, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.have_come = False
        self._caught: deque[int] = deque()
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._catch(number))

    def _catch(self, number: int) -> None:
        self.have_come = True
        self._caught.append(number)

    def next(self) -> int | None:
        return self._caught.popleft() if self._caught else None


class _Screen:
    """A stream whose reader may be slow: then the workers wait, too. Once in a hurry, nobody waits for it any more."""

    def __init__(self, fd: int, is_hurried: Callable[[], bool]) -> None:
        self._fd, self._is_hurried = fd, is_hurried
        self._patience_ms = 500  # in a hurry, for all that is still to be shown together
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> None:
        """A reader that has gone away (`| head`) does not stop the run; the logs have everything."""
        try:
            for start in range(0, len(data), _SCREEN_BYTES):
                if not self._wait_for_room():
                    return
                _write_all(self._fd, data[start : start + _SCREEN_BYTES])
        except OSError:
            pass

    def _wait_for_room(self) -> bool:
        while not self._poll.poll(min(100, self._patience_ms)):
            if self._is_hurried():
                self._patience_ms = max(0, self._patience_ms - 100)
            if self._patience_ms == 0:
                return False
        return True


def _short(path: Path, directory: str) -> str:
    try:
        return str(path.relative_to(directory))
    except ValueError:
        return str(path)


def _write_all(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def main() -> None:
    """`python .../run.py PLAN COMMAND`: what a script's first strategy turns its process into."""
    try:
        sys.exit(run_script(Plan.from_json(sys.argv[1]), Command.from_json(sys.argv[2])))
    except DuokaError as error:
        say(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
