"""What reading takes of a step: the time waited for a batch, or the time that threads compute to have it ready."""

from __future__ import annotations

import time
from dataclasses import dataclass

from duoka.frameworks.keras.background import Background
from duoka.frameworks.keras.stream import Stream


@dataclass(frozen=True)
class _Begin:
    stream: Stream
    at_s: float
    cpu_s: float  # of threads in the background, until then


class Cost:
    """From one batch to the next. Between two runs through a dataset is more than a step."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.clear()

    def clear(self) -> None:
        self._begin: _Begin | None = None
        self._waited_s = self._cpu_s = self._steps_s = 0.0
        self._just_waited_s = 0.0

    def forget_stream(self) -> None:
        self._begin = None

    def begin(self, stream: Stream) -> None:
        """A batch is asked for."""
        before, now = self._begin, _Begin(stream, time.perf_counter(), self._background.cpu_seconds())
        if before is not None and before.stream is stream:
            self._waited_s += self._just_waited_s
            self._cpu_s += now.cpu_s - before.cpu_s
            self._steps_s += now.at_s - before.at_s
        self._begin = now

    def end(self) -> None:
        """It is there."""
        if self._begin is not None:
            self._just_waited_s = time.perf_counter() - self._begin.at_s

    def part_of_step(self) -> float:
        return max(self._waited_s, self._cpu_s) / self._steps_s if self._steps_s else 0.0
