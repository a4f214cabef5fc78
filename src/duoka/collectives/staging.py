"""Two sets of small mailslots, one per replica, used in turn.

Small numbers need only one meeting: everybody puts its own into the set of this call, meets the others,
and reads. A set is written again two calls later; by then everybody has come to the call in between, and so
has finished reading.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from duoka.collectives.arena import Arena, Bytes
from duoka.collectives.arrays import Array
from duoka.collectives.shadow import DIGEST_BYTES, Digest
from duoka.errors import MismatchError

SLOT_BYTES = 128 * 1024
NOTE_BYTES = 4096
_LENGTH = struct.Struct("<I")
LONGEST_NOTE = NOTE_BYTES - _LENGTH.size
_NUMBER = struct.Struct("<Q")
_DIGEST_BYTES = 64  # with its number


class Staging:
    def __init__(self, arena: Arena, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        set_bytes = num_replicas * SLOT_BYTES + num_replicas * (NOTE_BYTES + _DIGEST_BYTES)
        piece = arena.reserve(2 * set_bytes, "small messages")
        self._sets = [piece.bytes[parity * set_bytes : (parity + 1) * set_bytes] for parity in (0, 1)]
        self._digests_at = num_replicas * NOTE_BYTES  # one for each worker: there are no more of them
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

    def write_digest(self, number: int, worker: int, digest: Digest) -> None:
        """What a worker says of a replica that is compared in this call."""
        packed, start = _NUMBER.pack(number) + digest.pack(), self._digests_at + worker * _DIGEST_BYTES
        self._notes[number & 1][start : start + len(packed)] = packed

    def read_digests(self, number: int, workers: Sequence[int]) -> dict[int, Digest]:
        """Those of this call, by worker."""
        found, notes = {}, self._notes[number & 1]
        for worker in workers:
            start = self._digests_at + worker * _DIGEST_BYTES
            if _NUMBER.unpack_from(notes, start)[0] == number:
                packed = bytes(notes[start + _NUMBER.size : start + _NUMBER.size + DIGEST_BYTES])
                found[worker] = Digest.unpack(packed)
        return found


def check_note(note: bytes) -> None:
    if len(note) > LONGEST_NOTE:
        raise MismatchError(f"A note of {len(note)} bytes is too long: {LONGEST_NOTE} fit.")
