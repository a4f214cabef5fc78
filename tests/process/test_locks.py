"""A process that is stopped while it holds a lock of the run does not keep the others waiting for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from duoka.collectives import locks
from duoka.collectives.directory import Directory
from duoka.errors import DeadlineExceeded
from tests.conftest import run_workers

HOLDER = """
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_a_wait_for_a_lock_that_nobody_watches_ends_with_an_error_that_names_the_holder(monkeypatch):
    monkeypatch.setattr(locks, "DEADLINE_S", 0.2)
    fd = os.memfd_create("lock")
    words = [sys.executable, "-S", "-c", HOLDER, str(fd)]
    with subprocess.Popen(words, pass_fds=[fd], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        try:
            assert locks.find_holder(fd) == holder.pid
            with pytest.raises(DeadlineExceeded, match=f"process {holder.pid} holds the lock"):
                Directory(fd).find("a piece", 10, lambda: None)
        finally:
            holder.kill()
    assert locks.find_holder(fd) == 0
    assert Directory(fd).find("a piece", 10, lambda: None)  # released by the kernel
    os.close(fd)


def test_a_worker_that_is_stopped_while_it_holds_a_lock_is_named_killed_and_not_waited_for():
    def reserve(collective) -> str:
        collective.barrier()
        if collective.worker != 1:
            time.sleep(0.3)

        def stop() -> int:
            os.kill(os.getpid(), signal.SIGSTOP)
            return 2**40

        if collective.worker == 1:
            collective._arena._available_bytes = stop  # asked for while the list is locked
        collective.buffer(1000, "f4", "more")
        collective.end_step()
        return "done"

    told = run_workers(3, 3, reserve, deadline_s=1)
    assert told.results == {0: "done", 2: "done"}, told.said
    warning, loss = told.said
    assert warning.startswith("worker 1 (cpu:0/v1) has not let go of a list that all workers write to at step 0 for ")
    assert "is stopped (SIGSTOP)" in warning
    assert loss.startswith("worker 1 (cpu:0/v1) was stopped (SIGSTOP) for "), told.said
