"""Progress on a terminal: one line at the bottom that is drawn again, and a last line for each loop, which stays.

Without a thread: it is drawn when the loop comes by. What the script prints meanwhile appears above it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from duoka.monitor.progress import Reading, tell_duration

INTERVAL_S = 0.25
_WIDEST_BAR, _NARROWEST_BAR = 30, 5
_ERASE = "\r\x1b[2K"


class Bars:
    """All loops under way share the line, the outer ones first. `console` is rich's, made for this stream."""

    def __init__(
        self, console: Any, stream: TextIO, clock: Callable[[], float], interval_s: float = INTERVAL_S
    ) -> None:
        self._console, self._stream = console, stream
        self._clock, self._interval_s = clock, interval_s
        self._tracks: list[BarTrack] = []
        self._curtains: list[tuple[str, _Curtain]] = []
        self._is_drawn = False
        self._is_line_open = False  # the script has printed a piece of a line: that is not to be overwritten
        self._quiet_until = clock()

    def begin(self) -> BarTrack:
        track = BarTrack(self, self._clock, self._interval_s)
        self._tracks.append(track)
        return track

    def erase(self) -> None:
        if self._is_drawn:
            self._write(_ERASE)
            self._is_drawn = False

    def make_way(self, text: str) -> None:
        """The script is about to print this."""
        self.erase()
        self._is_line_open = not text.endswith("\n")
        # Not at once again: on their way to the terminal, through two pipes, the bar might overtake the text.
        self._quiet_until = self._clock() + self._interval_s

    def draw(self) -> None:
        readings = [track.reading for track in self._tracks if track.reading is not None]
        if readings and not self._is_line_open and self._clock() >= self._quiet_until:
            self._hang_curtains()
            self._write(_ERASE + self._render(readings))
            self._is_drawn = True

    def close(self, track: BarTrack, last: Reading) -> None:
        """This loop is over: its last line stays, and the others go on below."""
        self.erase()
        self._tracks.remove(track)
        start = "\n" if self._is_line_open else ""
        self._is_line_open = False
        self._write(f"{start}{last.line}, {tell_duration(last.seconds)}\n")
        if self._tracks:
            self.draw()
        else:
            self._take_curtains_down()

    def _render(self, readings: list[Reading]) -> str:
        """One line that fits: bars as wide as there is room for, none where there is little."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        texts = [
            Text(" ").join([Text(r.desc, "bold"), Text(r.count, "green"), Text(", ".join(r.notes))]) for r in readings
        ]
        room = self._console.width - sum(text.cell_len + 2 for text in texts)
        bar_width = min(_WIDEST_BAR, room // len(texts)) // 5 * 5  # in steps: it would dance otherwise
        if bar_width < _NARROWEST_BAR:
            line = Text("  ").join(texts)
            line.truncate(self._console.width, overflow="ellipsis")
            return self._draw_line(line)
        grid = Table.grid(padding=(0, 1))
        parts: list[Any] = []
        for reading, text in zip(readings, texts, strict=True):
            parts += [ProgressBar(reading.total, reading.done, width=bar_width), text] if reading.total else [text]
        grid.add_row(*parts)
        return self._draw_line(grid)

    def _draw_line(self, what: Any) -> str:
        with self._console.capture() as capture:
            self._console.print(what, end="", no_wrap=True, crop=True)
        return str(capture.get()).split("\n")[0]

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _hang_curtains(self) -> None:
        for name in () if self._curtains else ("stdout", "stderr"):
            curtain = _Curtain(getattr(sys, name), self)
            self._curtains.append((name, curtain))
            setattr(sys, name, curtain)

    def _take_curtains_down(self) -> None:
        for name, curtain in self._curtains:
            if getattr(sys, name) is curtain:  # else somebody else has put something there since
                setattr(sys, name, curtain.stream)
        self._curtains.clear()


class BarTrack:
    def __init__(self, bars: Bars, clock: Callable[[], float], interval_s: float) -> None:
        self._bars, self._clock, self._interval_s = bars, clock, interval_s
        self._next = clock()
        self.reading: Reading | None = None

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def show(self, reading: Reading) -> None:
        self._next = self._clock() + self._interval_s
        self.reading = reading
        self._bars.draw()

    def end(self, reading: Reading) -> None:
        self._bars.close(self, reading)


class _Curtain:
    """Stands in for sys.stdout or sys.stderr while a bar is shown: the bar goes away before anything is printed."""

    def __init__(self, stream: Any, bars: Bars) -> None:
        self.stream, self._bars = stream, bars

    def write(self, text: str) -> Any:
        if text:
            self._bars.make_way(text)
        return self.stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
