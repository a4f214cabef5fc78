"""Two sets of small mailslots, one per replica, used in turn.

Small numbers need only one meeting: everybody puts its own into the set of this call, meets the others,
and reads. A set is written again two calls later; by then everybody has come to the call in between, and so
has finished reading.
"""

from __future__ import annotations

import struct

import numpy as np

from duoka.collectives.arena import Arena, Bytes
from duoka.collectives.arrays import Array
from duoka.errors import MismatchError

SLOT_BYTES = 128 * 1024
NOTE_BYTES = 4096
_LENGTH = struct.Struct("<I")


class Staging:
    def __init__(self, arena: Arena, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        set_bytes = num_replicas * (SLOT_BYTES + NOTE_BYTES)
        piece = arena.reserve(2 * set_bytes, "small messages")
        self._sets = [piece.bytes[parity * set_bytes : (parity + 1) * set_bytes] for parity in (0, 1)]

    @property
    def wide_bytes(self) -> int:
        """How much one sender can hand to all in one call, through all slots together."""
        return self._num_replicas * SLOT_BYTES

    def wide(self, number: int) -> Bytes:
        return self._sets[number & 1][: self.wide_bytes]

    def slot(self, number: int, replica: int) -> Bytes:
        return self._sets[number & 1][replica * SLOT_BYTES : (replica + 1) * SLOT_BYTES]

    def array(self, number: int, replica: int, dtype: np.dtype, count: int) -> Array:
        return self.slot(number, replica)[: count * dtype.itemsize].view(dtype)

    def write_note(self, number: int, replica: int, note: bytes) -> None:
        if len(note) + _LENGTH.size > NOTE_BYTES:
            raise MismatchError(f"A note of {len(note)} bytes is too long: {NOTE_BYTES - _LENGTH.size} fit.")
        place = self._note(number, replica)
        place[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(note)), np.uint8)
        place[_LENGTH.size : _LENGTH.size + len(note)] = np.frombuffer(note, np.uint8)

    def read_note(self, number: int, replica: int) -> bytes:
        place = self._note(number, replica)
        (length,) = _LENGTH.unpack(place[: _LENGTH.size].tobytes())
        return place[_LENGTH.size : _LENGTH.size + length].tobytes()

    def _note(self, number: int, replica: int) -> Bytes:
        start = self.wide_bytes + replica * NOTE_BYTES
        return self._sets[number & 1][start : start + NOTE_BYTES]
