"""Passes that were over in the run that is resumed: asked for a batch, they are at their end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any


class PassIsOver(StopIteration):
    """Ends a loop like any other; where nothing catches it, it says what has happened."""

    def __init__(self, iterator: weakref.ref[Finished], passes: object) -> None:
        super().__init__()
        self.iterator, self.passes = iterator, passes

    def __str__(self) -> str:
        return (
            "A pass over a loader was asked for a batch, and is over in the run that is resumed.\n"
            "  why  a script begins at its top again, and its finished passes give no batches.\n"
            "  do   draw from a generator, `def endless(loader): while True: yield from loader`; or put the next pass\n"
            "       in the place of the one that has ended: `except StopIteration: it = iter(loader)`."
        )


class Finished:
    """The iterator of such a pass.

    In `except StopIteration: it = iter(loader); batch = next(it)` nothing catches a second end. Where a pass ends, is
    dropped, and the next one is asked while that end is still being handled, this one goes on with the pass under way.
    """

    def __init__(self, passes: object, go_on: Callable[[], Iterator[Any]]) -> None:
        self._passes = passes  # of which loader
        self._go_on = go_on
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Finished:
        return self

    def __next__(self) -> Any:
        if self._batches is None and self._has_taken_the_place_of_another():
            self._batches = self._go_on()
        if self._batches is not None:
            return next(self._batches)
        try:
            raise PassIsOver(weakref.ref(self), self._passes)
        finally:
            del self  # the traceback would keep it, and with it the question open whether the script does

    def _has_taken_the_place_of_another(self) -> bool:
        handled = sys.exc_info()[1]
        return isinstance(handled, PassIsOver) and handled.passes is self._passes and handled.iterator() is None
