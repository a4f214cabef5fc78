"""Methods of other people's classes that do something else while a step is watched, in the thread that runs it.

To set an attribute of a class throws away what the interpreter has learned of it, and of all classes below it: done for
every replica of every step, that takes longer than the watching. So inside of `keeping_switches` what stands in for a
method stays there, and hands calls on while nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

from duoka.frameworks.replacing import INHERITED, definitions, with_subclasses

New = Any  # a function that gets the former one first, and then its arguments
Switched = tuple[Any, str, New]  # a class, the name of a method, and what is called instead


@contextmanager
def switching(switched: Sequence[Switched]) -> Iterator[None]:
    """Another thread goes on with the former functions: one that reads data may compute while a step is watched."""
    switches = [_find(owner, name) for owner, name, _ in switched]
    thread = get_ident()
    for switch, (_, _, new) in zip(switches, switched, strict=True):
        switch.turn_to(new, thread)
    try:
        yield
    finally:
        for switch in reversed(switches):
            switch.turn_back(thread)
        if not _depth:
            _take_away()


@contextmanager
def keeping_switches() -> Iterator[None]:
    """Around many steps. Afterwards classes are as they were."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _take_away()


def places_of(base: type, names: tuple[str, ...]) -> list[tuple[type, str]]:
    """Where a class, or one below it, defines a method of these names.

    While switches are kept, looked up again only where there are more classes: a callback may define one.
    """
    if not _depth:
        return [(kind, name) for kind, name, _ in definitions(base, names)]
    known = _places.get((base, names))
    if known is None or _count_below(known[0]) != known[1]:
        kinds = with_subclasses(base)
        places = [(kind, name) for kind, name, _ in definitions(base, names)]
        known = _places[base, names] = kinds, _count_below(kinds), places
    return known[2]


def _count_below(kinds: Sequence[type]) -> list[int]:
    """How many classes are right below each: a new one shows here, and need not be looked for every time."""
    return [len(kind.__subclasses__()) for kind in kinds]


class _Switch:
    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._own = owner, name, vars(owner).get(name, INHERITED)
        self._turned: dict[int, list[Callable[..., Any]]] = {}  # by thread, the one that is called last
        self._former = former = getattr(owner, name)
        turned = self._turned

        @wraps(former)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            here = turned.get(get_ident()) if turned else None
            return here[-1](*args, **kwargs) if here else former(*args, **kwargs)

        self._stand_in = stand_in
        setattr(owner, name, stand_in)

    def turn_to(self, new: New, thread: int) -> None:
        here = self._turned.setdefault(thread, [])
        before = here[-1] if here else self._former
        here.append(lambda *args, **kwargs: new(before, *args, **kwargs))

    def turn_back(self, thread: int) -> None:
        self._turned[thread].pop()
        if not self._turned[thread]:
            del self._turned[thread]

    @property
    def is_idle(self) -> bool:
        return not self._turned

    def take_away(self) -> None:
        if vars(self._owner).get(self._name) is not self._stand_in:
            return  # somebody has put a function of his own there, which calls ours
        if self._own is INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


_depth = 0  # of keeping_switches
_switches: dict[tuple[Any, str], _Switch] = {}  # that are in place
_places: dict[tuple[type, tuple[str, ...]], tuple[list[type], list[int], list[tuple[type, str]]]] = {}


def _find(owner: Any, name: str) -> _Switch:
    if (owner, name) not in _switches:
        _switches[owner, name] = _Switch(owner, name)
    return _switches[owner, name]


def _take_away() -> None:
    _places.clear()
    for key, switch in list(_switches.items()):
        if switch.is_idle:
            switch.take_away()
            del _switches[key]
