"""Which framework an object belongs to, without importing any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duoka.errors import MismatchError

_KNOWN = ("keras", "torch")  # a Keras model on PyTorch is an nn.Module, too


def framework_of(objects: Sequence[Any]) -> str:
    """The framework of the first object whose class, or an ancestor of it, comes from one."""
    for thing in objects:
        roots = {ancestor.__module__.partition(".")[0] for ancestor in type(thing).__mro__}
        for framework in _KNOWN:
            if framework in roots:
                return framework
    names = ", ".join(type(thing).__name__ for thing in objects) or "nothing"
    raise MismatchError(
        f"strategy.prepare was given {names}, which belongs to no framework that Duoka knows.",
        do="give it Keras models, or PyTorch models, optimizers, loaders, schedulers or scalers.",
    )
