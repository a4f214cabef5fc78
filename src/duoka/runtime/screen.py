"""The terminal that a run is shown on, if it is."""

from __future__ import annotations

import os

_USUAL_COLUMNS = 80  # for terminals that do not say


def count_columns(descriptor: int = 2) -> int:
    """The width of the terminal behind this descriptor; 0 where there is none.

    The workers cannot see it, since they print into pipes: so they are told.
    """
    try:
        return (os.get_terminal_size(descriptor).columns or _USUAL_COLUMNS) if os.isatty(descriptor) else 0
    except OSError:
        return 0
