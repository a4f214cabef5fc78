"""What is said to the user: once, by the main worker."""

from __future__ import annotations

import sys

from duoka.collectives.collective import Collective


class Telling:
    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._told: set[str] = set()

    def tell_once(self, text: str, key: str = "") -> None:
        """With a key, one text of all that have it."""
        if (key or text) not in self._told:
            self._told.add(key or text)
            if self._collective.worker == self._collective.main:
                print(f"duoka: {text}", file=sys.stderr)
