"""A small process that outlives the supervisor by a moment, to end what a killed supervisor cannot.

Workers die with the supervisor by the kernel's hand, and so do children they forked. Processes that
those *started* (spawned loaders, shells) do not. The guardian knows the workers' process groups, and
when the supervisor's end of the pipe closes it kills them.
"""

from __future__ import annotations

import os
import signal
import struct
import time

from duoka.runtime.process import is_gone, signal_group

REMAINS_S = 0.5  # how long what a dead worker has started may take to end
_ENTRY = struct.Struct("<i")


class Guardian:
    """Seen from the supervisor: groups are added when a worker starts and removed when it has been reaped."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _guard(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def descriptors(self) -> tuple[int, ...]:
        return (self._pipe,)

    def watch(self, group: int) -> None:
        self._tell(group)

    def forget(self, group: int) -> None:
        self._tell(-group)

    def _tell(self, entry: int) -> None:
        try:
            os.write(self._pipe, _ENTRY.pack(entry))
        except BrokenPipeError:
            pass  # somebody has killed the guardian; the run does without it

    def close(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


def _guard(reading: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, reading)
    os.closerange(reading + 1, 1 << 16)
    groups: set[int] = set()
    while data := os.read(reading, _ENTRY.size):
        (group,) = _ENTRY.unpack(data)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    # First those that listen: multiprocessing's tracker removes what its dead parent has left in /dev/shm.
    for group in groups:
        signal_group(group, signal.SIGTERM)
    end = time.monotonic() + REMAINS_S
    while time.monotonic() < end and not all(map(is_gone, groups)):
        time.sleep(0.02)
    for group in groups:
        signal_group(group, signal.SIGKILL)
