"""Arguments of a call: handles of batches, and global tensors that are cut by samples.

Samples are dimension 0 of tensors and arrays, and the items of lists. Tuples, dictionaries and dataclasses are walked.
 Numbers, strings, None, callables and 0-d tensors are passed as they are.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from duoka.errors import MismatchError
from duoka.frameworks.torch.nested import like
from duoka.frameworks.torch.tensors import as_bytes

_PASSED = (bool, int, float, complex, str, bytes, type(None), np.generic)
_WORDS = 1024  # of a tensor that are compared between workers at every call
_DO = (
    "close over it in the function if every sample needs all of it, or transpose it so that samples come first"
    " (dimension 0)."
)


def count_samples(args: Sequence[Any], first: int = 1) -> int | None:
    """Return the length that all cut arguments share; None if there is nothing to cut.

    >>> count_samples([torch.ones(4, 2), {"ids": [1, 2, 3, 4]}, 0.5])
    4
    """
    known: tuple[int, str] | None = None
    for number, arg in enumerate(args, start=first):
        for name, part in _walk(arg, f"argument {number}"):
            _refuse_graph(part, name)
            length = len(part)
            if known is None:
                known = length, name
            elif known[0] != length:
                raise MismatchError(
                    f"strategy.backward was given {length} samples in {name} ({_kind(part)}) and {known[0]} in"
                    f" {known[1]}.",
                    why="tensors, arrays and lists are the global batch, and are cut by samples: all have one length.",
                    do=_DO,
                )
    return None if known is None else known[0]


def cut(value: Any, start: int, stop: int) -> Any:
    """Return these samples of everything in it. `count_samples` has looked at it before.

    >>> cut((torch.arange(4), {"n": 3, "names": ["a", "b", "c", "d"]}), 1, 3)
    (tensor([1, 2]), {'n': 3, 'names': ['b', 'c']})
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[start:stop] if value.ndim else value
    if isinstance(value, list):
        return value[start:stop]
    return rebuild(value, lambda part: cut(part, start, stop))


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same tuple, mapping or dataclass with its parts changed; anything else as it is."""
    if isinstance(value, tuple):
        parts = [change(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Mapping):
        return like(value, {key: change(part) for key, part in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: change(getattr(value, name)) for name in fields})
    return value


def describe(args: Sequence[Any], first: int = 1) -> str:
    """Return shapes and types of all cut arguments, to be compared between workers."""
    parts = (part for number, arg in enumerate(args, start=first) for _, part in _walk(arg, f"argument {number}"))
    return ", ".join(_kind(part) for part in parts)


def fingerprint(args: Sequence[Any], *, is_whole: bool) -> int:
    """Return a digest of the values of tensors and arrays: of 1,024 words of each, or of all; and of numbers and texts.

    Items of lists count if they are tensors, arrays, numbers or texts: of other objects no digest is known.
    """
    digest = 0
    for arg in args:
        for passed in _walk_passed(arg):
            digest = zlib.crc32(repr(passed).encode(), digest)
        for _, part in _walk(arg, ""):
            if not isinstance(part, list):
                digest = _digest(part, digest, is_whole)
            elif part:
                for item in part if is_whole else (part[0], part[-1]):
                    if isinstance(item, torch.Tensor | np.ndarray):
                        digest = _digest(item, digest, is_whole)
                    elif isinstance(item, str | bytes | int | float):
                        digest = zlib.crc32(repr(item).encode(), digest)
    return digest


def _refuse_graph(part: Any, name: str) -> None:
    if isinstance(part, torch.Tensor) and part.requires_grad:
        raise MismatchError(
            f"strategy.backward was given {name}, which requires a gradient.",
            why="each replica's backward would reach it by itself, on one worker, and its gradient would be a part.",
            do="pass it detached; or prepare it (strategy.prepare takes the optimizer that holds it) and close over it"
            " in the function.",
        )


def _digest(part: Any, digest: int, is_whole: bool) -> int:
    if isinstance(part, np.ndarray):
        return _digest_array(part, digest, is_whole)
    flat = part.reshape(-1)
    if not is_whole and len(flat) > _WORDS:
        flat = flat[:: len(flat) // _WORDS]
    return zlib.crc32(as_bytes(flat).cpu().numpy(), digest)


def _digest_array(part: np.ndarray, digest: int, is_whole: bool) -> int:
    flat = part.reshape(-1)
    if not is_whole and len(flat) > _WORDS:
        flat = flat[:: len(flat) // _WORDS]
    return zlib.crc32(np.ascontiguousarray(flat).tobytes(), digest)


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every part that is cut, with a name for messages. What can be neither cut nor passed is an error."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise _cannot_cut(value, name)
        if value.ndim:
            yield name, value
    elif isinstance(value, np.ndarray) and value.dtype != object:
        if value.ndim:
            yield name, value
    elif isinstance(value, list):
        yield name, value
    elif isinstance(value, tuple):
        keys = getattr(value, "_fields", None) or range(len(value))
        for key, part in zip(keys, value, strict=True):
            yield from _walk(part, f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), f"{name}.{field.name}")
    elif not (isinstance(value, _PASSED) or callable(value)):
        raise _cannot_cut(value, name)


def _walk_passed(value: Any) -> Iterator[Any]:
    """Yield every number and text that is passed unchanged. Those of other types are not compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if not value.ndim:
            yield value.item()
    elif isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _walk_passed(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _walk_passed(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk_passed(getattr(value, field.name))


def _kind(part: Any) -> str:
    if isinstance(part, list):
        return f"list of {len(part)}"
    return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}"


def _cannot_cut(value: Any, name: str) -> MismatchError:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind = "nested tensor" if value.is_nested else f"{value.layout} tensor"
    return MismatchError(
        f"strategy.backward cannot cut {name}: it is a {kind}.",
        why="tensors, arrays, lists, and tuples, dictionaries and dataclasses of them are cut by samples.",
        do=_DO,
    )
