"""Objects of the user's own whose state belongs to that of the run: he has named them, and they have a `state_dict`.

A script that is run again is led from its top, or from the top of the epoch under way, to where it was saved. So that
it decides on its way as it did, it has them as they were there; and where it was saved, as they were saved.
"""

from __future__ import annotations

import copy
from typing import Any

_LARGEST_BYTES = 1 << 20  # of an object that is kept twice: what decisions are made of is small


class Also:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._at_epoch: dict[str, Any] = {}  # their states when the epoch under way began
        self._at_top: dict[str, Any] = {}  # as the script has made them
        self._saved: dict[str, Any] = {}  # states that the script is being led to

    def capture(self) -> dict[str, Any]:
        return {"also": self._take(), "also_at_epoch": self._at_epoch}

    def restore(self, state: dict[str, Any]) -> None:
        """For a script that begins at its top. What it changes on its way to where the run is does not count."""
        self._at_top = self._take_small()
        self._saved, self._at_epoch = state["also"], state["also_at_epoch"]
        self._load(copy.deepcopy(self._saved))  # objects may go on with what they are given

    def begin_epoch(self, is_resumed: bool) -> None:
        if is_resumed:
            self._load(copy.deepcopy(self._at_epoch))
        else:
            self._at_epoch = self._take_small()

    def begin_at_top(self) -> None:
        """The script is led through all of its finished passes, with no word on epochs."""
        states, self._at_top = self._at_top, {}
        self._load(states)

    def arrive(self) -> None:
        """The script has come to where the run is."""
        states, self._saved, self._at_top = self._saved, {}, {}
        self._load(states)

    def _take(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def _take_small(self) -> dict[str, Any]:
        return {name: copy.deepcopy(s) for name, s in self._take().items() if _count_bytes(s) <= _LARGEST_BYTES}

    def _load(self, states: dict[str, Any]) -> None:
        for name, thing in self.objects.items():
            if name in states:
                thing.load_state_dict(states[name])


def _count_bytes(state: Any) -> int:
    """Roughly.

    >>> _count_bytes({"losses": [0.5] * 1000, "name": "best"})
    8004
    """
    if isinstance(state, dict):
        return sum(map(_count_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_count_bytes, state))
    return len(state) if isinstance(state, (str, bytes)) else int(getattr(state, "nbytes", 8))
