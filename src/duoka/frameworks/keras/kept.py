"""What is known of somebody else's object, for as long as that lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """By identity: datasets may be equal, or have no hash."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def of(self, owner: Any, make: Callable[[], Value]) -> Value:
        """The owner's value, made at first. An owner that cannot be referred to weakly gets another one each time."""
        key = id(owner)
        if key in self._values:
            return self._values[key][1]
        value = make()
        try:
            self._values[key] = weakref.ref(owner, lambda _: self._values.pop(key, None)), value
        except TypeError:
            pass
        return value

    def __contains__(self, owner: Any) -> bool:
        return id(owner) in self._values
