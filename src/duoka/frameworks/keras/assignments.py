"""Every assignment to a variable of Keras, seen by one function while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.replacing import for_this_thread, replacing


@contextmanager
def watching_assignments(see: Callable[[Any], None]) -> Iterator[None]:
    """`see` gets each variable before this thread assigns to it; what it raises keeps the old value."""
    assign = keras.Variable._direct_assign

    def assign_seen(variable: Any, value: Any) -> None:
        see(variable)
        assign(variable, value)

    with replacing([(keras.Variable, "_direct_assign", for_this_thread(assign_seen, assign))]):
        yield
