"""Every assignment to a variable of Keras, seen by one function while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.switching import switching


@contextmanager
def watching_assignments(see: Callable[[Any], None]) -> Iterator[None]:
    """`see` gets each variable before this thread assigns to it; what it raises keeps the old value."""

    def assign_seen(assign: Callable[..., None], variable: Any, value: Any) -> None:
        see(variable)
        assign(variable, value)

    with switching([(keras.Variable, "_direct_assign", assign_seen)]):
        yield
