"""Every assignment to a variable of Keras, seen by one function while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.replacing import replacing


@contextmanager
def watching_assignments(see: Callable[[Any], None]) -> Iterator[None]:
    """`see` gets each variable before it is assigned to; what it raises keeps the old value."""
    assign = keras.Variable._direct_assign

    def assign_seen(variable: Any, value: Any) -> None:
        see(variable)
        assign(variable, value)

    with replacing([(keras.Variable, "_direct_assign", assign_seen)]):
        yield
