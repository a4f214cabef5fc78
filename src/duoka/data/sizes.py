"""How much of a user's state there is."""

from __future__ import annotations

import math
from typing import Any


def count_bytes(state: Any) -> int:
    """Roughly.

    >>> count_bytes({"losses": [0.5] * 1000, "name": "best"})
    8004
    """
    if isinstance(state, dict):
        return sum(map(count_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(count_bytes, state))
    if isinstance(state, (str, bytes)):
        return len(state)
    try:
        return int(getattr(state, "nbytes", 8))
    except RuntimeError:  # a sparse tensor has none: as if it were dense
        return int(math.prod(state.shape) * state.element_size())
