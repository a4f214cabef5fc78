"""What came of evaluations between trainings. A script that is run again comes by them, with the weights of later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.data.sizes import count_bytes

_MOST_BYTES = 1 << 18  # of all of them, which are in every checkpoint: a loop may evaluate after each batch
_BYTES_EACH = 64  # that one takes beside its numbers
Place = tuple[int, int, int]  # fits, calls of train functions, evaluations since the last of them
_LOST = (
    "evaluations that were long before the save run again, with the weights of the save, and do not give what they gave"
    f" then: the last {_MOST_BYTES // (_BYTES_EACH + 8)} or so are known"
)


class Evaluations:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._results: dict[str, Any] = {}
        self._num_bytes = 0
        self._last_lost: list[int] = []  # the place of the newest one that was left out

    def keep(self, place: Place, result: Any) -> None:
        key = _key(place)
        if key in self._results:  # a run that goes on right before it makes it again
            self._remove(key)
        self._results[key] = result
        self._num_bytes += _size(result)
        while self._num_bytes > _MOST_BYTES and len(self._results) > 1:
            oldest = next(iter(self._results))
            self._remove(oldest)
            self._last_lost = [int(part) for part in oldest.split()]

    def _remove(self, key: str) -> None:
        self._num_bytes -= _size(self._results.pop(key))

    def knows(self, place: Place) -> bool:
        """Whether one has been made there; one that was left out since is told of."""
        if list(place) <= self._last_lost:
            self._tell(_LOST)
        return _key(place) in self._results

    def find(self, place: Place) -> Any:
        return self._results[_key(place)]

    def capture(self) -> dict[str, Any]:
        return {"results": dict(self._results), "last_lost": self._last_lost}

    def restore(self, saved: dict[str, Any]) -> None:
        self._results, self._last_lost = dict(saved["results"]), saved["last_lost"]
        self._num_bytes = sum(map(_size, self._results.values()))


def _key(place: Place) -> str:
    return " ".join(map(str, place))


def _size(result: Any) -> int:
    return count_bytes(result) + _BYTES_EACH
