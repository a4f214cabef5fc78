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
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from duoka.frameworks.torch.function.in_place import version_of

_DEPTH = 3  # of functions that call functions, and of objects in objects
_CONTAINERS = (list, dict, set, deque)
_MOST_ITEMS = 64  # of a container that are looked at
_NUMBERS = (bool, int, float, complex)
_NONE = repr(None)
_OF_MODULES = frozenset(vars(nn.Module()))  # `training`, and where parameters, buffers and hooks are kept
_OTHER_IN_EVAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class Look(NamedTuple):
    """What a function can reach, at one moment."""

    marks: dict[str, str]  # of values, by name
    lengths: dict[str, int]  # of containers


class Watch:
    """What a function can reach, as it was. `known` are the ids of what may change: prepared objects."""

    def __init__(self, function: Any, known: set[int]) -> None:
        self._function, self._known = function, known
        self._held: list[Any] = []  # tensors that were seen: no other one gets the id of one of them
        self._num_iterators = 0  # that were seen
        self._containers: dict[str, Any] = {}
        self._before = self._look()
        self._after_first: Look | None = None

    def look_again(self) -> None:
        """Look after the first of several runs: what only the first one makes, such as a cache, is not a change."""
        if self._after_first is None:
            self._after_first = self._look()

    @property
    def has_new(self) -> bool:
        """Whether the first run has made values that did not exist, or were None."""
        after = self._after_first
        return after is not None and any(self._is_new(name) for name in after.marks if self._differs(name, after))

    def find_changes(self) -> list[str]:
        """Return names of numbers, generators, tensors and modules that have changed."""
        after, first = self._look(), self._after_first
        grown = tuple(f"{name}[" for name in self._list_grown(after))
        changed = []
        for name in dict.fromkeys([*self._before.marks, *after.marks]):
            if not self._differs(name, after):
                continue
            if self._is_new(name):
                is_kept = first is not None and first.marks.get(name) == after.marks.get(name)
                if is_kept or (grown and name.startswith(grown)):
                    continue
            changed.append(name)
        return changed

    def find_grown(self) -> list[str]:
        """Return names of containers that have grown, and make lists as long as they were."""
        grown = self._list_grown(self._look())
        for name in grown:
            value = self._containers[name]
            if isinstance(value, list):
                del value[self._before.lengths.get(name, 0) :]
        return grown

    def _differs(self, name: str, after: Look) -> bool:
        return self._before.marks.get(name) != after.marks.get(name)

    def _is_new(self, name: str) -> bool:
        return self._before.marks.get(name, _NONE) == _NONE

    def _list_grown(self, after: Look) -> list[str]:
        before, first = self._before.lengths, self._after_first
        return [
            name
            for name, length in after.lengths.items()
            if length > before.get(name, length) and not (first is not None and first.lengths.get(name) == length)
        ]

    def _look(self) -> Look:
        marks: dict[str, str] = {}
        for name, value in _reach(self._function, set(self._known), _DEPTH):
            marks.update((place, repr(mark)) for place, mark in self._mark(name, value))
        return Look(marks, {name: len(value) for name, value in self._containers.items()})

    def _mark(self, name: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
        if id(value) in self._known:
            return
        if isinstance(value, _CONTAINERS):
            self._containers[name] = value
        if value is None or isinstance(value, _NUMBERS):
            yield name, value
        elif isinstance(value, torch.Tensor):
            self._held.append(value)
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
        elif depth and isinstance(value, GeneratorType):
            yield name, None if value.gi_frame is None else value.gi_frame.f_lasti
            for key, part in inspect.getgeneratorlocals(value).items():
                yield from self._mark(f"{name}.{key}", part, depth - 1)
        elif depth == _DEPTH and isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            # zip, map, itertools.cycle: they do not show where they are. A function names one to draw from it.
            self._num_iterators += 1
            yield f"{name}, an iterator", self._num_iterators
        elif depth and isinstance(value, dict):
            for key, part in itertools.islice(list(value.items()), _MOST_ITEMS):
                yield from self._mark(f"{name}[{key!r}]", part, depth - 1)
        elif depth and isinstance(value, tuple | list | deque):
            for position, part in enumerate(list(value)[:_MOST_ITEMS]):
                yield from self._mark(f"{name}[{position}]", part, depth - 1)
        elif depth and hasattr(value, "__dict__") and not _is_code(value):
            for key, part in list(vars(value).items()):
                yield from self._mark(f"{name}.{key}", part, depth - 1)

    def _mark_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for path, child in module.named_modules(prefix=name):
            if id(child) in self._known:
                continue
            tensors = {**child._parameters, **child._buffers}
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in self._known:
                    self._held.append(tensor)
                    yield f"{path}.{key}", (id(tensor), version_of(tensor))
            for key, part in own_attributes(child):
                yield from self._mark(f"{path}.{key}", part, 1)


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module keeps beside its parameters, buffers and modules."""
    for key, part in list(vars(module).items()):
        if key not in _OF_MODULES:
            yield key, part


def has_attributes(value: Any) -> bool:
    """Whether an object of the script's own may keep numbers or tensors. Those of PyTorch are its own business."""
    of_torch = type(value).__module__.partition(".")[0] == "torch"
    return hasattr(value, "__dict__") and not _is_code(value) and not (of_torch or isinstance(value, nn.Module))


def find_in_train_mode(function: Any, known: set[int]) -> dict[str, nn.Module]:
    """Return modules that were not prepared and behave otherwise in eval mode, by their names."""
    found: dict[str, nn.Module] = {}
    for name, value in _reach(function, set(known), _DEPTH):
        parts = {name: value} | {f"{name}.{key}": part for key, part in getattr(value, "__dict__", {}).items()}
        for path, module in parts.items():
            if not isinstance(module, nn.Module) or id(module) in known:
                continue
            if any(isinstance(each, _OTHER_IN_EVAL) and each.training for each in module.modules()):
                found[path] = module
    return found


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
