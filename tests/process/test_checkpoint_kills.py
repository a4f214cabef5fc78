"""Processes killed -9 while they save, and disks that are full or read-only: what is loaded afterwards is whole.

A process dies before each of its file operations in turn, or in the middle of one that writes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from tests.limits import START_S

CODECS = [NumpyCodec()]


def state_of(step: int) -> dict:
    return {f"layer{n}": np.full(1000 + n, step, np.float32) for n in range(10)}


def save(store: Store, step: int) -> None:
    store.save(step, {"step": step}, state_of(step), CODECS)


def whole_step(found) -> int | None:
    """The step of a checkpoint, all of whose parts are of that step."""
    if found is None:
        return None
    assert found.facts == {"step": found.step}
    assert found.state.keys() == state_of(0).keys()
    for name, value in state_of(found.step).items():
        assert (found.state[name] == value).all() and found.state[name].shape == value.shape
    return found.step


class Moments:
    """Counts what a process does to files, and kills it at the one that was asked for."""

    def __init__(self, deadly: int) -> None:
        self.count, self.deadly = 0, deadly

    def __call__(self) -> bool:
        """Whether this is the one."""
        self.count += 1
        return self.count - 1 == self.deadly


class DeadlyDisk(Disk):
    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if self._moments():
            os.write(descriptor, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        if self._moments():
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync(descriptor)


def in_child(deadly: int, directory: Path, body) -> tuple[int, int]:
    """Run body(disk) in a process that dies at this moment; how it ended, and how many moments it had.

    Every other operation on files (opening, making, renaming, removing, listing, locking) is seen by Python's audit.
    """
    count_path = directory / "count"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            moments = Moments(deadly)

            def audit(event: str, args: tuple) -> None:
                if event != "os.kill" and event.startswith(("open", "os.", "fcntl.")) and moments():
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(audit)
            body(DeadlyDisk(moments))
            num_moments, moments.deadly = moments.count, -1
            count_path.write_text(str(num_moments))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    count = int(count_path.read_text()) if count_path.exists() else -1
    count_path.unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(status), count


@pytest.mark.parametrize(("before", "kept"), [((), (9,)), ((1,), (1, 9)), ((1, 2, 3), (2, 3, 9))])
def test_killed_at_any_file_operation_the_new_or_the_previous_checkpoint_is_loaded(tmp_path, before, kept):
    pattern, directory = tmp_path / "pattern", tmp_path / "checkpoints"
    pattern.mkdir()
    for step in before:
        save(Store(pattern), step)

    def attempt(deadly: int) -> tuple[int, int]:
        shutil.rmtree(directory, ignore_errors=True)
        if before:
            shutil.copytree(pattern, directory)
        return in_child(deadly, tmp_path, lambda disk: save(Store(directory, disk=disk), 9))

    code, num_moments = attempt(-1)
    assert code == 0 and num_moments >= 40
    loaded = []
    for moment in range(num_moments):
        assert attempt(moment)[0] == -signal.SIGKILL, f"it was not killed at moment {moment}"
        said: list[str] = []
        store = Store(directory, say=said.append)
        loaded.append(whole_step(store.newest(CODECS)))
        names = store.names()
        assert said == [] and len(names) >= min(2, len(before))
        assert all(whole_step(store.load(name, CODECS)) for name in names)
        save(store, 10)  # the next one removes what the killed one has left
        assert said == [] and store.names()[-1] == "step-00000010" and len(os.listdir(directory)) <= 3
        assert set(os.listdir(directory)) == set(store.names())
    previous = max(before, default=None)
    num_old = loaded.count(previous)
    assert loaded == [previous] * num_old + [9] * (num_moments - num_old)
    assert num_old >= 30 and num_moments > num_old, "both must have happened"
    assert attempt(num_moments)[0] == 0
    assert Store(directory).names() == [f"step-{step:08}" for step in kept]


def test_killed_while_the_background_writes_the_new_or_the_previous_checkpoint_is_loaded(tmp_path):
    directory = tmp_path / "checkpoints"
    outcomes = set()
    for delay_ms in range(0, 120, 2):  # the later, the more was saved; three different ends are enough
        if len(outcomes) >= 3 and delay_ms >= 20:
            break
        shutil.rmtree(directory, ignore_errors=True)
        save(Store(directory), 1)
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            writer = BackgroundWriter(Store(directory), CODECS)
            for step in range(2, 1000):
                writer.submit(step, {"step": step}, state_of(step))
                if step == 2:
                    os.write(told, b".")
                writer.wait(20)
            os._exit(1)
        assert os.read(ready, 1) == b"."
        time.sleep(delay_ms / 1000)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        os.close(ready), os.close(told)
        said: list[str] = []
        store = Store(directory, say=said.append)
        outcomes.add(whole_step(store.newest(CODECS)))
        assert said == [] and all(whole_step(store.load(name, CODECS)) for name in store.names())
    assert len(outcomes) >= 3, f"killed at the same place all the time: {outcomes}"


def test_two_processes_that_save_at_once_do_not_disturb_each_other(tmp_path):
    directory = tmp_path / "checkpoints"
    children = []
    for first in (1, 2):
        child = os.fork()
        if child == 0:
            try:
                said: list[str] = []
                store = Store(directory, say=said.append)
                for step in range(first, 40, 2):
                    save(store, step)
                    whole_step(store.newest(CODECS))
                os._exit(0 if not said else 2)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0]
    store = Store(directory)
    assert len(store.names()) == 3 and set(os.listdir(directory)) == set(store.names())
    assert whole_step(store.newest(CODECS)) is not None


def test_what_a_living_process_is_writing_is_not_cleaned_up(tmp_path):
    class Stopping(Disk):
        def rename(self, old: str, new: str) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            super().rename(old, new)

    directory = tmp_path / "checkpoints"
    save(Store(directory), 1)
    child = os.fork()
    if child == 0:
        try:
            save(Store(directory, disk=Stopping()), 2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    save(Store(directory, deadline_s=0.2), 3)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Store(directory).names() == [f"step-{step:08}" for step in (1, 2, 3)]
    assert whole_step(Store(directory).load("step-00000002", CODECS)) == 2


# Whole interpreters.

HEAD = """
import json, os, sys, time
import numpy as np
from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter

CODECS = [NumpyCodec()]
said = []

def say(line):
    said.append(line)
    print(line, file=sys.stderr, flush=True)

def state_of(step, size=1000):
    return {f"layer{n}": np.full(size + n, step, np.float32) for n in range(10)}

def submit(writer, step, size=1000):
    writer.submit(step, {"step": step}, state_of(step, size))
"""


def run(
    body: str, *words: str, prefix: tuple[str, ...] = (), timeout_s: float = START_S
) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-c", HEAD + textwrap.dedent(body), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


def test_the_last_save_is_finished_when_the_interpreter_ends(tmp_path):
    ended = run(
        """
        class Slow(Disk):
            def sync(self, descriptor):
                time.sleep(0.1)
                super().sync(descriptor)

        writer = BackgroundWriter(Store(sys.argv[1], say=say, disk=Slow()), CODECS)
        submit(writer, 5)
        raise SystemExit(3)
        """,
        str(tmp_path),
    )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert whole_step(Store(tmp_path).newest(CODECS)) == 5


def test_a_disk_that_never_answers_does_not_keep_the_interpreter_from_ending(tmp_path):
    ended = run(
        """
        class Stuck(Disk):
            def sync(self, descriptor):
                time.sleep(1000)

        writer = BackgroundWriter(Store(sys.argv[1], say=say, disk=Stuck()), CODECS, exit_deadline_s=0.5)
        submit(writer, 5)
        raise SystemExit(3)
        """,
        str(tmp_path),
    )
    assert ended.returncode == 3
    assert "WARNING: The checkpoint of step 5 is not on the disk after 0.5 s." in ended.stderr
    assert Store(tmp_path).newest(CODECS) is None


def test_a_child_forked_in_the_middle_of_a_save_ends_at_once(tmp_path):
    ended = run(
        """
        import threading

        class Held(Disk):
            is_syncing, go = threading.Event(), threading.Event()

            def sync(self, descriptor):
                self.is_syncing.set()
                assert self.go.wait(1000)
                super().sync(descriptor)

        disk = Held()
        writer = BackgroundWriter(Store(sys.argv[1], say=say, disk=disk), CODECS, exit_deadline_s=1000)
        submit(writer, 5)
        assert disk.is_syncing.wait(20)
        child = os.fork()
        if child == 0:
            sys.exit(4)  # with everything that an exit does
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code)
        disk.go.set()
        """,
        str(tmp_path),
        timeout_s=START_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "4\n"
    assert whole_step(Store(tmp_path).newest(CODECS)) == 5


def with_own_mounts() -> tuple[str, ...] | None:
    """How a program is started that may mount file systems of its own, which nobody else sees."""
    for words in (("unshare", "-Urm"), ("unshare", "-m")):
        test = [*words, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
        if shutil.which("unshare") and subprocess.run(test, capture_output=True).returncode == 0:
            return words
    return None


ON_A_BAD_DISK = """
import resource, subprocess

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", sys.argv[1]], check=True)

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

def save(step, size=1000):
    submit(writer, step, size)
    writer.wait(20)
    return writer.failure.why if writer.failure else None

{before}
store = Store(sys.argv[1], keep=None, say=say)
writer = BackgroundWriter(store, CODECS)
assert save(1) is None
{break_it}
failed = [save(step, 200_000) for step in (2, 3)]
newest, left = store.newest(CODECS).step, sorted(os.listdir(store.directory))
{mend_it}
mended = save(4)
print(json.dumps(dict(failed=failed, newest=newest, left=left, mended=mended, names=store.names(), said=said)))
"""


def train_on_a_bad_disk(tmp_path: Path, reason: str, before: str, break_it: str, mend_it: str, prefix=()) -> None:
    source = ON_A_BAD_DISK.format(before=before, break_it=break_it, mend_it=mend_it)
    ended = run(source, str(tmp_path), prefix=prefix)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert [reason in why and "older checkpoints are as they were" in why for why in facts["failed"]] == [True, True]
    assert facts["newest"] == 1 and facts["left"] == ["step-00000001"]
    assert facts["mended"] is None and facts["names"] == ["step-00000001", "step-00000004"]
    assert len(facts["said"]) == 2 and all("WARNING" in line and "Training goes on" in line for line in facts["said"])


def test_a_disk_that_is_full_costs_a_save_and_nothing_else(tmp_path):
    if prefix := with_own_mounts():
        train_on_a_bad_disk(tmp_path, "No space left on device", 'mount("size=1m")', "", "", prefix)
    else:  # not as full, but as real
        train_on_a_bad_disk(tmp_path, "File too large", "", "limit(500_000)", "limit(resource.RLIM_INFINITY)")


def test_a_disk_that_has_become_read_only_costs_a_save_and_nothing_else(tmp_path):
    if prefix := with_own_mounts():
        words = 'mount("size=9m")', 'mount("remount,ro")', 'mount("remount,rw")'
        train_on_a_bad_disk(tmp_path, "Read-only file system", *words, prefix)
    elif os.geteuid() == 0:  # for whom permissions do not count
        train_on_a_bad_disk(tmp_path, "File too large", "", "limit(0)", "limit(resource.RLIM_INFINITY)")
    else:
        words = "", "os.chmod(store.directory, 0o555)", "os.chmod(store.directory, 0o755)"
        train_on_a_bad_disk(tmp_path, "Permission denied", *words)
