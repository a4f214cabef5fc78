"""Objects of the user's own whose state belongs to that of the run: he has named them, and they have a `state_dict`."""

from __future__ import annotations

import copy
from typing import Any

from duoka.data.sizes import count_bytes

_LARGEST_BYTES = 1 << 20  # of an object that is kept twice: what decisions are made of is small


class Also:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._at_top: dict[str, Any] = {}  # as the script has made them
        self._saved: dict[str, Any] = {}  # states that the script is being led to

    def capture(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def capture_small(self, largest_bytes: int = _LARGEST_BYTES) -> dict[str, Any]:
        """Copies, of those that are not larger."""
        return self.look(largest_bytes)[0]

    def look(self, largest_bytes: int) -> tuple[dict[str, Any], bool]:
        """The same, and whether none is left out that is still small enough to be kept twice elsewhere."""
        states = self.capture()  # once: it may be as expensive as the object is large
        sizes = {name: count_bytes(state) for name, state in states.items()}
        small = {name: copy.deepcopy(state) for name, state in states.items() if sizes[name] <= largest_bytes}
        return small, not any(largest_bytes < size <= _LARGEST_BYTES for size in sizes.values())

    def restore(self, states: dict[str, Any]) -> None:
        """For a script that begins at its top. What it changes on its way to where the run is does not count."""
        self._at_top, self._saved = self.capture_small(), states
        self.take(states)

    def take(self, states: dict[str, Any]) -> None:
        self._load(copy.deepcopy(states))  # objects may go on with what they are given

    def begin_at_top(self) -> None:
        """The script does again all that it has done."""
        states, self._at_top = self._at_top, {}
        self._load(states)

    def arrive(self) -> None:
        """The script has come to where the run is."""
        states, self._saved, self._at_top = self._saved, {}, {}
        self._load(states)

    def _load(self, states: dict[str, Any]) -> None:
        for name, thing in self.objects.items():
            if name in states:
                thing.load_state_dict(states[name])
