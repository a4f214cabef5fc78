"""A batch as bytes, and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from duoka.errors import MismatchError
from duoka.frameworks.keras.message import Message, read_message


def through(batch):
    message = Message(batch)
    place = np.full(message.nbytes, 255, np.uint8)
    message.write(place)
    return read_message(place), place


def test_structure_types_and_bits_come_through():
    floats = np.arange(12, dtype="float32").reshape(3, 4)[:, ::2]
    floats[0, 0] = np.nan
    batch = (
        {"b": floats, "a": [np.zeros((3, 0)), None]},
        np.array(7),
        (np.array([True, False]), np.ones(3, ml_dtypes.bfloat16)),
    )
    found, _ = through(batch)
    assert list(found[0]) == ["b", "a"]
    assert [type(part) for part in found] == [dict, np.ndarray, tuple]
    assert found[0]["a"][1] is None
    pairs = [
        (found[0]["b"], floats),
        (found[0]["a"][0], batch[0]["a"][0]),
        (found[1], batch[1]),
        (found[2][0], batch[2][0]),
        (found[2][1], batch[2][1]),
    ]
    for ours, expected in pairs:
        assert (ours.dtype, ours.shape, ours.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_arrays_lie_where_they_were_written():
    found, place = through((np.ones(3, "uint8"), np.ones(5)))
    assert all(np.shares_memory(array, place) for array in found)
    assert all((array.ctypes.data - place.ctypes.data) % 64 == 0 for array in found)


@pytest.mark.parametrize(
    "leaf", [np.array(["text"]), np.array([b"text"]), np.array([{}], object), "text", 3, {1: np.ones(2)}]
)
def test_what_cannot_be_sent_is_refused(leaf):
    with pytest.raises(MismatchError):
        Message((np.ones(2), leaf))
