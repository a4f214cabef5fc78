"""The shape of a state as strict JSON: what contains what, with tensors left out and named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from duoka.errors import CheckpointError

# Beyond this, readers of JSON in other languages lose digits, and Python refuses very long decimals.
_LARGEST_PLAIN_INT = 2**53

Put = Callable[[Any, str], dict[str, Any] | None]
Get = Callable[[dict[str, Any]], Any]


def describe(state: Any, put: Put) -> Any:
    """A state as JSON values. `put` gets everything that JSON does not know, and gives a record of it or None.

    Types come back as they were: tuples, dictionaries with any keys, ordered ones, counters, NaN and infinities.

    >>> describe({"lr": [0.1, float("inf")], "state": {0: (1, None)}}, lambda value, place: None)
    {'lr': [0.1, {'$float': 'inf'}], 'state': {'$dict': [[0, {'$tuple': [1, None]}]]}}
    """
    return _Describer(put).plain(state, "state")


class _Describer:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._within: set[int] = set()

    def plain(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) <= _LARGEST_PLAIN_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is complex:
            return {"$complex": [self.plain(part, place) for part in (value.real, value.imag)]}
        if isinstance(value, (list, tuple, dict)):
            return self._contained(value, place)
        record = self._put(value, place)
        if record is None:
            raise _refusal(value, place)
        return {"$stored": record}

    def _contained(self, value: Any, place: str) -> Any:
        if id(value) in self._within:
            raise CheckpointError(f"{place} contains itself.", do="save a state without circles.")
        self._within.add(id(value))
        try:
            return self._container(value, place)
        finally:
            self._within.discard(id(value))

    def _container(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, place)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"$tuple": self._items(value, place)}
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.plain(part, _within(place, key)) for key, part in value.items()}
            return {"$dict": self._pairs(value, place)}
        if kind is Counter:
            return {"$counter": self._pairs(value, place)}
        if kind is OrderedDict:
            # A model's state_dict carries the versions of its layers in this attribute.
            versions = getattr(value, "_metadata", None)
            more = {} if versions is None else {"$metadata": self.plain(versions, f"{place}._metadata")}
            return {"$ordered": self._pairs(value, place), **more}
        raise _refusal(value, place)

    def _items(self, values: Iterable[Any], place: str) -> list[Any]:
        return [self.plain(part, f"{place}[{index}]") for index, part in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], place: str) -> list[list[Any]]:
        return [[self._key(key, place), self.plain(part, _within(place, key))] for key, part in value.items()]

    def _key(self, key: Any, place: str) -> Any:
        return _Describer(lambda value, place: None).plain(key, f"a key of {place}")


def _within(place: str, key: Any) -> str:
    return f"{place}[{key!r}]"


def _refusal(value: Any, place: str) -> CheckpointError:
    return CheckpointError(
        f"{place} is a {type(value).__name__}, which cannot be saved.",
        why="a saved state holds tensors, arrays, numbers, strings and None, in dictionaries, lists and tuples;"
        " anything else would need code to be read back.",
        do="save its state_dict(), or turn it into one of these first.",
    )


def rebuild(tree: Any, get: Get) -> Any:
    """What `describe` was given. `get` gives back what a record stands for.

    >>> rebuild({'$dict': [[0, {'$tuple': [1, {'$float': 'inf'}]}]]}, lambda record: None)
    {0: (1, inf)}
    """

    def value(part: Any) -> Any:
        if isinstance(part, list):
            return [value(item) for item in part]
        if not isinstance(part, dict):
            return part
        tag = next(iter(part), "")
        if not tag.startswith("$"):
            return {key: value(item) for key, item in part.items()}
        return _tagged(tag, part, value, get)

    return value(tree)


def _tagged(tag: str, part: dict[str, Any], value: Callable[[Any], Any], get: Get) -> Any:
    content = part[tag]
    if tag == "$stored":
        return get(content)
    if tag == "$int":
        return int(content, 16)
    if tag == "$float":
        return float(content)
    if tag == "$complex":
        return complex(*(value(item) for item in content))
    if tag == "$tuple":
        return tuple(value(item) for item in content)
    if tag not in ("$dict", "$counter", "$ordered"):
        raise ValueError(f"an unknown tag, {tag[:100]}.")
    pairs = {value(key): value(item) for key, item in content}
    if tag == "$dict":
        return pairs
    if tag == "$counter":
        return Counter(pairs)
    ordered: Any = OrderedDict(pairs)
    if "$metadata" in part:
        ordered._metadata = value(part["$metadata"])
    return ordered


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no numbers beyond a float, no key twice in one object. Anything else is a ValueError."""
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_parse_float, object_pairs_hook=_refuse_second_keys
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _refuse_second_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return found
