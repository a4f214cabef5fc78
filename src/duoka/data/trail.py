"""What a run was like where its script came by between its trainings: when an epoch began, a pass or a loop had ended.

A script that is run again is led to where it was saved, and trains nothing on its way. At each of these places it takes
what the run was like there, so that it draws, counts and decides between them as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from duoka.data.sizes import count_bytes

EPOCH = "epoch"  # the epoch under way; other stretches are known by the loop over epochs after which they came
_SMALL, _LARGE = 1 << 12, 1 << 20  # bytes: objects of the user's, at the ends of passes, and where stretches begin
_MOST_SMALL, _MOST_LARGE = 1 << 17, 1 << 20  # all of these: what is older is left out
_MOST_GENERATORS = 64  # 13 KB each
_NOT_DRAWN = (
    f"numbers drawn between passes, or loops over epochs, that were more than {_MOST_GENERATORS} before the save are"
    " not those of the run that is resumed; loop over strategy.epochs, which leaves passes out"
)
_LEFT_OUT = (
    f"registered objects of more than {_SMALL >> 10} KB, or {_MOST_SMALL >> 10} KB of them before the save, are not as"
    " they were after passes that are over: what the script decides by them there may be different; loop over"
    " strategy.epochs, which leaves such passes out"
)


@dataclass
class Place:
    counts: list[int]  # steps, batches and the like
    also: dict[str, Any]  # states of the user's objects; those left out are as the script has them
    generators: Any  # None: as they are there without it
    is_whole: bool = True  # no object was left out because it is too large for such a place


@dataclass
class Ends:
    """The ends of the passes in a stretch. There may be thousands: kept is what does not follow from what is before."""

    counts: list[list[int]] = field(default_factory=list)  # and whether numbers were drawn, whether `also` is whole
    also: dict[int, dict[str, Any]] = field(default_factory=dict)
    generators: dict[int, Any] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)  # of `also`, in bytes

    def add(self, place: Place, number: int, *, has_drawn: bool) -> None:
        del self.counts[number:]
        self.counts.append([*place.counts, has_drawn, place.is_whole])
        for kept, value in ((self.also, place.also), (self.generators, place.generators if has_drawn else None)):
            for later in [each for each in kept if each >= number]:
                del kept[later]
            if value:
                kept[number] = value
        if len(self.generators) > _MOST_GENERATORS:
            del self.generators[min(self.generators)]
        self._sizes = {each: size for each, size in self._sizes.items() if each in self.also}
        if number in self.also:
            self._sizes[number] = count_bytes(self.also[number])
        while sum(self._sizes.values()) > _MOST_SMALL:
            oldest = min(self.also)
            del self.also[oldest], self._sizes[oldest]
            self.counts[oldest][-1] = False

    def capture(self) -> dict[str, Any]:
        kept = {"also": self.also, "generators": self.generators}
        texts = {name: {str(number): value for number, value in each.items()} for name, each in kept.items()}
        return {"counts": np.array(self.counts, np.int64)} | texts

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Ends:
        also, generators = ({int(n): value for n, value in state[name].items()} for name in ("also", "generators"))
        sizes = {number: count_bytes(value) for number, value in also.items()}
        return cls(state["counts"].tolist(), also, generators, sizes)


class Trail:
    """Kept are the stretches between loops over epochs, and that of the epoch under way: no script sees others again.

    `describe` gives what the run is like, with how large an object of the user's may be; `take` goes back to it.
    """

    def __init__(
        self,
        describe: Callable[[int], Place],
        take: Callable[[Place], None],
        capture_generators: Callable[[], Any],
        is_led: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._describe, self._take, self._capture_generators = describe, take, capture_generators
        self._is_led, self._tell = is_led, tell
        self._starts: dict[str, Place] = {}  # of stretches
        self._ends: dict[str, Ends] = {}  # of the passes in each
        self._stretch, self._passes = "0", 0
        self._at_pass: Any = None  # generators, when the pass under way began
        self.last: Place | None = None  # where the script came by last; None if nothing is known of it

    @property
    def place(self) -> str:
        """Where the script is: in which stretch, after how many passes."""
        return f"{self._stretch} {self._passes}"

    @property
    def is_at_top(self) -> bool:
        """Nothing was trained, or would have been, before this place."""
        return self.place == "0 0"

    def begin_pass(self) -> None:
        if self.is_at_top:
            self._begin_stretch()
        self._at_pass = self._capture_generators()

    def end_pass(self) -> None:
        ends = self._ends.setdefault(self._stretch, Ends())
        if not self._is_led():
            place = self.last = self._describe(_SMALL)
            ends.add(place, self._passes, has_drawn=not _equal(place.generators, self._at_pass))
        else:
            self.last = self._take_end(ends) if self._passes < len(ends.counts) else None
        self._passes += 1

    def _take_end(self, ends: Ends) -> Place:
        *counts, has_drawn, is_whole = ends.counts[self._passes]
        generators = ends.generators.get(self._passes)
        if has_drawn and generators is None:
            self._tell(_NOT_DRAWN)
        if not is_whole:
            self._tell(_LEFT_OUT)
        place = Place(counts, ends.also.get(self._passes, {}), generators)
        self._take(place)
        return place

    def begin_epoch(self, is_resumed: bool) -> None:
        self._stretch, self._passes = EPOCH, 0
        if not is_resumed:
            self._starts.pop(EPOCH, None)
            self._ends.pop(EPOCH, None)
        self._begin_stretch()

    def end_epochs(self, call: int) -> None:
        """A loop over epochs has ended, was left, or was over when the run was saved."""
        self._stretch, self._passes = str(call), 0
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        if not self._is_led():
            place = self._starts[self._stretch] = self._describe(_LARGE)
            self.last, self._ends[self._stretch] = replace(place), Ends()  # nothing of it is left out below
            with_generators = [place for place in self._starts.values() if place.generators is not None]
            if len(with_generators) > _MOST_GENERATORS:
                with_generators[0].generators = None
            with_also = [place for place in self._starts.values() if place.also]
            if sum(count_bytes(place.also) for place in with_also) > _MOST_LARGE:
                with_also[0].also, with_also[0].is_whole = {}, False
        elif (start := self._starts.get(self._stretch)) is None:
            self.last = None
        else:
            for line in ([_NOT_DRAWN] if start.generators is None else []) + ([] if start.is_whole else [_LEFT_OUT]):
                self._tell(line)
            self._take(start)
            self.last = start

    def capture(self) -> dict[str, Any]:
        starts = {name: dict(vars(place)) for name, place in self._starts.items()}
        ends = {name: ends.capture() for name, ends in self._ends.items() if ends.counts}
        return {"starts": starts, "ends": ends, "stretch": self._stretch, "passes": self._passes}

    def restore(self, state: dict[str, Any]) -> None:
        """For a script that is led to this state."""
        self._starts = {name: Place(**place) for name, place in state["starts"].items()}
        self._ends = {name: Ends.restored(ends) for name, ends in state["ends"].items()}

    def arrive(self, state: dict[str, Any]) -> None:
        """The script has come to it."""
        self._stretch, self._passes = state["stretch"], state["passes"]


def _equal(a: Any, b: Any) -> bool:
    """
    >>> _equal({"key": [np.arange(3), 1]}, {"key": [np.arange(3), 1]}), _equal([np.arange(3)], [np.ones(3)])
    (True, False)
    >>> _equal([1], [1, 2])  # a card that has been used since then has a generator more
    False
    """
    ours, theirs = list(_leaves(a)), list(_leaves(b))
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, (dict, list)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _leaves(part)
    else:
        yield state
