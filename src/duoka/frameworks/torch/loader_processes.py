"""The processes of a DataLoader, when a SIGTERM is sent to all processes of a run: they stay until the step is saved.

They would die of it, and PyTorch raises an error for that in whatever the worker is doing. So in them the signal is
passed over, unless it comes from the worker itself, which leaves word of that.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch.utils.data import DataLoader

_PID = struct.Struct("<i")
_PATIENCE_S = 1.0  # for one that is in native code when it is to end


class Staying:
    """A `worker_init_fn`, in front of the user's own; it may be pickled, for processes that are not forked."""

    def __init__(self, theirs: Callable[[int], None] | None) -> None:
        self._theirs = theirs
        self._list = f"/proc/{os.getpid()}/fd/{_open_list(os.getpid())}"

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, self._hear)
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
    theirs = loader.worker_init_fn
    try:
        if loader.num_workers:
            loader.worker_init_fn = Staying(theirs)
        batches = iter(loader)
    finally:
        loader.worker_init_fn = theirs
    for process in getattr(batches, "_workers", ()):
        popen = process._popen
        if "terminate" not in vars(popen):  # processes that are kept are met again
            popen.terminate = _make_terminate(popen, popen.terminate)
    return batches


def _make_terminate(popen: Any, terminate: Callable[[], None]) -> Callable[[], None]:
    def leave_word_and_terminate() -> None:
        os.write(_open_list(os.getpid()), _PID.pack(popen.pid))
        terminate()
        if popen.wait(timeout=_PATIENCE_S) is None:
            popen.kill()

    return leave_word_and_terminate


@cache
def _open_list(process: int) -> int:
    """Of the processes that this one wants to end, in memory; a fork of it has one of its own."""
    return os.memfd_create("duoka-loaders")
