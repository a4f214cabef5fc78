"""Where a script is in its data: which epoch, which pass over which loader, which batch of it comes next.

A script that is run again, in the place of one that was stopped or lost, begins at its top. What it did up to the
saved position has happened: its finished epochs and passes give nothing, and the one under way goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Passes:
    """The passes over one source of batches. A position is (passes that are over, batches given out of the next).

    >>> passes = Passes()
    >>> passes.resume({"passes": 1, "batches": 3, "at_epoch": 1, "order": ""})
    >>> passes.begin(), passes.begin(), passes.position
    (None, 3, (1, 3))
    """

    def __init__(self) -> None:
        self.number = -1  # of the pass under way, or of the last one
        self.order = ""  # a fingerprint of the order of the pass under way
        self._given = 0
        self._is_open = False  # a pass is under way
        self._at_epoch = 0  # passes that were over when the epoch under way began
        self._resumed = (0, 0)
        self._resumed_order = ""

    def begin(self) -> int | None:
        """Another pass: the number of its first batch, or None when the whole pass is over already."""
        self.number += 1
        passes, batches = self._resumed
        self._is_open = self.number >= passes
        self._given = batches if self.number == passes else 0
        self.order = ""
        return self._given if self._is_open else None

    def give(self) -> None:
        """Another batch is given out."""
        self._given += 1

    def end(self) -> None:
        self._is_open = False

    @property
    def position(self) -> tuple[int, int]:
        here = (self.number, self._given) if self._is_open else (self.number + 1, 0)
        return max(here, self._resumed)

    @property
    def where(self) -> tuple[int, int, bool]:
        """The position, and whether a pass is under way."""
        return (*self.position, self._is_open)

    @property
    def is_resumed(self) -> bool:
        """Whether the pass under way is the one that was saved."""
        return self._resumed != (0, 0) and self.number == self._resumed[0]

    def expected_order(self) -> str:
        """The fingerprint that the order of the pass under way had in the run that was saved; "" if it is not known."""
        return self._resumed_order if self.is_resumed else ""

    def begin_epoch(self) -> None:
        self._at_epoch = self.position[0]

    def begin_resumed_epoch(self) -> None:
        """The script has left out what came before this epoch: so do the passes."""
        self.number = self._at_epoch - 1

    def leave_out_resumed(self) -> None:
        """The script has left out all that was saved: the next pass is the next one."""
        self.number = self.position[0] - 1

    def capture(self) -> dict[str, Any]:
        (passes, batches, is_open), order = self.where, self.order if self._is_open else ""
        where = {"passes": passes, "batches": batches, "is_open": is_open}
        return where | {"at_epoch": self._at_epoch, "order": order}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; where this is it already, nothing changes."""
        position = int(state["passes"]), int(state["batches"])
        if position != self.position:
            self._resumed, self._resumed_order = position, str(state["order"])
            self._at_epoch = int(state["at_epoch"])


class Epochs:
    """The epochs of `strategy.epochs`. Where the run is: (which call of it, which epoch)."""

    def __init__(
        self,
        enter: Callable[[], None] = lambda: None,
        begin: Callable[[bool], None] = lambda is_resumed: None,
        end: Callable[[bool], None] = lambda is_resumed: None,
    ) -> None:
        self._enter = enter  # before a loop begins
        self._begin, self._end = begin, end  # of an epoch, of a loop: told whether it is what was saved
        self.num_calls = 0
        self._position = self._resumed = (0, 0)

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._position[1]

    def walk(self, num_epochs: int) -> Iterator[int]:
        """The epochs of one loop, from where the run is."""
        self._enter()
        self.num_calls += 1
        call, epoch = self._resumed
        is_resumed = self.num_calls == call
        first = epoch if is_resumed else num_epochs if self.num_calls < call else 0
        for number in range(first, num_epochs):
            self._position = self.num_calls, number
            self._begin(is_resumed and number == epoch)
            yield number
        if self.num_calls >= call:
            self._position = self.num_calls, num_epochs
            self._end(is_resumed and epoch >= num_epochs)

    def capture(self) -> dict[str, Any]:
        call, epoch = self._position
        return {"call": call, "epoch": epoch}

    def resume(self, state: dict[str, Any]) -> None:
        position = int(state["call"]), int(state["epoch"])
        if position != self._position:
            self._position = self._resumed = position
