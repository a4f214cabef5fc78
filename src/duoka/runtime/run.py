"""A run of the user's script, from the first line on the screen to the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from duoka.runtime.command import Command
from duoka.runtime.output import Fold, Logs, make_run_directory
from duoka.runtime.plan import Plan
from duoka.runtime.starters import ScriptStarter
from duoka.runtime.supervisor import Outcome, Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(text: str) -> None:
    """Talk goes to stderr; stdout belongs to the script."""
    _write_all(2, f"duoka: {text}\n".encode())


def run_script(plan: Plan, command: Command) -> int:
    run_directory = make_run_directory(Path(command.directory) / "runs")
    logs = Logs(run_directory.path, say)
    for note in (*plan.notes, *([run_directory.note] if run_directory.note else [])):
        say(note)
    say(f"{describe_plan(plan)}; logs in {_short(run_directory.path, command.directory)}")
    one_screen = os.isatty(1) and os.isatty(2)
    fold = Fold(_writer(1), _writer(2), time.monotonic, one_screen=one_screen)
    supervisor = Supervisor(plan, ScriptStarter(plan, command, os.environ), fold, logs, say)
    wakeup, next_signal = _catch_signals()
    outcome = supervisor.run(wakeup, next_signal)
    tell_ending(outcome, plan)
    return outcome.exit_code


def describe_plan(plan: Plan) -> str:
    """One line on what runs where.

    >>> from duoka.devices.device import Device
    >>> describe_plan(Plan((Device("cpu", 0),), num_replicas=4, threads=1))
    '4 replicas on 1 worker (cpu:0), 1 thread each, seed 0'
    """
    names = [device.name for device in plan.devices]
    shown = ", ".join(names) if len(names) <= 8 else f"{names[0]} ... {names[-1]}"
    workers = f"{plan.num_workers} worker{'s' if plan.num_workers > 1 else ''}"
    replicas = f"{plan.num_replicas} replica{'s' if plan.num_replicas > 1 else ''}"
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''} each"
    return f"{replicas} on {workers} ({shown}), {threads}, seed {plan.seed}"


def tell_ending(outcome: Outcome, plan: Plan) -> None:
    """The first failure's own traceback, once, last."""
    if outcome.failed_worker is None:
        if outcome.stopped_because:
            say(f"stopped: {outcome.stopped_because}.")
        return
    others = plan.num_workers - 1
    device = plan.devices[outcome.failed_worker].name
    who = f"worker {outcome.failed_worker} ({device})"
    if others:
        say(f"{others} worker{'s' if others > 1 else ''} stopped because {who} failed:")
    else:
        say(f"{who} failed:")
    if outcome.failure is not None:
        _write_all(2, outcome.failure["traceback"].encode(errors="replace"))
    else:
        say(f"it exited with code {outcome.exit_code}.")


def _catch_signals() -> tuple[int, Callable[[], int | None]]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    caught: list[int] = []
    signal.set_wakeup_fd(writing)
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: caught.append(number))
    return reading, lambda: caught.pop(0) if caught else None


def _short(path: Path, directory: str) -> str:
    try:
        return str(path.relative_to(directory))
    except ValueError:
        return str(path)


def _writer(fd: int) -> Callable[[bytes], None]:
    return lambda data: _write_all(fd, data)


def _write_all(fd: int, data: bytes) -> None:
    """A reader that has gone away (`| head`) does not stop the run; the logs have everything."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def main() -> None:
    """`python -m duoka.runtime.run PLAN COMMAND`: what a script's first strategy turns its process into."""
    sys.exit(run_script(Plan.from_json(sys.argv[1]), Command.from_json(sys.argv[2])))


if __name__ == "__main__":
    main()
