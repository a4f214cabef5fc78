"""How near a newcomer comes to the others before it joins them: reading a stream up to their batch takes its time.

It hears where they are, and they go on; it reads up to there, and asks again. So they wait for what they have trained
on meanwhile, and not for the whole stream.
"""

from __future__ import annotations

_NEAR = 2  # calls of train functions


class Approach:
    def __init__(self) -> None:
        self._last: int | None = None

    def is_over(self, num_missing: int) -> bool:
        """Whether to join with so many calls missing: few, or not much fewer than the last time.

        The first time never: a batch is compared with theirs before anything else.

        >>> approach = Approach()
        >>> [approach.is_over(number) for number in (100, 30, 8, 1)]
        [False, False, False, True]
        >>> approach = Approach()
        >>> [approach.is_over(number) for number in (100, 70)]
        [False, True]
        """
        last, self._last = self._last, num_missing
        return last is not None and (num_missing <= _NEAR or 2 * num_missing > last)
