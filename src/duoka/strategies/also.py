"""Objects of the user's own whose state belongs to that of the run: he has named them, and they have a `state_dict`."""

from __future__ import annotations

import copy
from typing import Any


class Also:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}  # states that the script is being led to

    def capture(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def restore(self, states: dict[str, Any]) -> None:
        """For a script that begins at its top. What it changes on its way to where the run is does not count."""
        self._saved = states
        self._load(copy.deepcopy(states))  # objects may go on with what they are given

    def arrive(self) -> None:
        """The script has come to where the run is."""
        states, self._saved = self._saved, {}
        self._load(states)

    def _load(self, states: dict[str, Any]) -> None:
        for name, thing in self.objects.items():
            if name in states:
                thing.load_state_dict(states[name])
