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
LONGEST_NOTE = NOTE_BYTES - _LENGTH.size
_NUMBER = struct.Struct("<Q")
_NUM_TESTIMONIES = 2


class Staging:
    def __init__(self, arena: Arena, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        set_bytes = num_replicas * SLOT_BYTES + (num_replicas + _NUM_TESTIMONIES) * NOTE_BYTES
        piece = arena.reserve(2 * set_bytes, "small messages")
        self._sets = [piece.bytes[parity * set_bytes : (parity + 1) * set_bytes] for parity in (0, 1)]
        self._notes = [memoryview(part[self.wide_bytes :].data) for part in self._sets]

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
        if len(note) > LONGEST_NOTE:
            check_note(note)
        notes, start = self._notes[number & 1], replica * NOTE_BYTES
        _LENGTH.pack_into(notes, start, len(note))
        notes[start + _LENGTH.size : start + _LENGTH.size + len(note)] = note

    def read_note(self, number: int, replica: int) -> bytes:
        notes, start = self._notes[number & 1], replica * NOTE_BYTES
        (length,) = _LENGTH.unpack_from(notes, start)
        return bytes(notes[start + _LENGTH.size : start + _LENGTH.size + length])

    def write_testimony(self, number: int, place: int, digest: bytes) -> None:
        """What one of the two says who compute the same replica in this call."""
        self.write_note(number, self._num_replicas + place, _NUMBER.pack(number) + digest)

    def read_testimonies(self, number: int) -> dict[int, bytes]:
        """Those that belong to this call, by their places."""
        notes = {place: self.read_note(number, self._num_replicas + place) for place in range(_NUM_TESTIMONIES)}
        mine, start = _NUMBER.pack(number), _NUMBER.size
        return {place: note[start:] for place, note in notes.items() if note[:start] == mine}


def check_note(note: bytes) -> None:
    if len(note) > LONGEST_NOTE:
        raise MismatchError(f"A note of {len(note)} bytes is too long: {LONGEST_NOTE} fit.")
