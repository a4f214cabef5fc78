"""Methods of other people's classes, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from types import FunctionType
from typing import Any

Replacement = tuple[Any, str, Any]  # a class, the name of a method, and what stands there meanwhile
INHERITED = object()


@contextmanager
def replacing(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Afterwards everything is as it was, also where a class had inherited the method."""
    former = [(owner, name, vars(owner).get(name, INHERITED)) for owner, name, _ in replacements]
    for owner, name, new in replacements:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in reversed(former):
            if old is INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@contextmanager
def shadowing(thing: Any, shadows: dict[str, Any]) -> Iterator[None]:
    """Attributes of one object, and not of its class. Afterwards it has those of its own that it had before."""
    attributes = vars(thing)
    former = {name: attributes[name] for name in shadows if name in attributes}
    attributes.update(shadows)
    try:
        yield
    finally:
        for name in shadows:
            attributes.pop(name, None)
        attributes.update(former)


def for_this_thread(new: Callable[..., Any], former: Callable[..., Any]) -> Callable[..., Any]:
    """Another thread goes on with the former function: one that reads data may compute while a step is watched."""
    thread = get_ident()

    @wraps(former)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if get_ident() == thread else former)(*args, **kwargs)

    return call


@contextmanager
def replacing_inside(decorated: Any, new: Any) -> Iterator[None]:
    """What a decorator has wrapped is another function for a while, whatever names the decorated one has by now.

    The decorator's own function holds the wrapped one in a cell, alone.
    """
    (cell,) = decorated.__closure__
    former = function_inside(decorated)
    cell.cell_contents = new
    try:
        yield
    finally:
        cell.cell_contents = former


def function_inside(decorated: Any) -> Any:
    """What a decorator has wrapped."""
    (cell,) = decorated.__closure__
    return cell.cell_contents


@contextmanager
def replacing_body(function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A plain function does something else for a while, whatever names it has by now. `make` gets the former one."""
    former = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )

    def call(*args: Any, _new: Callable[..., Any], **kwargs: Any) -> Any:
        return _new(*args, **kwargs)

    own = function.__code__, function.__kwdefaults__
    function.__kwdefaults__ = {"_new": make(former)}
    function.__code__ = call.__code__
    try:
        yield
    finally:
        function.__code__, function.__kwdefaults__ = own


def definitions(base: type, names: Sequence[str]) -> list[tuple[type, str, Any]]:
    """Where a class, or one below it, defines a method of these names; and the method."""
    return [(kind, name, vars(kind)[name]) for kind in with_subclasses(base) for name in names if name in vars(kind)]


def with_subclasses(kind: type) -> list[type]:
    found: dict[type, None] = {kind: None}
    below: type
    for below in kind.__subclasses__():
        found.update(dict.fromkeys(with_subclasses(below)))
    return list(found)
