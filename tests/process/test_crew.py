"""The supervisor's hold on real processes: descriptors that others hold too, or have closed, do not confuse it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from duoka.runtime.command import Command
from duoka.runtime.crew import Crew, Started
from duoka.runtime.output import Fold
from duoka.runtime.starters import ForkStarter, ScriptStarter
from duoka.topology.membership import Membership
from tests.conftest import check_remains, plan_for, remains


class Starting:
    """Starts Python processes that run `source`; they know the descriptor of their line."""

    def __init__(self) -> None:
        self.source = "pass"
        self.started: list[Started] = []

    def __call__(self, worker, plumbing, link, keep_out, joins=None) -> Started:
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        words = [sys.executable, "-S", "-c", f"link = {link}\n{self.source}"]
        process = subprocess.Popen(words, stdout=out[1], stderr=err[1], pass_fds=[link], start_new_session=True)
        process.returncode = 0  # reaped by the crew
        os.close(out[1])
        os.close(err[1])
        self.started.append(Started(process.pid, out[0], err[0]))
        return self.started[-1]


@pytest.fixture
def starting() -> Starting:
    return Starting()


@pytest.fixture
def crew(starting) -> Iterator[Crew]:
    before = remains()
    fold = Fold(lambda data: None, lambda data: None, time.monotonic)
    made = Crew(plan_for(2, 2), starting, fold, None, lambda text: None, time.monotonic)
    made.open()
    yield made
    made.close()
    check_remains(before)


def wait_for_death(crew: Crew) -> list[tuple[int, str]]:
    """Until somebody has died; gives what else was there to be read, which nobody has read yet."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        ready = crew.wait(1.0)
        for _, kind, worker in ready:
            if kind == "death":
                crew.reap(worker)
                return [(fd, kind) for fd, kind, _ in ready]
        time.sleep(0.01)
    raise AssertionError("nobody has died")


def clear(crew: Crew) -> None:
    while crew.list_dues_of_remains():
        crew.clear_remains()
        time.sleep(0.005)


def test_an_output_that_was_read_to_its_end_while_its_event_waited_is_not_read_again(crew, starting):
    starting.source = "print('last words')"
    worker = crew.begin(0)
    outputs = [fd for fd, kind in wait_for_death(crew) if kind == "output"]
    assert outputs
    crew.read_outputs(worker)  # as when a newcomer is let in, in the middle of a batch of events
    assert not worker.outputs
    assert not any(crew.read_output(worker, fd) for fd in outputs)
    crew.let_go(worker)
    clear(crew)


def test_a_line_that_a_grandchild_holds_does_not_keep_its_descriptor_from_being_used_again(crew, starting):
    """A group of its own: such a process outlives the worker, and what the worker left behind is not waited for."""
    starting.source = "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(3)"
    worker = crew.begin(0)
    number = worker.link.fileno()
    assert wait_for_death(crew)
    assert crew.has_line(worker), "nobody holds the other end"
    crew.let_go(worker)
    starting.source = "pass"
    successor = crew.begin_newcomer(0, Membership(1, (1,)))
    other = crew.begin(1)
    assert number in (successor.link.fileno(), other.link.fileno(), *successor.outputs, *other.outputs, other.pidfd)
    for each in (successor, other):
        crew.reap(each)
        crew.let_go(each)
    clear(crew)


def fail_to_start(*args, **kwargs):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("starter", ["script", "fork"])
def test_a_starter_that_fails_leaves_no_descriptor_open(crew, monkeypatch, tmp_path, starter):
    before, plan = remains(), plan_for(2, 2)
    command = Command((str(tmp_path / "no-such-interpreter"),), None, "script.py", (), str(tmp_path))
    made = ScriptStarter(plan, command, os.environ) if starter == "script" else ForkStarter(plan, lambda identity: 0)
    monkeypatch.setattr(crew, "_start", made)
    if starter == "fork":
        monkeypatch.setattr(os, "fork", fail_to_start)
    with pytest.raises(OSError):
        crew.begin(0)
    check_remains(before)


@pytest.mark.parametrize("name", ["pidfd_open", "set_blocking"])
def test_a_worker_that_was_started_and_cannot_be_watched_is_ended(crew, starting, monkeypatch, name):
    before = remains()
    starting.source = "import time; time.sleep(60)"
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail_to_start)
        with pytest.raises(OSError):
            crew.begin(0)
    (started,) = starting.started
    clear(crew)
    assert not os.path.exists(f"/proc/{started.pid}")
    check_remains(before)
    assert not crew.workers
