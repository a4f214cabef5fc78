"""The life of a worker process: tie it to its supervisor, seed it, run its part, say how it ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from duoka.devices.memory_limit import explain
from duoka.errors import DuokaError, Stopped
from duoka.runtime.command import Command
from duoka.runtime.identity import VARIABLE, Identity, read_identity
from duoka.runtime.link import SocketLink
from duoka.runtime.plan import Plan
from duoka.runtime.process import die_with_parent, keep_from_children
from duoka.runtime.script import run_as_main, user_traceback
from duoka.runtime.seeds import seed_everything

_LONGEST_TRACEBACK = 40_000
_INTERRUPTED = 130


@dataclass
class Attachment:
    """This process is a worker, and here is what ties it to its run."""

    identity: Identity
    plan: Plan
    link: SocketLink
    completed_calls: Callable[[], int] = lambda: 0

    @property
    def worker(self) -> int:
        return self.identity.worker


_attachment: Attachment | None = None


def attachment() -> Attachment | None:
    return _attachment


def attach(identity: Identity) -> Attachment:
    """Become this worker. Called once, before any user code."""
    global _attachment
    die_with_parent(identity.supervisor)
    keep_from_children(identity.descriptors())
    os.register_at_fork(after_in_child=_detach)
    link = SocketLink(socket.socket(fileno=identity.link))
    _attachment = Attachment(identity, Plan.from_json(identity.plan), link)
    return _attachment


def _detach() -> None:
    global _attachment
    _attachment = None


def run_body(attached: Attachment, body: Callable[[], object]) -> int:
    """Run this worker's part and tell the supervisor how it ended. Returns the exit code."""
    try:
        body()
        code = 0
    except (KeyboardInterrupt, Stopped):
        code = _INTERRUPTED
    except SystemExit as exit:
        code = _code_of(exit)
    except BaseException as error:
        code = _report(attached, error)
    _flush()
    if code == 0:
        attached.link.send({"kind": "done", "completed": attached.completed_calls()})
    return code


def _code_of(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return (exit.code or 0) & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _report(attached: Attachment, error: BaseException) -> int:
    shown: BaseException = explain(error, attached.plan.devices[attached.worker]) or error
    if shown is not error:
        shown.__cause__ = error
    code = shown.exit_code if isinstance(shown, DuokaError) else 1
    text = user_traceback(shown)
    attached.link.send(
        {
            "kind": "failed",
            "error": type(shown).__name__,
            "traceback": text[-_LONGEST_TRACEBACK:],
            "exit_code": code,
        }
    )
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def main() -> None:
    """`python -m duoka.runtime.worker COMMAND`: what the supervisor starts."""
    identity = read_identity(os.environ, os.getppid())
    if identity is None:
        sys.exit("duoka: this is the inside of a worker; start `duoka run script.py` instead.")
    del os.environ[VARIABLE]
    attached = attach(identity)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    command = Command.from_json(sys.argv[1])
    seed_everything(attached.plan.seed)
    code = run_body(attached, lambda: run_as_main(command))
    if code:
        sys.exit(code)


if __name__ == "__main__":
    # Run as a module this file is `__main__`, and the script is about to become that.
    from duoka.runtime.worker import main as start

    start()
