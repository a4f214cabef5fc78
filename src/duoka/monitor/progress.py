"""How far a loop is: counted here in global batches, shown by `bars.py` on a terminal and by `lines.py` elsewhere.

`python -m duoka.monitor.progress` shows what it looks like.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from duoka.errors import DuokaError, MismatchError

Position = Callable[[], tuple[int, int] | None]
_WINDOW_S = 10.0


@dataclass(frozen=True)
class Reading:
    """What there is to show at one moment."""

    desc: str
    done: int
    total: int | None
    unit: str  # of what is counted: "batches", or nothing for any other loop
    speed: float | None  # in speed_unit per second
    speed_unit: str
    values: tuple[tuple[str, float], ...]
    seconds: float
    seconds_left: float | None = None

    @property
    def count(self) -> str:
        total = "" if self.total is None else f"/{self.total:,}"
        return f"{self.done:,}{total}{self.unit and ' ' + self.unit}"

    @property
    def notes(self) -> list[str]:
        """Everything beside the count, each as a few words."""
        speed = [] if self.speed is None else [f"{_short(self.speed)}{self.speed_unit and ' ' + self.speed_unit}/s"]
        values = [f"{name} {value:.4g}" for name, value in self.values]
        left = [] if self.seconds_left is None else [f"{tell_duration(self.seconds_left)} left"]
        return [*speed, *values, *left]

    @property
    def line(self) -> str:
        """All of it in one line of text."""
        return f"{self.desc and self.desc + ': '}{', '.join([self.count, *self.notes])}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def tell_duration(seconds: float) -> str:
    """A duration as people say it.

    >>> tell_duration(4.26), tell_duration(95), tell_duration(7322)
    ('4.3 s', '1:35', '2:02:02')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Track(Protocol):
    """One loop on a display."""

    def is_due(self) -> bool:
        """Whether it is time to show something again."""
        ...

    def show(self, reading: Reading) -> None: ...

    def end(self, reading: Reading) -> None:
        """Show the last line, which stays."""
        ...


class Display(Protocol):
    def begin(self) -> Track: ...


class Progress:
    """Iterates like what it was given, and shows how far it is, on the main worker only.

    Where a loop body runs several times for one global batch, once for each replica, the batch counts once.
    Values for `set` may be numbers, tensors of one element, or what `strategy.mean` gives: that is read once it
    is known, which is when the batch is complete.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        desc: str | None,
        is_main: Callable[[], bool],
        position: Position,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._iterable = iterable
        self._desc = "" if desc is None else str(desc)
        self._is_main, self._position = is_main, position
        self._display, self._clock = display, clock
        self._given: dict[str, Any] = {}
        self._known: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    @property
    def _total(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def set(self, **values: Any) -> None:
        """Show these beside the count, from now on."""
        for name, value in values.items():
            if (count := getattr(value, "numel", None)) is not None and count() != 1:
                raise MismatchError(
                    f"progress cannot show {name}, a tensor of {count()} elements.",
                    do="give one number, for example its mean.",
                )
            # Without its graph, which would stay in memory until the next value.
            self._given[name] = value.detach() if hasattr(value, "detach") else value

    @property
    def loss(self) -> Any:
        return self._given.get("loss")

    @loss.setter
    def loss(self, value: Any) -> None:
        self.set(loss=value)

    def __iter__(self) -> Iterator[Any]:
        counter = _Counter(self._clock(), getattr(self._iterable, "items_per_batch", 1))
        track: Track | None = None
        self._given, self._known = {}, {}
        try:
            for item in self._iterable:
                counter.see(self._position(), self._clock())
                # Asked each time: when the main worker is lost, another one goes on showing.
                if self._is_main():
                    track = track or self._display.begin()
                    if track.is_due():
                        track.show(self._read(counter, is_over=False))
                yield item
            counter.end(self._total if hasattr(self._iterable, "items_per_batch") else None)
        finally:
            if self._is_main():
                track = track or self._display.begin()
            if track is not None:
                track.end(self._read(counter, is_over=True))

    def _read(self, counter: _Counter, *, is_over: bool) -> Reading:
        for name, value in self._given.items():
            try:
                self._known[name] = float(value)
            except DuokaError:
                pass  # not known yet: what was shown before stays
        seconds, total = self._clock() - counter.start, self._total
        speed = counter.mean_speed(seconds) if is_over else counter.speed
        left = None
        if total is not None and counter.done and not is_over:
            left = seconds / counter.done * max(0, total - counter.done)
        unit, speed_unit = ("batches", "rows") if counter.is_in_batches else ("", "")
        return Reading(
            self._desc, counter.done, total, unit, speed, speed_unit, tuple(self._known.items()), seconds, left
        )


class _Counter:
    """Counts completed batches and their rows; where nothing is known about batches, it counts items."""

    def __init__(self, start: float, items_per_batch: int) -> None:
        self.start = start
        self.rows = 0
        self._items_per_batch = items_per_batch
        self._num_items = 0  # without a position
        self._num_batches = 0
        self._batch: int | None = None
        self._rows_under_way = 0
        self._has_item = False
        self._recent: deque[tuple[float, int]] = deque([(start, 0)])

    def see(self, position: tuple[int, int] | None, now: float) -> None:
        """The loop has come to another item: of the same batch, or of the next one."""
        batch, rows = (None, 0) if position is None else position
        if self._has_item and batch is not None and batch == self._batch:
            return
        self.end()
        self._batch, self._rows_under_way, self._has_item = batch, rows, True
        self._remember(now)

    def end(self, total: int | None = None) -> None:
        """What was under way is complete; with a total, all is: blocks may have given one item more or less."""
        if total is not None and not self._num_batches and self._batch is None:
            self._num_items, self._has_item = total * self._items_per_batch, False
        if self._has_item:
            self._num_batches += self._batch is not None
            self._num_items += self._batch is None
            self.rows += self._rows_under_way
            self._has_item = False

    @property
    def is_in_batches(self) -> bool:
        return self._batch is not None

    @property
    def done(self) -> int:
        return self._num_batches + self._num_items // self._items_per_batch

    def _remember(self, now: float) -> None:
        if now - self._recent[-1][0] >= _WINDOW_S / 20:
            self._recent.append((now, self._amount))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()

    @property
    def _amount(self) -> int:
        return self.rows or self.done

    @property
    def speed(self) -> float | None:
        """Over the last seconds."""
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first) if last > first else None

    def mean_speed(self, seconds: float) -> float | None:
        return self._amount / seconds if seconds > 0 and self._amount else None


def _demonstrate() -> None:
    import sys
    from itertools import count

    from duoka.monitor.displays import open_display

    display = open_display(sys.stderr, columns=None)
    batches = count()
    for epoch in (1, 2):
        bar = Progress(range(200), f"epoch {epoch}", lambda: True, lambda: (next(batches), 64), display)
        for number in bar:
            bar.loss = 1 / (number + 1)
            if number % 80 == 40:
                print(f"a line of the script itself, at batch {number}")
            time.sleep(0.02)


if __name__ == "__main__":
    _demonstrate()
