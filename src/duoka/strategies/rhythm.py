"""When something is due again: after so many steps, after so many seconds, or both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from duoka.errors import CheckpointError

DEFAULT_S = 600.0


class Rhythm:
    """Asked once at each border. Steps count from the beginning of the run: a resumed one saves at the same steps.

    >>> rhythm = Rhythm(every_steps=10)
    >>> rhythm.begin(14)
    >>> [step for step in range(15, 35) if rhythm.is_due(step)]
    [20, 30]
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = None if every_steps is None else _check_steps(every_steps)
        self._every_s = DEFAULT_S if every_steps is None and every_s is None else _check_seconds(every_s)
        self._clock = clock
        self._step, self._moment = 0, clock()

    def begin(self, step: int) -> None:
        """As if it had just been done."""
        self._step, self._moment = step, self._clock()

    def is_due(self, step: int) -> bool:
        if step <= self._step:
            return False
        every = self._every_steps
        is_due = every is not None and step // every > self._step // every
        is_due = is_due or self._clock() - self._moment >= self._every_s
        if is_due:
            self.begin(step)
        return is_due


def _check_steps(every_steps: object) -> int:
    if type(every_steps) is not int or every_steps < 1:
        raise CheckpointError(f"every_steps={every_steps!r} cannot be used.", do="give a number of steps, 1 or more.")
    return every_steps


def _check_seconds(every_s: object) -> float:
    if every_s is None:
        return math.inf
    if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not every_s > 0:
        raise CheckpointError(f"every_s={every_s!r} cannot be used.", do="give a number of seconds above 0.")
    return float(every_s)
