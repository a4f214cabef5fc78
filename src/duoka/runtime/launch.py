"""Run a function on several workers from a process that has no script to start again: a notebook, a test."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy.random

from duoka.collectives.values import decode, encode
from duoka.errors import LaunchError
from duoka.frameworks.forking import pin_one_thread, why_not_fork
from duoka.runtime.configuration import configure_everything
from duoka.runtime.environment import worker_environment
from duoka.runtime.identity import Identity
from duoka.runtime.output import Fold
from duoka.runtime.plan import Plan
from duoka.runtime.process import flush_streams
from duoka.runtime.returning import run_to_the_end
from duoka.runtime.seeds import seed_frameworks_to_come
from duoka.runtime.shutdown import Outcome
from duoka.runtime.starters import ForkStarter
from duoka.runtime.supervisor import Supervisor
from duoka.runtime.worker import attach, attachment, run_body


@dataclass(frozen=True)
class Launched:
    outcome: Outcome
    results: dict[int, Any]  # of the workers that finished


def launch(plan: Plan, body: Callable[[], Any], say: Callable[[str], None]) -> Launched:
    """Fork the workers of this plan, let each run `body`, and return what they gave back.

    Results are JSON values or arrays. What workers print appears here, as it does for scripts.
    """
    if attachment() is not None:
        raise LaunchError("launch() was called inside a worker.", do="call it once, from the outside.")
    if reason := why_not_fork():
        raise LaunchError(
            "Workers cannot be forked from this process.",
            why=reason,
            do="restart the notebook and call launch() before using the device, or put the code into a script:"
            " `duoka run script.py`.",
        )
    states = random.getstate(), numpy.random.get_state()
    boxes = [os.memfd_create("duoka-result", os.MFD_CLOEXEC) for _ in range(plan.num_workers)]

    def run(identity: Identity) -> int:
        attached = attach(identity)
        _take_back_signals()
        os.environ.update(worker_environment({}, replace(plan, threads=1), identity.worker))
        pin_one_thread()
        configure_everything(plan, identity.worker)
        # Python makes its generator different in every fork, and NumPy's where it was not in use before.
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        seed_frameworks_to_come(plan.seed)

        def body_with_result() -> None:
            os.ftruncate(boxes[identity.worker], 0)  # of a worker that was lost after it had finished
            os.lseek(boxes[identity.worker], 0, os.SEEK_SET)
            data = memoryview(encode(body()))
            while data:  # one write takes 2 GB at most
                data = data[os.write(boxes[identity.worker], data) :]

        return run_body(attached, body_with_result)

    flush_streams()
    fold = Fold(_writer("stdout"), _writer("stderr"), time.monotonic)
    try:
        outcome = run_to_the_end(Supervisor(plan, ForkStarter(plan, run), fold, None, say), say)
        finished = {worker: _read_all(boxes[worker]) for worker in outcome.results}
    finally:
        for box in boxes:
            os.close(box)
    return Launched(outcome, {worker: decode(data) for worker, data in finished.items()})


def _take_back_signals() -> None:
    """What the parent does on a signal, notebook servers above all, is not for its forks to do."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _writer(name: str) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream = getattr(sys, name)
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write


def _read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
