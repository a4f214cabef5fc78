"""Progress where there is no terminal: a line of text now and then, and one at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from duoka.monitor.progress import Reading, tell_duration

INTERVAL_S = 5.0


class Lines:
    def __init__(
        self, stream: Callable[[], TextIO], clock: Callable[[], float], interval_s: float = INTERVAL_S
    ) -> None:
        self._stream, self._clock, self._interval_s = stream, clock, interval_s

    def begin(self) -> LineTrack:
        return LineTrack(self._stream, self._clock, self._interval_s)


class LineTrack:
    def __init__(self, stream: Callable[[], TextIO], clock: Callable[[], float], interval_s: float) -> None:
        self._stream, self._clock, self._interval_s = stream, clock, interval_s
        self._next = clock() + interval_s

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def show(self, reading: Reading) -> None:
        self._next = self._clock() + self._interval_s
        print(reading.line, file=self._stream(), flush=True)

    def end(self, reading: Reading) -> None:
        print(f"{reading.line}, {tell_duration(reading.seconds)}", file=self._stream(), flush=True)
