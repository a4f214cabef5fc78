"""Records of what happened in a run. Lower folders emit them; whoever wants to know, listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Checked:
    """All workers had the same weights and optimizer state when this step began."""

    step: int
    digest: str  # depends on names of types, shapes and bits only: equal for equal states, in any run
    seconds: float  # what the check took
    share: float  # of the time since the last one


@dataclass(frozen=True)
class Drifted:
    """Some workers had other values than most, and were removed."""

    step: int
    drifted: tuple[int, ...]
    first: str  # the first tensor that differed
    num_tensors: int


@dataclass(frozen=True)
class Parted:
    """Workers had different values, and none of them most of the votes."""

    step: int
    first: str


Event = Checked | Drifted | Parted
Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """From now on it is given every event, on the thread where that happens. Returns what ends it.

    >>> seen = []
    >>> end = listen(seen.append)
    >>> emit(Parted(step=3, first="bias"))
    >>> end()
    >>> seen
    [Parted(step=3, first='bias')]
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def is_anybody_listening() -> bool:
    return bool(_listeners)


def emit(event: Event) -> None:
    for listener in tuple(_listeners):
        listener(event)
