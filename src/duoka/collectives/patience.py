"""How long a worker waits before it asks for help: past its deadline, the supervisor hears whom it waits for.

A deadline is not the end of a wait. The supervisor watches the one who is missing and decides: it computes, and
the wait goes on; or it is lost, and the others are told. Only where nobody can be blamed does it say that the
wait has *expired*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_UNTIL_WOKEN_S = 3600.0  # the supervisor wakes whoever waits; this is only a bound for poll()
_STEPS = 3  # a wait is not late before it has taken as long as so many ordinary steps


class Link(Protocol):
    """The line to the supervisor: small JSON objects, in order."""

    def send(self, message: dict[str, Any]) -> None: ...

    def receive(self, timeout_s: float) -> dict[str, Any] | None: ...


class Pace:
    """How long steps take. What was measured only lengthens deadlines: a slow step is no reason to be impatient.

    >>> pace = Pace()
    >>> for moment in (0.0, 40.0, 80.0, 500.0, 540.0):  # the third one waited for somebody
    ...     pace.end_step(moment)
    >>> pace.lengthen(60.0), pace.lengthen(600.0)
    (120.0, 600.0)
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=9)
        self._last: float | None = None

    def end_step(self, now: float) -> None:
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def lengthen(self, deadline_s: float) -> float:
        if not self._seconds:
            return deadline_s
        return max(deadline_s, _STEPS * sorted(self._seconds)[len(self._seconds) // 2])


class Patience:
    """The deadline of one wait."""

    def __init__(
        self,
        link: Link,
        clock: Callable[[], float],
        deadline_s: float,
        lengthen: Callable[[float], float],
        facts: dict[str, Any],
    ) -> None:
        self._link, self._clock, self._facts = link, clock, facts
        self._begun = clock()
        self._deadline_s = deadline_s
        self._lengthen = lengthen
        self._told: tuple[bool, tuple[int, ...]] | None = None

    def left(self) -> float:
        """Seconds until there is something to tell."""
        if self._is_over():
            return _UNTIL_WOKEN_S
        return self._begun + self._deadline_s - self._clock()

    def _is_over(self) -> bool:
        if self._clock() < self._begun + self._deadline_s:
            return False
        self._deadline_s = self._lengthen(self._deadline_s)
        return self._clock() >= self._begun + self._deadline_s

    def tell(self, missing: Sequence[int]) -> None:
        """Past the deadline, say once who is missing, and again when it is somebody else."""
        if self._is_over() and self._told != (True, tuple(missing)):
            self.answer(missing)

    def answer(self, missing: Sequence[int]) -> None:
        """Say it now: the supervisor has asked where this worker is."""
        is_over = self._is_over()
        self._told = is_over, tuple(missing)
        waited_s = self._clock() - self._begun
        told = {"missing": list(missing), "is_late": is_over, "waited_s": waited_s, "deadline_s": self._deadline_s}
        self._link.send({"kind": "waiting"} | told | self._facts)

    def begin_anew(self) -> None:
        """This worker has something to do itself before it goes on waiting: if it hangs there, it is to blame."""
        self.end()
        self._begun, self._told = self._clock(), None

    def end(self) -> None:
        if self._told is not None:
            self._link.send({"kind": "waited"})
