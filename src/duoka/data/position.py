"""Where a script is in its data: which epoch, which pass over which loader, which batch of it comes next.

A script that is run again, in the place of one that was stopped or lost, begins at its top. What it did up to the
saved position has happened: its finished epochs and passes give nothing, and the one under way goes on where it was.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

from duoka.data.ending import Ending
from duoka.errors import CheckpointError


class Passes:
    """The passes over one source of batches. A position is (passes that are over, batches given out of the next).

    A pass that begins in the body of a loop over another source is an inner one. A script that is run again does not
    come by bodies that have happened. If an inner pass was under way, the first one that it begins goes on with it; or
    the iterator that it made before the loop does, in whose place the inner one had come when it was at its end.

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
        self._outer = -1  # the same number, inner ones not counted
        self._is_inner = False  # the pass under way, or the last one
        # Passes that were over when the epoch under way began, or the last loop over them ended; without inner ones.
        self._at_epoch = (0, 0)
        self._is_idle = False  # the pass under way has given nothing since then
        self._resumed = (0, 0)
        self._resumed_outer = 0  # outer passes that were over
        self._resumed_order = ""
        self._awaits_inner = False  # an inner one was under way
        self._has_outer_led = self._has_resumed_outer_led = False  # in the last outer pass
        self._has_ended_led = False  # in the pass that has ended last
        # Of outer passes that are over. They are known by the stretch in which they were, and their number in it: a
        # script that leaves out a loop over epochs does not come by the passes in it, and cannot count on from them.
        self._leads = Switches()
        self._stretch = self._outer_before = 0  # that stretch, and the outer passes that were over when it began
        self._begun_at = (0, 0)  # where the last outer pass was begun

    def begin(self, *, is_inner: bool = False) -> int | None:
        """Another pass: the number of its first batch, or None when the whole pass is over already."""
        self._outer += not is_inner
        self._begun_at = self._begun_at if is_inner else self._place
        self._has_outer_led = self._has_outer_led and is_inner
        is_replaced = self._awaits_inner and self._outer == self._resumed_outer - 1 and not self._has_resumed_outer_led
        self._is_inner, self.order, self._given = is_inner or is_replaced, "", 0
        self._is_open = self._is_inner or self._outer >= self._resumed_outer
        if not self._is_open:
            self.number += 1
            self._has_ended_led = self._leads.at(self._place)
            return None
        passes, batches = self._resumed
        is_awaited = self.number < passes and self._is_inner == self._awaits_inner
        if is_awaited and (self._is_inner or self._outer == self._resumed_outer):
            self.number, self._given = passes, batches
            # Of a pass that had given nothing it is not known: what was saved is of the one before.
            self._has_outer_led = self._has_resumed_outer_led and (self._is_inner or batches > 0)
        else:
            self.number = max(self.number, passes - 1 + self._awaits_inner) + 1
        self._awaits_inner = False
        return self._given

    def give(self) -> None:
        """Another batch is given out."""
        self._given += 1
        self._is_idle = False

    def lead(self) -> None:
        """The loop goes through this pass."""
        self._has_outer_led = self._has_outer_led or not self._is_inner

    @property
    def has_led(self) -> bool:
        """Whether a loop went through the pass that has ended last: it did not only follow one through another."""
        return not self._is_inner and self._has_ended_led

    def end(self) -> None:
        self._is_open = False
        if not self._is_inner:
            self._has_ended_led = self._has_outer_led
            if self._begun_at[0] < self._stretch:  # a script that is run again may begin it there, or here
                self._leads.add(self._begun_at, self._has_outer_led)
            self._leads.add(self._place, self._has_outer_led)
        if self._is_idle:  # it was over before the epoch began, and its iterator is found out only now to be left
            self.begin_epoch()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def position(self) -> tuple[int, int]:
        here = (self.number, self._given) if self._is_open else (self.number + 1, 0)
        return max(here, self._resumed)

    @property
    def where(self) -> tuple[int, int, bool]:
        """The position, and whether a pass is under way."""
        return (*self.position, self._is_open)

    @property
    def _outer_over_here(self) -> int:
        return self._outer if self._is_open and not self._is_inner else self._outer + 1

    @property
    def _outer_over(self) -> int:
        return max(self._outer_over_here, self._resumed_outer)

    @property
    def _place(self) -> tuple[int, int]:
        """Of the last outer pass."""
        return self._stretch, self._outer - self._outer_before

    @property
    def is_resumed(self) -> bool:
        """Whether the pass under way is the one that was saved."""
        return self._resumed != (0, 0) and self.number == self._resumed[0]

    def expected_order(self) -> str:
        """The fingerprint that the order of the pass under way had in the run that was saved; "" if it is not known."""
        return self._resumed_order if self.is_resumed else ""

    def begin_stretch(self, stretch: int) -> None:
        """Another epoch begins, or a loop over epochs is behind the script: done, left or left out."""
        self._stretch, self._outer_before = stretch, self._outer_over_here

    def begin_epoch(self) -> None:
        self._at_epoch, self._is_idle = (self.position[0], self._outer_over), self._is_open
        self._outer_before = self._at_epoch[1]

    def begin_resumed_epoch(self) -> None:
        """The script has left out what came before this epoch: so do the passes."""
        if not self._is_open:  # else it began before the loop over epochs, and goes on
            self.number, self._outer = (passes - 1 for passes in self._at_epoch)
        self._outer_before = self._at_epoch[1]

    @property
    def is_at_epoch(self) -> bool:
        """Nothing was given since the epoch began, or the last loop over epochs ended."""
        return self._is_idle if self._is_open else self.position == (self._at_epoch[0], 0)

    def start_at_epoch(self) -> None:
        """The same, and what came after it in the saved run is not left out: it trained nothing."""
        if not self._is_open:
            (passes, outer), self._resumed_order, self._awaits_inner = self._at_epoch, "", False
            self._resumed, self._resumed_outer = (passes, 0), outer
            self.begin_resumed_epoch()

    def capture(self) -> dict[str, Any]:
        passes, batches, is_open = self.where
        where = {"passes": passes, "batches": batches, "is_open": is_open}
        order, is_inner, has_led = self.order if is_open else "", self._is_inner and is_open, self._has_outer_led
        if not is_open and (passes, batches) == self._resumed:  # the script has not come to what was under way
            order, is_inner, has_led = self._resumed_order, self._awaits_inner, self._has_resumed_outer_led
        outer = {"outer": self._outer_over, "outer_at_epoch": self._at_epoch[1], "outer_led": has_led}
        outer |= {"is_inner": is_inner, "is_at_epoch": self.is_at_epoch}
        return where | outer | {"at_epoch": self._at_epoch[0], "order": order, "led": self._leads.capture()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; where this is it already, nothing changes."""
        position = int(state["passes"]), int(state["batches"])
        if position != self.position:
            self._resumed, self._resumed_order = position, str(state["order"])
            self._resumed_outer = int(state.get("outer", position[0]))
            self._has_outer_led = self._has_resumed_outer_led = bool(state.get("outer_led", True))
            self._at_epoch = int(state["at_epoch"]), int(state.get("outer_at_epoch", state["at_epoch"]))
            # Also where none is open: a run that was saved twice had not come to it in between.
            self._awaits_inner = bool(state.get("is_inner", False))
            # As they were saved before: by their numbers alone, which are right where no loop over epochs is left out.
            by_number = [[0, number, flag] for number, flag in state.get("leads", [[0, 1]])]
            self._leads.restore(state.get("led", by_number))


def stretch_in(call: int) -> int:
    """The epochs of a loop, of which one at a time is known; loops count from 1.

    >>> stretch_after(0), stretch_in(1), stretch_after(1), stretch_in(2)
    (0, 1, 2, 3)
    """
    return 2 * call - 1


def stretch_after(call: int) -> int:
    """What comes between this loop over epochs and the next one."""
    return 2 * call


class Switches:
    """A flag for each of many places that come in their order, in few of which it changes.

    >>> leads = Switches()
    >>> for number in range(9):
    ...     leads.add((0, number), number in (3, 4))
    >>> leads.capture(), leads.at((0, 2)), leads.at((0, 4)), leads.at((2, 0))
    ([[0, 0, 0], [0, 3, 1], [0, 5, 0]], False, True, False)
    """

    def __init__(self) -> None:
        self._changes: list[tuple[tuple[int, int], bool]] = []  # from which place on, to what

    def add(self, place: tuple[int, int], flag: bool) -> None:
        """What is known of this place and later ones is of an epoch before: all epochs of a loop have the same."""
        while self._changes and self._changes[-1][0] >= place:
            self._changes.pop()
        if not self._changes or flag != self._changes[-1][1]:
            self._changes.append((place, flag))

    def at(self, place: tuple[int, int]) -> bool:
        before = bisect.bisect_right(self._changes, (place, True))
        return bool(before and self._changes[before - 1][1])

    def capture(self) -> list[list[int]]:
        return [[*place, int(flag)] for place, flag in self._changes]

    def restore(self, changes: list[list[int]]) -> None:
        self._changes = [((int(stretch), int(number)), bool(flag)) for stretch, number, flag in changes]


LEFT_OUT = (
    "passes that were over when the run was saved give no batches, and the code around them runs again, with the"
    " weights of the save: what it writes there, it writes again; strategy.epochs(n) leaves finished epochs out"
)
KEPT = (
    "a loop over strategy.epochs begins while another one has not ended: if that one was left by break and is kept in a"
    " variable, a run that is resumed later may draw other numbers between them; write strategy.epochs(n) into the line"
    " with `for`, or `del` the variable behind the loop"
)


def walked_again() -> CheckpointError:
    return CheckpointError(
        "A second loop goes on with what strategy.epochs gave to the first one.",
        why="a run that is resumed could not tell in which of them it was.",
        do="write strategy.epochs(n) into the line with `for`, once for each loop.",
    )


class Epochs(Ending):
    """The epochs of `strategy.epochs`. Where the run is: (which call of it, which epoch).

    A loop that was over when the run was saved, and is given more epochs, goes on after the last of them.
    """

    def __init__(
        self,
        enter: Callable[[], None] = lambda: None,
        begin: Callable[[bool], None] = lambda is_resumed: None,
        leave_out: Callable[[bool], bool] = lambda goes_on: True,
        end: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
        come_by_finished: Callable[[], None] = lambda: None,
        walk_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._enter = enter  # before a loop begins
        self._begin = begin  # of an epoch: told whether it is the one that was under way in the saved state
        # The last loop was over in the saved state: told whether it goes on with more epochs; says whether it was saved
        # there, and not after more passes.
        self._leave_out = leave_out
        self._end = end  # of a loop
        self._leave = leave  # the script has left a loop by `break` or `return`
        self._come_by_finished = come_by_finished  # a loop was over in the saved state, and not the last one
        self._walk_again = walk_again  # another loop begins over what is left of a loop's epochs
        self.num_calls = 0
        self._position = self._resumed = (0, 0)
        self._is_over = self._was_over = False  # the last loop, here and in the saved state
        self._lengths: dict[int, int] = {}  # of loops that are over, by their calls
        self.is_inside = False  # a loop is under way, as far as is known: one that was left may be kept in a variable

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._position[1]

    def walk(self, num_epochs: int) -> Iterator[int]:
        """The epochs of one loop, from where the run is."""
        return _Walk(self._list(num_epochs), self._walk_again)

    def _list(self, num_epochs: int) -> Iterator[int]:
        self._enter()
        self.num_calls += 1
        self.is_inside = False
        call, epoch = self._resumed
        self._check(num_epochs)
        if self.num_calls < call:
            self._come_by_finished()
            return
        is_saved, this = self.num_calls == call, self.num_calls
        if is_saved and self._was_over and not self._leave_out(epoch < num_epochs):
            if epoch < num_epochs:
                raise self._other_length(epoch, num_epochs)
            return
        self._is_over, self.is_inside = False, True
        for number in range(epoch if is_saved else 0, num_epochs):
            self._position = self.num_calls, number
            self._begin(is_saved and number == epoch and not self._was_over)
            try:
                yield number
            except GeneratorExit:
                if self.num_calls == this and not self._is_ending():
                    self.is_inside = False
                    self._leave()
                raise
        self.is_inside = False
        self._position, self._is_over = (self.num_calls, num_epochs), True
        self._lengths[self.num_calls] = num_epochs
        self._end()

    def _check(self, num_epochs: int) -> None:
        """More epochs than when it was saved can be had at the place where it was saved; fewer never."""
        call, epoch = self._resumed
        if self.num_calls < call:
            length = self._lengths.get(self.num_calls, num_epochs)
            if num_epochs != length:
                raise self._other_length(length, num_epochs)
        elif self.num_calls == call and num_epochs < (begun := epoch if self._was_over else epoch + 1):
            state = "is over" if self._was_over else "is under way"
            raise CheckpointError(
                f"Epoch {begun} {state} in the saved run, and strategy.epochs is asked for {num_epochs} now.",
                why="the weights of an earlier epoch are not there any more.",
                do=f"ask for {begun} epochs or more, or begin a new run in another directory.",
            )

    def _other_length(self, length: int, num_epochs: int) -> CheckpointError:
        return CheckpointError(
            f"Loop {self.num_calls} over strategy.epochs had {length} epochs when this run was saved, and is"
            f" asked for {num_epochs} now.",
            why="training went on after it, from the weights that it had ended with.",
            do=f"ask for {length} epochs there, or begin a new run in another directory.",
        )

    def capture(self) -> dict[str, Any]:
        call, epoch = self._position
        lengths = {str(number): length for number, length in self._lengths.items()}
        return {"call": call, "epoch": epoch, "is_over": self._is_over, "lengths": lengths}

    def resume(self, state: dict[str, Any]) -> None:
        position = int(state["call"]), int(state["epoch"])
        if position != self._position:
            self._position = self._resumed = position
            self._is_over = self._was_over = bool(state.get("is_over", False))
        self._lengths |= {int(number): int(length) for number, length in state.get("lengths", {}).items()}


class _Walk(Iterator[int]):
    """The epochs of one loop, as they come. A second loop over the rest of them is told of.

    >>> epochs = Epochs(walk_again=lambda: print("again")).walk(3)
    >>> for epoch in epochs:
    ...     break
    >>> list(epochs)
    again
    [1, 2]
    """

    def __init__(self, epochs: Iterator[int], walk_again: Callable[[], None]) -> None:
        self._epochs, self._walk_again = epochs, walk_again
        self._has_begun = False

    def __iter__(self) -> Iterator[int]:
        if self._has_begun:
            self._walk_again()
        return self

    def __next__(self) -> int:
        self._has_begun = True
        return next(self._epochs)


class Saves:
    """The saves that a script makes by itself, between its loops. Each is known by where the script is then.

    >>> saves = Saves()
    >>> saves.begin_pass(), saves.come_by(1, 0), saves.last, saves.come_by(1, 0), saves.last
    (None, False, [1, 0, 1, 0], False, [1, 0, 1, 1])
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        self._tell = tell
        self.last: list[int] | None = None  # if no batch has followed it: loop over epochs, epoch, passes, number
        self._awaited: list[int] | None = None
        self._passes = 0  # since the epoch began, or the loop over epochs has ended

    def begin_pass(self) -> None:
        self._passes += 1

    def begin_epoch(self) -> None:
        self._passes, self.last = 0, None

    def begin_step(self) -> None:
        self._miss()
        self.last = None

    def end_epochs(self, call: int, epoch: int) -> None:
        """A loop over epochs has ended: what was awaited within it does not come any more."""
        if self._awaited is not None and self._awaited[:2] < [call, epoch]:
            self._miss()

    def _miss(self) -> None:
        if self._awaited is not None:
            self._awaited = None
            self._tell(
                "this run was saved by a save() of the script, which has not come by it this time: from here on it has"
                " the state that was saved there"
            )

    def resume(self, saved: list[int] | None) -> None:
        """The run was saved there, or at no such place."""
        self._awaited = saved

    @property
    def is_awaited(self) -> bool:
        """Whether the script is being led to one of its saves."""
        return self._awaited is not None

    def is_awaited_at(self, call: int, epoch: int) -> bool:
        return self._awaited is not None and self._awaited[:2] == [call, epoch]

    def come_by(self, call: int, epoch: int) -> bool:
        """The script saves. Says whether it is the save to which it was led."""
        place = [call, epoch, self._passes]
        self.last = [*place, self.last[-1] + 1 if self.last is not None and self.last[:-1] == place else 0]
        if self.last != self._awaited:
            return False
        self._awaited = None
        return True
