"""What is known of the fits of a run that are over: a script that is run again comes by them, and trains nothing there.

There may be thousands, and all of it is in every checkpoint. Kept are a few numbers of each, and what callbacks,
generators and the user's own objects were like where that has changed, of the last ones.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from duoka.data.changes import Changes

Record = dict[str, Any]
LARGEST_BYTES = 1 << 17  # of an object of the user's: what decisions are made of is small
_MOST_ALSO = 1 << 17  # bytes, of each object: lists of numbers take half a second to write for each MB
_MOST_GENERATORS = 64 * 5100  # of each: PyTorch's takes 5 KB, Python's and NumPy's half of that
_MOST_CALLBACKS = 1 << 20  # of each: a history with ten epochs of four numbers takes 400
_COUNTS = ("calls", "num_calls", "epochs", "is_stopped", "is_cut", "step", "bodies")
_LINES = {
    "also": "what {} of `also` was like after a fit that is over is not known: it is as the script makes it, until the"
    f" run goes on. Of each object the last {_MOST_ALSO >> 10} KB are kept",
    "generators": "numbers drawn after a fit that was long over are not those of the run that is resumed: generators"
    " are kept for the last 64 fits or more ({})",
    "callbacks": "what {} had learned in a fit that is over is not known any more: it is as the script makes it. Of"
    f" each callback the last {_MOST_CALLBACKS >> 20} MB are kept",
}


class PastFits:
    """By their numbers, which grow. Each has two places: where it began, and where it had ended."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}  # and at last which callbacks
        self._kinds: list[list[str]] = []  # of callbacks, as fits had them
        self._callbacks = Changes(_MOST_CALLBACKS)
        self._generators = Changes(_MOST_GENERATORS)
        self._also = Changes(_MOST_ALSO)

    def begin(self, number: int, also: dict[str, Any]) -> None:
        """`also`: states of the user's objects; None for those that are too large."""
        self._also.add(2 * number, also)

    def also_at_begin(self, number: int) -> dict[str, Any]:
        return self._also.at(2 * number)[0]

    def end(self, number: int, record: Record) -> None:
        """What came of it."""
        kinds = [each["kind"] for each in record["callbacks"]]
        if kinds not in self._kinds:
            self._kinds.append(kinds)
        self._counts[number] = [*(int(record[name]) for name in _COUNTS), self._kinds.index(kinds)]
        # Copies: a callback that is given to the next fit, too, goes on with the same lists.
        learned = copy.deepcopy(record["callbacks"])
        self._callbacks.add(number, dict(zip(_names(kinds), learned, strict=True)))
        self._generators.add(number, record["generators"])
        self._also.add(2 * number + 1, record["also"])

    def num_epochs(self, number: int) -> int:
        """0 if it is not over."""
        return dict(zip(_COUNTS, self._counts.get(number, ()), strict=False)).get("epochs", 0)

    def forget(self, number: int) -> None:
        """It is not over: it goes on."""
        del self._counts[number]

    def find(self, number: int) -> Record | None:
        """What came of it, if it is over. Under "unknown" are the names of what is not known of it any more."""
        if number not in self._counts:
            return None
        *counts, which = self._counts[number]
        kinds = self._kinds[which]
        generators, unknown_generators = self._generators.at(number)
        also, unknown_also = self._also.at(2 * number + 1)
        learned, _ = self._callbacks.at(number)
        named = dict(zip(_names(kinds), kinds, strict=True))
        callbacks = [learned.get(name, {"kind": kind, "attributes": {}}) for name, kind in named.items()]
        unknown_callbacks = [kind for name, kind in named.items() if name not in learned]
        unknown = {"generators": unknown_generators, "also": unknown_also, "callbacks": unknown_callbacks}
        states = {"callbacks": copy.deepcopy(callbacks), "generators": generators, "also": also, "unknown": unknown}
        return dict(zip(_COUNTS, counts, strict=True)) | states

    def capture(self) -> dict[str, Any]:
        counts = [[number, *counts] for number, counts in self._counts.items()]
        changes = {"callbacks": self._callbacks, "generators": self._generators, "also": self._also}
        return {"counts": np.array(counts, np.int64).reshape(-1, len(_COUNTS) + 2), "kinds": list(self._kinds)} | {
            name: each.capture() for name, each in changes.items()
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._counts = {number: counts for number, *counts in saved["counts"].tolist()}
        self._kinds = list(saved["kinds"])
        self._callbacks.restore(saved["callbacks"])
        self._generators.restore(saved["generators"])
        self._also.restore(saved["also"])


def describe_unknown(record: Record, *kinds: str) -> list[str]:
    """Lines for a script that comes by a fit of which some of these is not known: also, generators, callbacks."""
    unknown = record.get("unknown", {})
    return [_LINES[kind].format(", ".join(unknown[kind])) for kind in kinds if unknown.get(kind)]


def _names(kinds: list[str]) -> list[str]:
    return [f"{place} {kind}" for place, kind in enumerate(kinds)]
