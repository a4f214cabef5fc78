"""What a run was like where its script came by between its trainings: when an epoch began, a pass or a loop had ended.

A script that is run again is led to where it was saved, and trains nothing on its way. At each of these places it takes
what the run was like there, so that it draws, counts and decides between them as it did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
EPOCH = "epoch"  # the epoch under way; other stretches are known by the loop over epochs after which they came
_SMALL, _LARGE = 1 << 12, 1 << 20  # bytes: objects of the user's, at the ends of passes, and where stretches begin
_MOST_GENERATORS = 64  # 13 KB each


class Trail:
    """Kept are the stretches between loops over epochs, and that of the epoch under way: no script sees others again.

    `describe` gives what the run is like, with how large an object of the user's may be; `take` goes back to it.
    """

    def __init__(
        self, describe: Callable[[int], Facts], take: Callable[[Facts], None], is_led: Callable[[], bool]
    ) -> None:
        self._describe, self._take, self._is_led = describe, take, is_led
        self._starts: dict[str, Facts] = {}  # of stretches
        self._ends: dict[str, list[Facts]] = {}  # of the passes in each
        self._stretch, self._passes = "0", 0

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

    def end_pass(self) -> None:
        ends = self._ends.setdefault(self._stretch, [])
        if not self._is_led():
            if ends:
                ends[-1]["generators"] = None  # what was drawn between earlier ones is not used any more
            ends[self._passes :] = [self._describe(_SMALL)]
        elif self._passes < len(ends):
            self._take(ends[self._passes])
        self._passes += 1

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
            self._starts[self._stretch] = self._describe(_LARGE)
            self._ends[self._stretch] = []
            with_generators = [facts for facts in self._starts.values() if facts["generators"] is not None]
            if len(with_generators) > _MOST_GENERATORS:
                with_generators[0]["generators"] = None
        elif self._stretch in self._starts:
            self._take(self._starts[self._stretch])

    def capture(self) -> dict[str, Any]:
        return {"starts": self._starts, "ends": self._ends, "stretch": self._stretch, "passes": self._passes}

    def restore(self, state: dict[str, Any]) -> None:
        """For a script that is led to this state."""
        self._starts, self._ends = state["starts"], state["ends"]

    def arrive(self, state: dict[str, Any]) -> None:
        """The script has come to it."""
        self._stretch, self._passes = state["stretch"], state["passes"]
