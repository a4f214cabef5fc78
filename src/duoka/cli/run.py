"""`duoka run [--devices N|LIST] [--replicas R] script.py args...`"""

from __future__ import annotations

import argparse
import os
import sys

from duoka.errors import LaunchError
from duoka.runtime.command import from_words

EPILOG = """examples:
  duoka run train.py                         the script's own strategy decides
  duoka run --devices 4 train.py --epochs 3  four devices, whatever the script says
  duoka run --devices gpu:0,gpu:2 --replicas 8 -m package.train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", metavar="N|LIST", help="how many devices, or which: gpu:0,gpu:2")
    parser.add_argument("--replicas", metavar="R", type=int, help="logical replicas; default: one per device")
    parser.add_argument("--threads", metavar="T", type=int, help="threads per worker; default: cores // replicas")
    parser.add_argument("--seed", metavar="S", type=int, help="the seed of the run; default: the script's")
    parser.add_argument("--deadline", metavar="S", type=float, help="seconds to wait for a worker")
    parser.add_argument(
        "--no-respawn", dest="respawn", action="store_false", default=None, help="do not replace lost workers"
    )
    parser.add_argument("--respawn", dest="respawn", action="store_true", help="replace them, whatever the script says")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module ...", help="run a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="run a script")


def run(arguments: argparse.Namespace) -> int:
    words = arguments.command if arguments.module is None else ["-m", *arguments.module]
    command = from_words(words[words[:1] == ["--"] :], sys.executable, os.getcwd())
    options = {name: getattr(arguments, name) for name in ("replicas", "threads", "seed", "deadline", "respawn")}
    given = tuple(name for name, value in options.items() if value is not None)
    if arguments.devices is None:
        if given:
            raise LaunchError(
                f"{'--no-respawn' if arguments.respawn is False else f'--{given[0]}'} was passed without --devices.",
                why="without --devices the script's own strategy decides on that.",
                do=f"add --devices, or pass {given[0]} to the strategy in the script.",
            )
        # Nothing to decide here: the script does, and starting it plainly is the same.
        target = ["-m", command.module] if command.module is not None else [str(command.script)]
        os.execv(sys.executable, [sys.executable, *target, *command.arguments])
    # Imported late: `duoka run --help` and a wrong script name need none of it.
    from duoka.planning import make_plan, refuse_other_launchers
    from duoka.runtime.run import become_supervisor
    from duoka.strategies.strategy import Request

    request = Request(
        devices=arguments.devices,
        replicas=arguments.replicas,
        seed=arguments.seed or 0,
        threads=arguments.threads,
        deadline_s=60.0 if arguments.deadline is None else arguments.deadline,
        respawn=arguments.respawn is not False,
    )
    refuse_other_launchers()
    become_supervisor(make_plan(request, command_line=("devices", *given)), command)
