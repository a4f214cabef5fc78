"""Functions in the place of those that train and validate: they read their batches, and compute nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import keras


def make_reading(num_batches: int) -> Any:
    """With the arguments and results that this backend's `fit` expects; `num_batches` are read at once."""
    if keras.backend.backend() == "torch":
        return lambda batches: {}  # they are read already
    if keras.backend.backend() == "jax":
        return lambda state, batches: (read(batches, num_batches), state)
    return lambda batches: read(batches, num_batches)


def read(batches: Any, count: int) -> dict[str, Any]:
    """At least one: a run through the data ends where there is none."""
    next(batches)
    skip(batches, count - 1)
    return {}


def skip(batches: Any, count: int) -> None:
    deque(some(batches, count), maxlen=0)


def some(batches: Any, count: int) -> Iterator[Any]:
    """Up to so many more: the last execution of an epoch may have fewer."""
    for _ in range(count):
        try:
            yield next(batches)
        except StopIteration:
            return
