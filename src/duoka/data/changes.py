"""What named things were like at numbered places of a script: kept where they have changed, and only the newest.

A script may come by thousands of such places, and everything that is kept of them is written with each checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from duoka.data.sizes import count_bytes

_BYTES_EACH = 32  # that a number takes beside itself: without it a counter would be kept without end


class Changes:
    """Of each thing the last `most_bytes`; its newest state whatever its size.

    >>> changes = Changes(most_bytes=80)
    >>> for place, best in enumerate([5, 3, 3, 2]):
    ...     changes.add(place, {"best": best})
    >>> changes.at(0), changes.at(2), changes.at(9)
    (({}, ['best']), ({'best': 3}, []), ({'best': 2}, []))
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[str, dict[int, Any]] = {}  # by name and place, in order; None: not known from there on
        self._sizes: dict[str, dict[int, int]] = {}  # of those that are known, in bytes

    def add(self, place: int, states: dict[str, Any]) -> None:
        """What they are like here; what was known of later places is forgotten. They are not copied.

        None is for something that is too large to be kept. What is not among them is as it was before.
        """
        for of_name in (*self._kept.values(), *self._sizes.values()):
            for later in [each for each in of_name if each >= place]:
                del of_name[later]
        for name, state in states.items():
            kept = self._kept.setdefault(name, {})
            if not kept or not _are_equal(next(reversed(kept.values())), state):
                self._put(name, place, state)
                self._leave_out_oldest(kept, self._sizes[name])

    def _put(self, name: str, place: int, state: Any) -> None:
        self._kept.setdefault(name, {})[place] = state
        sizes = self._sizes.setdefault(name, {})
        if state is not None:
            sizes[place] = count_bytes(state) + _BYTES_EACH

    def _leave_out_oldest(self, kept: dict[int, Any], sizes: dict[int, int]) -> None:
        excess = sum(sizes.values()) - self._most_bytes
        while excess > 0 and len(sizes) > 1:
            excess -= sizes.pop(next(iter(sizes)))
        first = next(iter(sizes), -1)
        left_out = [place for place in kept if place < first]
        for place in left_out[1:]:
            del kept[place]
        for place in left_out[:1]:
            kept[place] = None

    def at(self, place: int) -> tuple[dict[str, Any], list[str]]:
        """What they were like there, as far as it is known; and the names of those of which it is not."""
        known, unknown = {}, []
        for name, kept in self._kept.items():
            until = [each for each in kept if each <= place]
            if until and kept[until[-1]] is not None:
                known[name] = kept[until[-1]]
            elif until:
                unknown.append(name)
        return known, unknown

    def capture(self) -> dict[str, Any]:
        return {
            name: {"places": np.array(list(kept), np.int64), "states": list(kept.values())}
            for name, kept in self._kept.items()
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._kept, self._sizes = {}, {}
        for name, kept in saved.items():
            for place, state in zip(kept["places"].tolist(), kept["states"], strict=True):
                self._put(name, place, state)


def _are_equal(a: Any, b: Any) -> bool:
    """
    >>> _are_equal({"key": [np.arange(3), 1]}, {"key": [np.arange(3), 1]}), _are_equal([np.arange(3)], [np.ones(2)])
    (True, False)
    """
    if type(a) is not type(b) or getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_are_equal, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else equal is True
