"""The moments between two steps, when everything of the last one is done and nothing of the next has begun.

All workers come by each of them, in the same order, with the same state. Whoever has something to do there (save,
compare, hand the state to a newcomer, stop) adds a function; a framework's adapter tells when it is time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakMethod

from duoka.strategies.also import Also

if TYPE_CHECKING:
    from duoka.strategies.strategy import Restorable

Guest = Callable[["Restorable"], None]


class Borders:
    def __init__(self) -> None:
        self._at_start: list[Guest] = []
        self._first: list[Guest] = []
        self._at_border: list[Guest] = []
        self._at_end: list[Guest] = []
        self._resuming: list[Guest] = []
        self._when_wanted: list[WeakMethod[Callable[[], None]]] = []
        self.also = Also()
        # Whether there are checkpoints: then everybody has to know where the script is in its data.
        self.is_state_wanted = False
        # All workers were lost, and this start continues from a snapshot in memory: the step of it.
        self.restart_step: int | None = None

    def add(
        self,
        *,
        start: Guest | None = None,
        first: Guest | None = None,
        border: Guest | None = None,
        end: Guest | None = None,
        resume: Guest | None = None,
    ) -> None:
        """Call these at the start of loops, at each border between steps, at the end of a loop over epochs.

        `first`: at each border, before the workers are compared there. `resume`: where a loop over epochs or steps is
        asked for, before anything of it has begun.
        """
        given = ((self._at_start, start), (self._first, first), (self._at_border, border), (self._at_end, end))
        for guests, guest in (*given, (self._resuming, resume)):
            if guest is not None:
                guests.append(guest)
        if start is not None:
            self.is_state_wanted = True
            for listener in self._when_wanted:
                if (tell := listener()) is not None:
                    tell()

    def when_state_is_wanted(self, tell: Callable[[], None]) -> None:
        """For whoever takes part in nothing before there are checkpoints: a method; its object is not kept."""
        self._when_wanted.append(WeakMethod(tell))

    def at_start(self, training: Restorable) -> None:
        """The script is about to enter a loop, over epochs or over batches; `restore` may still be called."""
        for guest in self._at_start:
            guest(training)

    def resume(self, training: Restorable) -> None:
        """The script asks for its loop over epochs or steps; `restore` may still be called."""
        for guest in self._resuming:
            guest(training)

    def at_border(
        self, training: Restorable, compare: Callable[[], None] = lambda: None, *, is_training: bool = True
    ) -> None:
        """A global batch is about to begin; `capture` gives the whole state of the run.

        Whoever joins is there when workers are `compare`d, and what is saved has been compared. Without `is_training`
        nothing is saved: what begins is a batch of an evaluation.
        """
        for guest in self._first:
            guest(training)
        compare()
        for guest in self._at_border if is_training else ():
            guest(training)

    def at_end(self, training: Restorable) -> None:
        """A loop over `strategy.epochs` has come to its end; `capture` gives the whole state, as at a border."""
        for guest in self._at_end:
            guest(training)
