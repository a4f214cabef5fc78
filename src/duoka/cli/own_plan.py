"""The plan that a script's own strategy asks for: found by running the script up to that strategy, and no further.

`duoka rehearse` starts this file as a program in a process of its own, and reads the plan from the file it names.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from duoka.errors import DuokaError
from duoka.planning import check_request, make_plan, refuse_other_launchers
from duoka.runtime.command import Command
from duoka.runtime.plan import Plan
from duoka.runtime.process import flush_streams
from duoka.runtime.script import run_as_main, user_traceback
from duoka.session import Mirrored
from duoka.strategies.strategy import Request

_FEWEST = 2  # workers and replicas of a rehearsal


def plan_rehearsal(request: Request, devices: str | None, replicas: int | None) -> Plan:
    """Plan what the script asks for, or what the command line says; at least two replicas on two workers."""
    check_request(request)
    asked = replace(
        request,
        devices=request.devices if devices is None else devices,
        replicas=request.replicas if replicas is None else replicas,
    )
    plan = make_plan(asked)
    if plan.num_workers < _FEWEST and devices is None:
        before = plan.num_replicas
        plan = make_plan(replace(asked, devices=_FEWEST, replicas=max(_FEWEST, before)))
        note = "the script uses 1 device; the rehearsal uses --devices 2, so that a worker can be killed"
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(plan, respawn=False)  # a killed worker stays away: replacement workers are not rehearsed


def main() -> NoReturn:
    """`python .../own_plan.py COMMAND PLAN_FILE OPTIONS`"""
    command, path, options = Command.from_json(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])

    def answer(request: Request) -> Any:
        refuse_other_launchers()
        path.write_text(plan_rehearsal(request, options["devices"], options["replicas"]).to_json())
        flush_streams()
        os._exit(0)  # nothing has trained: no file, process or exit handler of the script has anything to finish

    Mirrored.connect = staticmethod(answer)
    try:
        run_as_main(command)
    except Exception as error:
        sys.stderr.write(user_traceback(error))
        sys.exit(error.exit_code if isinstance(error, DuokaError) else 1)
    sys.exit(0)


if __name__ == "__main__":
    main()
