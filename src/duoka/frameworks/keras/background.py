"""The threads that read ahead in the background: on all cores, and with an account of what they cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duoka.devices.cores import on_all_cores

_THREADS = Path("/proc/self/task")


class Background:
    """A stream's threads: those that started while it was opened. Where the system does not tell, they cost nothing."""

    def __init__(self) -> None:
        self._threads: set[str] = set()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what makes an iterator, or takes its first batch: threads keep the cores of whoever starts them.

        A worker that keeps to its own core would decode on that one alone, while the others wait for it.
        """
        before = _alive()
        try:
            with on_all_cores():
                yield
        finally:
            self._threads = {thread for thread in self._threads if thread in before} | (_alive() - before)

    def cpu_seconds(self) -> float:
        """Of those that are alive."""
        nanoseconds = 0
        for thread in self._threads:
            with suppress(OSError, ValueError, IndexError):
                nanoseconds += int((_THREADS / thread / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9


def _alive() -> set[str]:
    return set(os.listdir(_THREADS)) if _THREADS.exists() else set()
