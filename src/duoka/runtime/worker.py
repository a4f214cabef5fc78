"""The life of a worker process: tie it to its supervisor, seed it, run its part, say how it ended."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from duoka.collectives.board import Work
from duoka.devices.cores import keep_to_own_cores
from duoka.devices.heap import keep_freed_memory
from duoka.devices.memory_limit import explain, lift
from duoka.errors import DuokaError, OutOfMemory, ReplicaFailed, ReplicasDiffer, Stopped, uncover
from duoka.frameworks.outsiders import watch_outsiders
from duoka.runtime.command import Command
from duoka.runtime.configuration import configure_everything
from duoka.runtime.decisions import Standing
from duoka.runtime.identity import VARIABLE, Identity, read_identity
from duoka.runtime.import_hook import after_import
from duoka.runtime.link import SocketLink
from duoka.runtime.plan import Plan
from duoka.runtime.process import die_with_parent, flush_streams, keep_from_children
from duoka.runtime.rehearsal.recorder import Recorder
from duoka.runtime.script import run_as_main, user_traceback
from duoka.runtime.seeds import seed_everything
from duoka.runtime.stacks import show_when_asked

_CAUSE_S = 2.0  # for the report of the worker that has caused an error of all
_LONGEST_TRACEBACK = 50_000  # in bytes of JSON, so that the message about it fits
_INTERRUPTED = 130


@dataclass
class Attachment:
    """This process is a worker, and here is what ties it to its run."""

    identity: Identity
    plan: Plan
    link: SocketLink
    standing: Callable[[], Standing] = Standing
    work: Callable[[], Work | None] = lambda: None
    checks_at_end: list[Callable[[], None]] = field(default_factory=list)  # of the script, before it counts as done
    recorder: Recorder | None = None  # in a run of `duoka rehearse`

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
    show_when_asked(identity.stack)
    link = SocketLink(socket.socket(fileno=identity.link))
    atexit.register(link.close)
    _attachment = Attachment(identity, Plan.from_json(identity.plan), link)
    plan = _attachment.plan
    device = plan.devices[identity.worker]
    if all(each.kind == "cpu" for each in plan.devices):
        keep_to_own_cores(identity.worker, plan.num_workers, plan.threads)
    if device.kind == "cpu" and device.memory_limit_mb is None:  # what is kept would count against a limit
        keep_freed_memory()
    is_main = identity.members is None and identity.worker == 0  # a replacement worker is not
    watch_outsiders(after_import, is_telling=is_main, num_workers=plan.num_workers)
    return _attachment


def _detach() -> None:
    global _attachment
    if _attachment is not None:
        _attachment.link.forget()
    _attachment = None


def run_body(attached: Attachment, body: Callable[[], object]) -> int:
    """Run this worker's part and tell the supervisor how it ended. Returns the exit code."""
    try:
        code = _run(attached, body)
        _ignore_interrupts()
    except KeyboardInterrupt:  # it came in the moment between the end of the body and the line above
        code = _INTERRUPTED
    flush_streams()
    if code == 0:
        attached.link.send({"kind": "done"} | asdict(attached.standing()))
    return code


def _run(attached: Attachment, body: Callable[[], object]) -> int:
    try:
        code = _call(body)
        for check in attached.checks_at_end if code == 0 else ():
            check()
        return code
    except (KeyboardInterrupt, Stopped):
        return _INTERRUPTED
    except BaseException as error:
        _ignore_interrupts()
        if isinstance(error, ReplicaFailed):
            _let_the_cause_report(attached.link)
        return _report(attached, error)


def _let_the_cause_report(link: SocketLink) -> None:
    """The worker whose function raised reports first: its traceback is the one to be shown. It is just as far."""
    until = time.monotonic() + _CAUSE_S
    with suppress(Stopped):
        while (message := link.receive(until - time.monotonic())) is not None and message["kind"] != "stop":
            pass


def _call(body: Callable[[], object]) -> int:
    """A script may also end with `sys.exit(main())`."""
    try:
        body()
    except SystemExit as exit:
        return _code_of(exit)
    return 0


def _ignore_interrupts() -> None:
    """The run may be stopped while this worker ends by itself: its last words are not to be a KeyboardInterrupt.

    Nor what frameworks raise when a child of theirs has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _code_of(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return (exit.code or 0) & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _report(attached: Attachment, error: BaseException) -> int:
    lift()  # a report needs memory, too
    error = uncover(error)
    shown: BaseException = explain(error, attached.plan.devices[attached.worker]) or error
    if isinstance(shown, OutOfMemory) and shown is not error:
        shown.__cause__ = error
    code = shown.exit_code if isinstance(shown, DuokaError) else 1
    text = _shorten(user_traceback(shown))
    where = "" if isinstance(error, DuokaError) else _tell_where(attached.work())  # ours say it themselves
    failure = {"kind": "failed", "error": type(shown).__name__, "where": where, "traceback": text, "exit_code": code}
    if isinstance(shown, ReplicasDiffer):
        failure |= {"what": shown.what, "agreed_step": shown.agreed_step}
    if not attached.link.try_to_send(failure):  # a script that closes every descriptor closes ours, too
        sys.stderr.write(text)
    return code


def _tell_where(work: Work | None) -> str:
    """What the user's code was called for when it raised."""
    if work is None:
        return ""
    return f"in {work}" if work.is_under_way else f"after {work}"


def _shorten(text: str) -> str:
    """Leave out the middle of a very long text."""
    num_bytes = len(json.dumps(text))
    if num_bytes <= _LONGEST_TRACEBACK:
        return text
    half = len(text) * _LONGEST_TRACEBACK // num_bytes // 3
    left_out = f"\n[... {len(text) - 2 * half:,} characters ...]\n"
    return _shorten(text[:half] + left_out + text[-half:])


def main() -> None:
    """`python .../worker.py COMMAND`: what the supervisor starts."""
    identity = read_identity(os.environ, os.getppid())
    if identity is None:
        sys.exit("duoka: this is the inside of a worker; start `duoka run script.py` instead.")
    del os.environ[VARIABLE]
    attached = attach(identity)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    command = Command.from_json(sys.argv[1])
    if attached.plan.rehearsal is not None:
        attached.recorder = Recorder(attached.plan.rehearsal, attached.worker)
        attached.recorder.watch_output()
        attached.checks_at_end.append(attached.recorder.come_to_end)

    def body() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Held back by the supervisor until now: start-up is no place for a KeyboardInterrupt.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        configure_everything(attached.plan, attached.worker)
        seed_everything(attached.plan.seed)
        run_as_main(command)

    code = run_body(attached, body)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    # Run as a file this is `__main__`, and the script is about to become that.
    from duoka.runtime.worker import main as start

    start()
