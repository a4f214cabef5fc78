"""Which function a call is about: its name on all workers, and the objects that had this name."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any


def fingerprint(function: Any) -> str:
    """Name a function by its file, line and qualified name; partial() and methods are unwrapped.

    >>> fingerprint(functools.partial(fingerprint, None)).split(":")[0]
    'identity.py'
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        kind = function if isinstance(function, type) else type(function)
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} {function.__qualname__}"


@dataclass
class Seen:
    """The calls of functions of one name, and their objects: a line of code may make functions with other losses."""

    num_calls: int = 0
    first_loss: float = 0.0  # without its sign
    num_objects: int = 0  # that were new
    objects: dict[int, Any] = field(default_factory=dict)  # weak references, by id

    def add(self, owner: Any) -> None:
        self.num_objects += 1
        try:
            self.objects[id(owner)] = weakref.ref(owner)
        except TypeError:  # it cannot be referred to weakly: it is kept
            self.objects[id(owner)] = lambda: owner
