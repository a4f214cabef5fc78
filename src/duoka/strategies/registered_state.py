"""Registered state: what a script keeps itself, and asks Duoka to save, restore and hand to a replacement worker.

Plain values live on the object that `strategy.register` returns. Objects with a `state_dict` and random generators stay
where they are.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from duoka.data.generators import capture_python, restore_python
from duoka.errors import CheckpointError

_PLAIN = (bool, int, float, complex, str, type(None))
_VALUE, _OBJECT, _GENERATOR = "a value", "an object", "a generator"


class RegisteredState:
    """Attributes by name: numbers, strings, tensors, arrays, and lists, tuples and dictionaries of them.

    >>> state = RegisteredState(lambda value: False)
    >>> state.register({"n": 0, "history": []})
    >>> state.n += 1
    >>> state.history.append(0.5)
    >>> saved = state.capture()
    >>> state.n, state.history
    (1, [0.5])
    >>> state.n = 7
    >>> state.restore(saved)
    >>> state.n
    1
    """

    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        vars(self).update(_is_tensor=is_tensor, _values={}, _objects={}, _kinds={})

    def __getattr__(self, name: str) -> Any:
        for kept in (self._values, self._objects):
            if name in kept:
                return kept[name]
        raise AttributeError(f"{name!r} was not registered: name it in strategy.register({name}=...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            what = "is an object, which stays where it is" if name in self._objects else "was not registered"
            raise AttributeError(f"{name!r} {what}: only values of strategy.register({name}=...) can be set")
        self._values[name] = value

    def __repr__(self) -> str:
        return f"RegisteredState({', '.join(self._kinds)})"

    def register(self, things: Mapping[str, Any]) -> None:
        """Add these names."""
        for name, thing in things.items():
            if name in self._kinds:
                raise CheckpointError(f"{name!r} is registered twice.", do="use one name for each.")
            if name.startswith("_") or hasattr(type(self), name):
                raise CheckpointError(f"{name!r} cannot be the name of registered state.", do="use another name.")
            kind = self._kinds[name] = self._find_kind(name, thing)
            (self._values if kind == _VALUE else self._objects)[name] = thing

    def _find_kind(self, name: str, thing: Any) -> str:
        if self._is_value(thing):
            return _VALUE
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            return _OBJECT
        if _is_generator(thing):
            return _GENERATOR
        raise CheckpointError(
            f"{name!r} cannot be registered: it is a {type(thing).__name__}.",
            why="Duoka saves numbers, strings, tensors and arrays, lists and dictionaries of them, objects with"
            " state_dict and load_state_dict, and random generators.",
            do="add these two methods to its class, or register the values that it holds.",
        )

    def _is_value(self, thing: Any) -> bool:
        if isinstance(thing, (list, tuple)):
            return all(map(self._is_value, thing))
        if isinstance(thing, dict):
            return all(isinstance(key, _PLAIN) and self._is_value(part) for key, part in thing.items())
        return isinstance(thing, (*_PLAIN, np.ndarray, np.generic)) or bool(self._is_tensor(thing))

    @property
    def kinds_of_state(self) -> dict[str, str]:
        """By name: the class of an object, else what kind of thing it is."""
        return {n: type(self._objects[n]).__name__ if k == _OBJECT else k for n, k in self._kinds.items()}

    def capture(self) -> dict[str, Any]:
        """The state of all of it: tensors as they are, not copied."""
        for name, value in self._values.items():
            if not self._is_value(value):
                raise CheckpointError(
                    f"The registered value {name!r} is a {type(value).__name__} now, which cannot be saved.",
                    do="assign numbers, strings, tensors and arrays, or lists and dictionaries of them.",
                )
        objects = {
            name: thing.state_dict() if self._kinds[name] == _OBJECT else _capture_generator(thing)
            for name, thing in self._objects.items()
        }
        return {"values": dict(self._values), "objects": objects, "kinds": self.kinds_of_state}

    def check(self, state: Mapping[str, Any]) -> list[str]:
        """Raise if a name has another kind here than in the saved state. Returns what only one side has."""
        here, saved = self.kinds_of_state, state["kinds"]
        for name, kind in here.items():
            if saved.get(name, kind) != kind:
                raise CheckpointError(
                    f"{name!r} is registered as {kind} here, and was {saved[name]} in the saved run.",
                    do="register the same kind of thing, or begin a new run in another directory.",
                )
        gone = [f"{name!r} was registered in the saved run, and is not here" for name in saved if name not in here]
        return gone + [f"{name!r} was not registered in the saved run" for name in here if name not in saved]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Copies are put in place, so the same state can be restored again."""
        for name in self._values:
            if name in state["values"]:
                self._values[name] = copy.deepcopy(state["values"][name])
        for name, thing in self._objects.items():
            if name in state["objects"]:
                saved = copy.deepcopy(state["objects"][name])
                thing.load_state_dict(saved) if self._kinds[name] == _OBJECT else _restore_generator(thing, saved)


def _is_generator(thing: Any) -> bool:
    """Python's, NumPy's, old and new, and PyTorch's, which has the methods of NumPy's old one."""
    is_new = isinstance(thing, np.random.Generator)
    return is_new or isinstance(thing, random.Random) or (hasattr(thing, "get_state") and hasattr(thing, "set_state"))


def _capture_generator(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return capture_python(generator)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def _restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        restore_python(generator, state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
