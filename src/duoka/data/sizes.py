"""How much of a user's state there is."""

from __future__ import annotations

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
    return len(state) if isinstance(state, (str, bytes)) else int(getattr(state, "nbytes", 8))
