"""What the main worker does alone, for all: others who come by wait until it is done, and do it if that one is lost.

The main worker waits for nobody. So it may be called by all, or by the main one alone: whoever comes by later finds it
done. Nobody waits for a main worker that is further in its calls, or at its end, and has not done it: it never will.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from duoka.collectives.collective import Collective

T = TypeVar("T")
_PLACES = 64  # more than that are not done between two calls


class Deeds:
    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        # How many were written down; then, for each place in turn, the call before which it was done, and its name.
        self._done = collective.common(8 * (1 + 2 * _PLACES)).view(np.int64)
        self._call = 0
        self._times: Counter[str] = Counter()  # since that call

    def do(self, name: str, deed: Callable[[], T]) -> T | None:
        """Done once, on one worker, which gets what comes of it. An error there is that worker's own."""
        joining = self._collective.joining
        if joining is not None and joining.is_newcomer:
            return None  # the others have done it long ago
        call = self._collective.next_number
        if call != self._call:
            self._call = call
            self._times.clear()
        self._times[name] += 1
        mark = _digest(f"{name} {self._times[name]}")
        if self._collective.await_main(lambda: self._is_done(call, mark)):
            return None
        result = deed()
        self._note(call, mark)
        return result

    def _is_done(self, call: int, mark: int) -> bool:
        places = self._done[1:].reshape(_PLACES, 2)
        return bool(((places[:, 0] == call) & (places[:, 1] == mark)).any())

    def _note(self, call: int, mark: int) -> None:
        place = 1 + 2 * (int(self._done[0]) % _PLACES)
        self._done[place] = 0  # not to be read before all of it is written
        self._done[place + 1] = mark
        self._done[place] = call
        self._done[0] += 1


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
