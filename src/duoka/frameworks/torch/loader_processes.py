"""The processes of a DataLoader, when a SIGTERM is sent to all processes of a run: they stay until the step is saved.

They would die of it, and PyTorch raises an error for that in whatever the worker is doing. So in them the signal is
passed over, unless the worker has left word that it wants them to end. It does so for each that it ends while it runs,
and for all of its children when it ends itself.
"""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

from duoka.frameworks.torch.loader_deaths import Following

_PID = struct.Struct("<i")
_PATIENCE_S = 1.0  # for one that is in native code when it is to end
_INHERITING = ("fork", "spawn")  # what a server of processes inherits, others would, too


class Staying:
    """A `worker_init_fn`, in front of the user's own; it may be pickled, for processes that are not forked."""

    def __init__(self, theirs: Callable[[int], None] | None) -> None:
        self._theirs = theirs
        self._list = f"/proc/{os.getpid()}/fd/{_open_list(os.getpid())}"

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self._theirs is not None:
            self._theirs(number)

    def _hear(self, number: int, frame: Any) -> None:
        if self._is_meant():
            os._exit(0)

    def _is_meant(self) -> bool:
        try:
            with open(self._list, "rb") as file:
                told = file.read()
        except OSError:
            return True  # the worker has gone
        return (os.getpid(),) in _PID.iter_unpack(told[: len(told) // _PID.size * _PID.size])


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """iter(loader), whose processes stay."""
    if not loader.num_workers:
        return iter(loader)
    theirs, others = loader.worker_init_fn, multiprocessing.active_children()
    try:
        loader.worker_init_fn = Staying(theirs)
        with _holding_back(loader):
            return Following(iter(loader))
    finally:
        loader.worker_init_fn = theirs
        for process in multiprocessing.active_children():
            if process not in others:
                _leave_word_of(process)


def start_anew(loader: DataLoader[Any]) -> Iterator[Any]:
    """The same, with processes for this pass: persistent ones would go on with their generators as they have them.

    A script that is resumed has no processes yet, and would draw other numbers than one that never stopped.
    """
    if loader.persistent_workers:
        loader = copy.copy(loader)
        loader.__dict__["persistent_workers"] = False  # a loader refuses to be changed
    return start(loader)


@contextmanager
def _holding_back(loader: DataLoader[Any]) -> Iterator[None]:
    """A process that is just starting is sent it later, when it knows what to do with it."""
    context: Any = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() not in _INHERITING:
        yield
        return
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # when it is started, signals are let through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_word_of(process: Any) -> None:
    """Before it is sent SIGTERM by this process."""
    popen = process._popen
    terminate = popen.terminate

    def leave_word_and_terminate() -> None:
        _tell(popen.pid)
        terminate()
        if popen.wait(timeout=_PATIENCE_S) is None:
            popen.kill()

    popen.terminate = leave_word_and_terminate


def _tell(pid: int) -> None:
    os.write(_open_list(os.getpid()), _PID.pack(pid))


@cache
def _open_list(process: int) -> int:
    """Of the processes that this one wants to end, in memory; a fork of it has one of its own."""
    atexit.register(_tell_all)  # before multiprocessing ends its children, and waits for them
    return os.memfd_create("duoka-loaders")


def _tell_all() -> None:
    for process in multiprocessing.active_children():
        if process.pid is not None:
            _tell(process.pid)
