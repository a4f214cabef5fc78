"""`duoka rehearse train.py [--steps 20] [--devices N] [--replicas R] [script arguments]`"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duoka.devices.table import align
from duoka.errors import DeadlineExceeded, DuokaError, RehearsalError, ScriptFailed
from duoka.runtime.command import Command, from_words
from duoka.runtime.plan import Plan, read_seconds, read_whole_number
from duoka.runtime.rehearsal.compare import COLUMNS
from duoka.runtime.rehearsal.rehearsing import (
    KILLED,
    ONE_REPLICA,
    ONE_WORKER,
    REPEATED,
    RESUMED,
    Rehearsing,
    Report,
    Row,
)
from duoka.runtime.rehearsal.runs import Runs, run_program
from duoka.runtime.run import describe_plan, say

EPILOG = """examples:
  duoka rehearse train.py                            20 steps, on the devices of the script's own strategy
  duoka rehearse train.py --steps 5 --devices 4 --data d   options of Duoka stand right behind the script, then its own
  duoka rehearse --steps 5 train.py --steps 900      or before it: then everything behind it is the script's
  duoka rehearse train.py --seed 7                   kill the same worker in the same place again

Exit code: 0 everything is equal, 1 something differs, 2 the script cannot be rehearsed,
3 the script fails by itself, 75 a run takes longer than --timeout.
"""

EQUAL, DIFFERENT, INTERRUPTED = 0, 1, 130
_OWN_PLAN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_plan.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module ...", help="rehearse a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="rehearse a script")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="N", type=int, help="steps of each run; default: 20")
    parser.add_argument("--devices", metavar="N|LIST", help="how many devices, or which; default: the script's")
    parser.add_argument("--replicas", metavar="R", type=int, help="replicas; default: the script's")
    parser.add_argument("--seed", metavar="S", type=int, help="decides which worker is killed where; default: random")
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds that one run may take; default: 600")


def run(arguments: argparse.Namespace) -> int:
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return _rehearse(arguments)
    except KeyboardInterrupt:
        say("the rehearsal was interrupted.")
        return INTERRUPTED
    except DuokaError as error:
        if error.exit_code != DIFFERENT:
            raise
        raise RehearsalError(error.what, why=error.why, do=error.do) from error  # 1 means that something differs
    finally:
        signal.signal(signal.SIGTERM, before)


def _rehearse(arguments: argparse.Namespace) -> int:
    options, words = split_words(arguments)
    num_steps = read_whole_number(20 if options.steps is None else options.steps, "--steps", least=1)
    timeout_s = read_seconds(600.0 if options.timeout is None else options.timeout, "--timeout")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    command = from_words(words, sys.executable, os.getcwd())
    title = f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="duoka-rehearsal-") as name:
        plan = find_plan(command, Path(name), options.devices, options.replicas, timeout_s)
        for note in plan.notes:
            say(note)
        say(f"rehearsing {num_steps} steps with {describe_plan(plan)}; logs in runs/{title}")
        runs = Runs(command, title, Path(name), num_steps, timeout_s)
        report = Rehearsing(plan, runs, num_steps, seed, say).carry_out()
    print(render(report))
    return DIFFERENT if report.has_findings else EQUAL


def split_words(arguments: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Part Duoka's options from the script's words.

    Options stand before the script. If there are none, those that directly follow its name are Duoka's as well.
    """
    words = arguments.command if arguments.module is None else ["-m", *arguments.module]
    words = words[words[:1] == ["--"] :]
    parser = argparse.ArgumentParser(prog="duoka rehearse", add_help=False, allow_abbrev=False)
    _add_options(parser)
    names = [action.dest for action in parser._actions]
    num_target = 2 if words[:1] == ["-m"] else 1
    target, rest = words[:num_target], words[num_target:]
    if any(getattr(arguments, name) is not None for name in names):
        return arguments, [*target, *rest]
    num_own = 0
    while num_own < len(rest) and rest[num_own].partition("=")[0] in {f"--{name}" for name in names}:
        num_own += 1 if "=" in rest[num_own] else 2
    own, rest = rest[:num_own], rest[num_own:]
    return parser.parse_args(own), [*target, *rest[rest[:1] == ["--"] :]]


def find_plan(command: Command, directory: Path, devices: str | None, replicas: int | None, timeout_s: float) -> Plan:
    """Run the script up to its first strategy, and take the plan from there."""
    path = directory / "plan.json"
    words = [*command.interpreter, _OWN_PLAN, command.to_json(), str(path)]
    options = json.dumps({"devices": devices, "replicas": replicas})
    finished = run_program([*words, options], command.directory, timeout_s)
    if finished.is_late:
        raise DeadlineExceeded(
            f"The script has not made a strategy within {finished.seconds:.0f} s.",
            why="Duoka asks the script's first strategy for its devices before it rehearses it.",
            do="make the strategy early in the script, or pass a longer --timeout in seconds.",
        )
    if finished.exit_code:
        raise ScriptFailed(
            "The script fails before or in its first strategy, so there is nothing to compare.",
            why=f"it exited with code {finished.exit_code}:\n{finished.last_words}",
            do="correct the script until `duoka run` trains it, then rehearse it again.",
        )
    if not path.exists():
        raise RehearsalError(
            "The script has ended without making a strategy.",
            why="only scripts that train with duoka.Mirrored can be rehearsed.",
            do="add strategy = duoka.Mirrored() to the script, and train with it.",
        )
    plan = Plan.from_json(path.read_text())
    if plan.num_workers < 2 or plan.num_replicas < 2:
        raise RehearsalError(
            f"A rehearsal cannot use {plan.num_replicas} replicas on {plan.num_workers} workers.",
            why="it kills one worker, and compares several replicas with one.",
            do="pass --devices 2 or more, or leave --devices and --replicas out.",
        )
    return plan


def _end(number: int, frame: Any) -> None:
    """On SIGTERM, end the run under way and remove its records."""
    sys.exit(128 + number)


# What is printed.


def render(report: Report) -> str:
    table = align([("", *COLUMNS), *((row.title, *_cells(row)) for row in report.rows)])
    parts = [[f"Duoka compared {report.num_steps} steps:", "", *table]]
    for place, row in enumerate(report.rows):
        has_earlier = any(earlier.is_finding for earlier in report.rows[:place])
        if part := _describe(row, has_earlier):
            parts.append(part)
    if report.num_left_out:
        where = f" ({', '.join(report.left_out)})" if report.left_out else ""
        lines = f"{report.num_left_out} printed line{'s' if report.num_left_out > 1 else ''}"
        parts.append([f"Duoka left out {lines} that differ between two undisturbed runs{where}."])
    return "\n\n".join("\n".join(part) for part in parts)


def _cells(row: Row) -> Sequence[str]:
    if row.comparison is None:
        return ["fails" if row.failure else "not run"] * len(COLUMNS)
    cells = []
    for column in COLUMNS:
        if column not in row.comparison.found:
            cells.append("none")
        else:
            is_equal = row.comparison.found[column] is None
            cells.append("equal" if is_equal else "BatchNorm" if row.is_batchnorm else "differs")
    return cells


def _describe(row: Row, has_earlier: bool) -> list[str]:
    if row.failure:
        return [f"{row.title}: the run fails, and the undisturbed run does not: {row.failure}"]
    if row.reason:
        return [f"{row.title}: not run, because {row.reason}."]
    assert row.comparison is not None
    lines: list[str] = []
    width = max(map(len, row.sides)) + 1
    for column, difference in row.comparison.found.items():
        if difference is not None:
            lines.append(f"{row.title}: {column} differ, first in {difference.what}.")
            for side, text in zip(row.sides, (difference.left, difference.right), strict=True):
                lines.append(f"  {f'{side}:':{width}} {text}")
    if row.is_batchnorm:
        lines.append(_BATCHNORM)
    elif lines:
        lines.append(_EARLIER if has_earlier and row.kind == ONE_REPLICA else _REMEDIES[row.kind])
    return lines


_BATCHNORM = (
    "  Why: BatchNorm normalises each replica's samples by themselves. With running statistics both runs are equal.\n"
    "  Fix: sync_batchnorm=True in a plain loop makes it equal. Duoka does not count this difference in the exit code."
)
_EARLIER = "  Fix: correct the differences above first. Any of them may be the reason for this one."
_REMEDIES = {
    REPEATED: "  Why: something in the script is random without a seed, or depends on time.\n"
    "  Fix: seed every generator (numpy.random.default_rng(0), torch.Generator().manual_seed(0)), then rehearse again.",
    KILLED: "  Why: the function runs again on another worker after a loss, so it must depend on its samples only.\n"
    "  Fix: return counts as metrics of the function; do not use strategy.worker or change variables in it.",
    RESUMED: "  Why: the script starts from its top, and variables of its own begin as it makes them.\n"
    "  Fix: keep what training or this line depends on in state = strategy.register(name=value), as state.name.",
    ONE_WORKER: "  Why: something depends on the number of the worker, or on how many there are.\n"
    "  Fix: do not use strategy.worker, local_replicas or num_workers where it is trained or printed.",
    ONE_REPLICA: "  Why: the loss is not a mean over samples, or the function compares samples or draws random numbers"
    " (F.dropout).\n"
    "  Fix: return strategy.weigh(loss, count), or strategy.weigh(loss) for a sum.",
}
