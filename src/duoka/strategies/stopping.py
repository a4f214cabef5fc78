"""All workers stop at the same border between steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from duoka.collectives.collective import Collective


class StopSign:
    """The main worker, asked to stop, names the next border, before it lets the batch before that be completed.

    Nobody can come to that border without this batch, so everybody finds its number there. When the main worker is
    lost in between, the number stands.
    """

    def __init__(self, collective: Collective, is_main: Callable[[], bool], is_asked: Callable[[], bool]) -> None:
        self._collective, self._is_main, self._is_asked = collective, is_main, is_asked
        self._border = collective.common(8).view(np.int64)  # its batch, plus one: zero is none

    def is_here(self, batch: int) -> bool:
        """Whether to stop at this border, before this batch."""
        if self._is_asked() and not self._border[0] and self._is_main():
            is_alone = len(self._collective.workers) == 1
            self._border[0] = batch + 1 if is_alone else batch + 2
        return 0 < self._border[0] <= batch + 1
