"""One run at a time in a folder of checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import signal

import pytest

from duoka.checkpoint import claims
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.errors import CheckpointError


class Process:
    """What one process holds: locks of two open files keep each other out, also within one process."""

    def __init__(self, monkeypatch) -> None:
        self._monkeypatch, self.held = monkeypatch, {}

    def claim(self, folder, run: str, deadline_s: float = 0.0) -> None:
        self._monkeypatch.setattr(claims, "_held", self.held)
        claims.claim(str(folder), run, deadline_s)

    def end(self) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)
        self.held.clear()


@pytest.fixture
def start(monkeypatch):
    started = []

    def start() -> Process:
        started.append(Process(monkeypatch))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_a_second_run_is_kept_out_as_long_as_a_worker_of_the_first_lives(start, tmp_path):
    workers, other = [start(), start()], start()
    for worker in workers:
        worker.claim(tmp_path, "first")
    for worker in workers:
        with pytest.raises(CheckpointError, match="is in use: the run first keeps its checkpoints there"):
            other.claim(tmp_path, "second")
        worker.end()
    other.claim(tmp_path, "second")
    with pytest.raises(CheckpointError, match="the run second keeps"):
        workers[0].claim(tmp_path, "first")


def test_a_worker_that_is_started_later_is_let_in_also_when_all_others_are_gone(start, tmp_path):
    first, later, last = start(), start(), start()
    first.claim(tmp_path, "mine")
    later.claim(tmp_path, "mine")
    first.end()
    later.end()
    last.claim(tmp_path, "mine")
    last.claim(tmp_path, "mine")


def test_a_folder_that_was_removed_and_made_anew_is_taken_anew(start, tmp_path):
    folder, process, other = tmp_path / "saved", start(), start()
    for _ in range(2):
        folder.mkdir()
        process.claim(folder, "mine")
        with pytest.raises(CheckpointError, match="is in use"):
            other.claim(folder, "another")
        shutil.rmtree(folder)


def test_a_forked_child_does_not_keep_the_folder(start, tmp_path):
    process, other = start(), start()
    process.claim(tmp_path, "first")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        with pytest.raises(CheckpointError, match="is in use"):
            other.claim(tmp_path, "second")  # the child has closed it, and not unlocked it
        process.end()
        other.claim(tmp_path, "second", deadline_s=5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_where_there_are_no_locks_nobody_is_kept_out(start, tmp_path, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    start().claim(tmp_path, "first")
    start().claim(tmp_path, "second")


class ReadOnly(Disk):
    def create(self, path: str) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_directory_that_cannot_be_made_or_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("mine")
    for store, why in (
        (Store("/proc/nowhere"), os.strerror(errno.ENOENT)),
        (Store(tmp_path / "file"), os.strerror(errno.EEXIST)),
        (Store(tmp_path / "saved", disk=ReadOnly()), os.strerror(errno.EROFS)),
    ):
        with pytest.raises(CheckpointError, match=rf"(?s)Checkpoints cannot be kept in {store.directory}.*{why}"):
            store.open()
    Store(tmp_path / "new" / "saved").open()
    assert os.listdir(tmp_path / "saved") == os.listdir(tmp_path / "new" / "saved") == []
