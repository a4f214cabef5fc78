"""What a function changes outside of itself: found by looking at what it can reach, before and after a call.

A function runs once per replica, and again after a loss. A counter, a generator or a metric that it changes would count
those runs. Looked at are its closure, the globals it names, `self`, and the same of functions of the script it calls.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from duoka.frameworks.torch.function.in_place import version_of

_DEPTH = 3  # of functions that call functions
_CONTAINERS = (list, dict, set, deque)
_MOST_ITEMS = 64  # of a container that are looked at
_NUMBERS = (bool, int, float, complex)


class Watch:
    """What a function can reach, as it was. `known` are the ids of what may change: prepared objects."""

    def __init__(self, function: Any, known: set[int]) -> None:
        self._function, self._known = function, known
        self._before = dict(self._look())
        self._containers = {name: value for name, value in self._reach() if isinstance(value, _CONTAINERS)}
        self._lengths = {name: len(value) for name, value in self._containers.items()}

    def find_changes(self) -> list[str]:
        """Return names of numbers, generators, tensors and modules that have changed."""
        after = dict(self._look())
        return [name for name, mark in self._before.items() if name in after and repr(after[name]) != repr(mark)]

    def find_grown(self) -> list[str]:
        """Return names of containers that have grown, and make lists as long as they were."""
        grown = [name for name, value in self._containers.items() if len(value) > self._lengths[name]]
        for name in grown:
            value = self._containers[name]
            if isinstance(value, list):
                del value[self._lengths[name] :]
        return grown

    def _look(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._reach():
            yield from self._mark(name, value)

    def _reach(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set(self._known)
        yield from _reach(self._function, seen, _DEPTH)

    def _mark(self, name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
        if id(value) in self._known:
            return
        if isinstance(value, _NUMBERS):
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, (id(value), version_of(value))
        elif isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= 1 << 20:
            yield name, value.tobytes()
        elif isinstance(value, torch.Generator):
            yield name, bytes(value.get_state().numpy())
        elif isinstance(value, np.random.Generator):
            yield name, repr(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            yield name, repr(value.get_state(legacy=False))
        elif isinstance(value, random.Random):
            yield name, value.getstate()
        elif isinstance(value, nn.Module):
            yield from self._mark_module(name, value)
        elif depth and isinstance(value, dict):
            for key, part in itertools.islice(list(value.items()), _MOST_ITEMS):
                yield from self._mark(f"{name}[{key!r}]", part, depth - 1)
        elif depth and isinstance(value, list | deque):
            for position, part in enumerate(list(value)[:_MOST_ITEMS]):
                yield from self._mark(f"{name}[{position}]", part, depth - 1)
        elif depth and hasattr(value, "__dict__") and not _is_code(value):
            for key, part in vars(value).items():
                yield from self._mark(f"{name}.{key}", part, depth - 1)

    def _mark_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for path, child in module.named_modules(prefix=name):
            if id(child) in self._known:
                continue
            tensors = {**child._parameters, **child._buffers}
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in self._known:
                    yield f"{path}.{key}", (id(tensor), version_of(tensor))
            for key, part in vars(child).items():
                if isinstance(part, (*_NUMBERS, torch.Tensor)) and key != "training":
                    yield from self._mark(f"{path}.{key}", part, 0)


def name_tensors(function: Any) -> dict[int, str]:
    """Return names for the tensors that a function can reach, and for those of modules, by their ids."""
    found: dict[int, str] = {}
    for name, value in _reach(function, set(), _DEPTH):
        if isinstance(value, torch.Tensor):
            found[id(value)] = name
        elif isinstance(value, nn.Module):
            found |= {id(tensor): path for path, tensor in value.named_parameters(prefix=name)}
    return found


def _reach(function: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    while isinstance(function, functools.partial):
        yield from (
            (f"argument {key}", value) for key, value in [*enumerate(function.args), *function.keywords.items()]
        )
        function = function.func
    if isinstance(function, MethodType):
        if id(function.__self__) not in seen:
            yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, FunctionType):
        if not _is_code(function) and id(function) not in seen:
            yield type(function).__name__, function
            function = type(function).__call__
        if not isinstance(function, FunctionType):
            return
    names = inspect.signature(function).parameters
    yield from ((name, each.default) for name, each in names.items() if each.default is not inspect.Parameter.empty)
    found = inspect.getclosurevars(function)
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, FunctionType | MethodType | functools.partial):
            if depth and id(value) not in seen and _is_of_script(value):
                seen.add(id(value))
                yield from _reach(value, seen, depth - 1)
        elif not _is_code(value) and (isinstance(value, _NUMBERS) or id(value) not in seen):
            yield name, value


def _is_of_script(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and "site-packages" not in code.co_filename and "/duoka/" not in code.co_filename


def _is_code(value: Any) -> bool:
    is_of_duoka = type(value).__module__.partition(".")[0] == "duoka"
    return is_of_duoka or isinstance(value, ModuleType | type | FunctionType | MethodType | BuiltinFunctionType)
