"""Plain values as bytes, and back: JSON, with arrays beside it as they lie in memory. Never pickle."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np

from duoka.collectives.arrays import as_array
from duoka.errors import MismatchError

_LENGTH = struct.Struct("<Q")
_ARRAY = "__array__"
_DICTIONARY = "__dictionary__"


def encode(value: Any) -> bytes:
    """Numbers, strings, None, lists, tuples (as lists), dictionaries with string keys, arrays and CPU tensors.

    >>> decode(encode({"loss": 0.5, "weights": np.zeros(2)}))
    {'loss': 0.5, 'weights': array([0., 0.])}
    """
    blobs: list[bytes] = []

    def plain(part: Any) -> Any:
        if part is None or isinstance(part, (bool, int, str)):
            return part
        if isinstance(part, float):
            return part if math.isfinite(part) else {_ARRAY: ["<f8", [], put(np.asarray(part))], "scalar": True}
        if isinstance(part, (list, tuple)):
            return [plain(item) for item in part]
        if isinstance(part, dict):
            if not all(isinstance(key, str) for key in part):
                raise MismatchError("A dictionary with keys that are not strings cannot be sent.")
            items = {key: plain(item) for key, item in part.items()}
            return {_DICTIONARY: items} if _ARRAY in part or _DICTIONARY in part else items
        array = as_array(part)
        if array.dtype.kind not in "fiucb":
            raise MismatchError(
                f"A value of type {type(part).__name__} cannot be sent.",
                do="return numbers, strings, lists, dictionaries or arrays.",
            )
        return {
            _ARRAY: [array.dtype.str, list(array.shape), put(array)],
            "scalar": isinstance(part, np.generic),
        }

    def put(array: np.ndarray) -> int:
        blobs.append(array.tobytes())
        return len(blobs[-1])

    head = json.dumps(plain(value)).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *blobs])


def decode(data: bytes) -> Any:
    (length,) = _LENGTH.unpack_from(data)
    position = _LENGTH.size + length

    def rich(part: Any) -> Any:
        nonlocal position
        if isinstance(part, list):
            return [rich(item) for item in part]
        if isinstance(part, dict):
            if _ARRAY not in part:
                items = part.get(_DICTIONARY, part)
                return {key: rich(item) for key, item in items.items()}
            dtype, shape, nbytes = part[_ARRAY]
            array = np.frombuffer(data, dtype, nbytes // np.dtype(dtype).itemsize, position).reshape(shape).copy()
            position += nbytes
            return array[()] if part["scalar"] else array
        return part

    return rich(json.loads(data[_LENGTH.size : _LENGTH.size + length]))
