"""A global batch as bytes: a header in JSON that tells its structure, and the arrays as they lie in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.transfer import read_dtype, write_header
from duoka.errors import MismatchError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64  # what XLA wants, to use memory where it lies


class Message:
    """What it takes to send a batch. Text, objects, and arrays that are not dense cannot be sent: MismatchError."""

    def __init__(self, batch: Any) -> None:
        self._arrays: list[tuple[int, Array]] = []  # with their places behind the header
        self._data_bytes = 0
        self._header = json.dumps(self._describe(batch), allow_nan=False).encode()
        self._start = _align(_LENGTH.size + len(self._header))
        self.nbytes = self._start + self._data_bytes

    def _describe(self, part: Any) -> Any:
        if part is None or hasattr(part, "has_value"):  # what TensorFlow has instead of None
            return None
        if type(part) in (tuple, list):
            return [type(part).__name__, [self._describe(item) for item in part]]
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return ["dict", [[key, self._describe(item)] for key, item in part.items()]]
        return ["array", *self._add(part)]

    def _add(self, leaf: Any) -> tuple[str, list[int], int]:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise MismatchError(f"A batch holds a {type(leaf).__name__}, which cannot be sent.")
        array = as_array(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
        fields = json.loads(write_header(array))
        if array.dtype.kind in "SUO":
            raise MismatchError(f"A batch holds text ({array.dtype}), which cannot be sent.")
        place = self._data_bytes
        self._arrays.append((place, array))
        self._data_bytes = _align(place + array.nbytes)
        return fields["dtype"], fields["shape"], place

    def write(self, place: Array) -> None:
        _LENGTH.pack_into(place.data, 0, len(self._header))
        place[_LENGTH.size : _LENGTH.size + len(self._header)] = np.frombuffer(self._header, np.uint8)
        for start, array in self._arrays:
            np.copyto(_view(place, self._start + start, array.dtype, array.shape), array)


def read_message(place: Array, make: Callable[[Array], Any] = lambda array: array) -> Any:
    """The batch, made of arrays that lie where they were written."""
    (length,) = _LENGTH.unpack_from(place.data)
    begin = _align(_LENGTH.size + length)

    def build(node: Any) -> Any:
        if node is None:
            return None
        kind, *rest = node
        if kind == "array":
            dtype, shape, start = rest
            return make(_view(place, begin + start, read_dtype(dtype), tuple(shape)))
        (items,) = rest
        if kind == "dict":
            return {key: build(item) for key, item in items}
        return (tuple if kind == "tuple" else list)(build(item) for item in items)

    return build(json.loads(place[_LENGTH.size : _LENGTH.size + length].tobytes()))


def _view(place: Array, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return place[start : start + nbytes].view(dtype).reshape(shape)


def _align(position: int) -> int:
    return position + -position % _ALIGNMENT_BYTES
