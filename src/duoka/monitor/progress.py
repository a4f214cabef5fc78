"""How far a loop is: counted here in global batches, shown by `bars.py` on a terminal and by `lines.py` elsewhere.

`python -m duoka.monitor.progress` shows what it looks like.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    values: tuple[tuple[str, float | str], ...]
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
        values = [f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in self.values]
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
    Values to show may be numbers, text, tensors of one element, or what `strategy.mean` gives: that is read once it
    is known, which is when the batch is complete. It understands tqdm's words, for loops that were written with it.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None,
        desc: str | None,
        total: int | None,
        is_main: Callable[[], bool],
        position: Position,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._iterable, self._given_total = iterable, total
        self._desc = "" if desc is None else str(desc)
        self._is_main, self._position = is_main, position
        self._display, self._clock = display, clock
        self._given: dict[str, Any] = {}
        self._known: dict[str, float | str] = {}
        self._counter: _Counter | None = None
        self._track: Track | None = None

    def __len__(self) -> int:
        if self._given_total is not None:
            return self._given_total
        return len(self._iterable)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # `if bar:` asks whether there is one

    @property
    def _total(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    # What is shown beside the count.

    def set(self, **values: Any) -> None:
        """Show these beside the count, from now on."""
        for name, value in values.items():
            _check(name, value)
            # Without its graph, which would stay in memory until the next value.
            self._given[name] = value.detach() if hasattr(value, "detach") else value

    def set_postfix(self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **values: Any) -> None:
        """tqdm's `set`: these and no others. It is drawn when it is due, whatever `refresh` says."""
        self._given = {}
        self.set(**dict(ordered_dict or {}), **values)
        self._known = {name: value for name, value in self._known.items() if name in self._given}

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        self._desc = "" if desc is None else str(desc)

    def __setattr__(self, name: str, value: Any) -> None:
        """`bar.loss = loss` shows it; so does any other name."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise MismatchError(
                f"progress.{name} is a method, and cannot be a value to show.", do="show it under another name."
            )
        else:
            self.set(**{name: value})

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._given:
            return self._given[name]
        raise AttributeError(f"progress has no {name}: nothing of that name has been set")

    # Counting: by iterating, or by hand.

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise MismatchError(
                "There is nothing to iterate over in this progress.",
                do="give it something, strategy.progress(dataset), or call update(1) for each batch.",
            )
        self._begin(getattr(self._iterable, "items_per_batch", 1))
        self._given = {}
        assert self._counter is not None
        try:
            items = iter(self._iterable)
            self._counter.before = getattr(self._iterable, "batches_before", 0)
            for item in items:
                self._counter.see(self._position(), self._clock())
                self._show()
                yield item
            self._counter.end(self._total if hasattr(self._iterable, "items_per_batch") else None)
        finally:
            self.close()

    def update(self, n: int = 1) -> None:
        """So many more are done."""
        if self._counter is None:
            self._begin()
        assert self._counter is not None
        self._counter.add(n, self._clock())
        self._show()

    def __enter__(self) -> Progress:
        if self._iterable is None:
            self._begin()
            self._show()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Show the last line, if something was counted since the last time."""
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        if self._is_main():
            self._track = self._track or self._display.begin()
        if self._track is not None:
            track, self._track = self._track, None
            track.end(self._read(counter, is_over=True))

    def _begin(self, items_per_batch: int = 1) -> None:
        self.close()
        self._counter = _Counter(self._clock(), items_per_batch)
        self._known = {}

    def _show(self) -> None:
        # Asked each time: when the main worker is lost, another one goes on showing.
        if self._is_main():
            assert self._counter is not None
            self._track = self._track or self._display.begin()
            if self._track.is_due():
                self._track.show(self._read(self._counter, is_over=False))

    def _read(self, counter: _Counter, *, is_over: bool) -> Reading:
        for name, value in self._given.items():
            try:
                self._known[name] = value if isinstance(value, str) else float(value)
            except DuokaError:
                pass  # not known yet: what was shown before stays
        seconds, total = self._clock() - counter.start, self._total
        speed = counter.mean_speed(seconds) if is_over else counter.speed
        left = None
        if total is not None and counter.done > counter.before and not is_over:
            left = seconds / (counter.done - counter.before) * max(0, total - counter.done)
        unit, speed_unit = ("batches", "rows") if counter.is_in_batches else ("", "")
        return Reading(
            self._desc, counter.done, total, unit, speed, speed_unit, tuple(self._known.items()), seconds, left
        )


def _check(name: str, value: Any) -> None:
    """On every worker, and not only where it is shown: one that fails alone would leave the others waiting."""
    if isinstance(value, str):
        return
    if (count := _count_elements(value)) not in (None, 1):
        raise MismatchError(
            f"progress cannot show {name}, a tensor of {count} elements.", do="give one number, for example its mean."
        )
    if not hasattr(value, "__float__"):
        raise MismatchError(
            f"progress cannot show {name}, which is of type {type(value).__name__}.",
            do="give a number or text; what strategy.run has returned goes through strategy.reduce first.",
        )


def _count_elements(value: Any) -> int | None:
    """None where it is no tensor or array."""
    if (numel := getattr(value, "numel", None)) is not None:
        return int(numel())
    shape = getattr(value, "shape", None)
    return None if shape is None else math.prod(tuple(shape))


class _Counter:
    """Counts completed batches and their rows; where nothing is known about batches, it counts items."""

    def __init__(self, start: float, items_per_batch: int) -> None:
        self.start = start
        self.rows = 0
        self.before = 0  # batches of a pass that goes on where another process had come to
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

    def add(self, num_items: int, now: float) -> None:
        """So many are complete."""
        self._num_items += num_items
        self._remember(now)

    def end(self, total: int | None = None) -> None:
        """What was under way is complete; with a total, all is: blocks may have given one item more or less."""
        if total is not None and not self._num_batches and self._batch is None:
            self._num_items, self._has_item = (total - self.before) * self._items_per_batch, False
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
        return self.before + self._num_batches + self._num_items // self._items_per_batch

    def _remember(self, now: float) -> None:
        if now - self._recent[-1][0] >= _WINDOW_S / 20:
            self._recent.append((now, self._amount))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()

    @property
    def _amount(self) -> int:
        return self.rows or self.done - self.before

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
        bar = Progress(range(200), f"epoch {epoch}", None, lambda: True, lambda: (next(batches), 64), display)
        for number in bar:
            bar.loss = 1 / (number + 1)
            if number % 80 == 40:
                print(f"a line of the script itself, at batch {number}")
            time.sleep(0.02)


if __name__ == "__main__":
    _demonstrate()
