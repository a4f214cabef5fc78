"""Arrays as bytes with a header, cut to the size of what carries them."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.errors import MismatchError

_LENGTH = struct.Struct("<I")


def write_header(array: Array) -> bytes:
    """The type and shape of an array, as a receiver needs them."""
    is_bfloat16 = array.dtype.name == "bfloat16"
    if not is_bfloat16 and (array.dtype.kind not in "biufcSUmM" or not _is_known(array.dtype.str)):
        raise MismatchError(f"An array of {array.dtype} cannot be sent.", do="send numbers, or encode it as bytes.")
    return json.dumps({"dtype": "bfloat16" if is_bfloat16 else array.dtype.str, "shape": array.shape}).encode()


def _is_known(name: str) -> bool:
    """Types of other packages (8-bit floats) have names that NumPy does not read back."""
    try:
        return bool(np.dtype(name).str == name)
    except TypeError:
        return False


def read_header(header: bytes) -> Array:
    """An empty array of the type and shape that was announced."""
    fields = json.loads(header)
    return np.empty(fields["shape"], read_dtype(fields["dtype"]))


def read_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def put(place: Array, array: Array, start: int) -> None:
    """Write the part of an array that begins at this byte."""
    data = array.reshape(-1).view(np.uint8)[start : start + place.size]
    place[: data.size] = data


def get(place: Array, array: Array, start: int) -> None:
    """Read the part of an array that begins at this byte."""
    data = array.reshape(-1).view(np.uint8)[start : start + place.size]
    data[:] = place[: data.size]


def pack_array(array: Array) -> bytes:
    """An array of any type that can be sent, as bytes."""
    header = write_header(array)
    return _LENGTH.pack(len(header)) + header + np.ascontiguousarray(array).tobytes()


def unpack_array(data: bytes) -> Array:
    """
    >>> unpack_array(pack_array(np.arange(3)))
    array([0, 1, 2])
    """
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    array = read_header(data[_LENGTH.size : start])
    get(np.frombuffer(data, np.uint8)[start:], array, 0)
    return array
