"""Shadow computation: juniors compute a replica of an original worker, too, and the bits are compared.

A replacement worker has the state of the run, and not what the script keeps without registering it: a counter that
anneals a loss, an averaged teacher. Gradients that depend on that would differ, and nothing else would show it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from duoka.collectives.arrays import Array

_HEADER = struct.Struct("<I??")  # the replica, whether its owner says it, whether it had samples
DIGEST_BYTES = _HEADER.size + 32


class _Slots(Protocol):
    dtype: np.dtype[Any]
    count: int

    def slot(self, replica: int) -> Array: ...


@dataclass(frozen=True)
class Shadow:
    replica: int
    owner: int  # an original worker, whose numbers count
    juniors: tuple[int, ...]  # they compute this replica, without handing it in


@dataclass(frozen=True)
class Digest:
    """What one worker has written for the replica of a shadow computation."""

    replica: int
    is_owner: bool
    is_something: bool  # a replica without samples says nothing about anybody
    sha256: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(self.replica, self.is_owner, self.is_something) + self.sha256

    @classmethod
    def unpack(cls, packed: bytes) -> Digest:
        replica, is_owner, is_something = _HEADER.unpack_from(packed)
        return cls(replica, is_owner, is_something, packed[_HEADER.size : DIGEST_BYTES])


def compare(digests: Mapping[int, Digest]) -> tuple[list[int], list[int]]:
    """The juniors whose bits are those of the owner, and those whose bits differ. Others have not been compared."""
    owners = {digest.replica: digest for digest in digests.values() if digest.is_owner}
    compared = {w: d for w, d in digests.items() if not d.is_owner and d.replica in owners}
    differing = [w for w, d in compared.items() if d.sha256 != owners[d.replica].sha256]
    return [w for w, d in compared.items() if w not in differing and d.is_something], differing


class Shadowing:
    """One worker's part in a shadow computation, in one exchange."""

    def __init__(self, worker: int, shadow: Shadow, buffers: Sequence[_Slots]) -> None:
        self._worker, self._shadow, self._buffers = worker, shadow, buffers
        self._is_cleared = worker == shadow.owner
        self._slots: dict[int, Array] = {}
        self.digest: Digest | None = None
        if self._is_cleared:
            # Between the arrays of a slot there may be gaps, with what an earlier step has left in them.
            for buffer in buffers:
                buffer.slot(shadow.replica)[:] = 0

    def is_shadow(self, replica: int, own: Sequence[int]) -> bool:
        """Whether this worker computes this replica for comparison only: it may have inherited it since."""
        return self._worker in self._shadow.juniors and replica == self._shadow.replica and replica not in own

    def awaited(self, own: Sequence[int]) -> tuple[int, ...]:
        replica = self._shadow.replica
        return (replica,) if self.digest is None and self.is_shadow(replica, own) else ()

    def slot(self, buffer: _Slots) -> Array:
        """Where a junior writes what is compared: memory of its own."""
        if id(buffer) not in self._slots:
            self._slots[id(buffer)] = np.zeros(buffer.count, buffer.dtype)
        return self._slots[id(buffer)]

    def take(self, replica: int, own: Sequence[int], common: bytes) -> bool:
        """A replica has been computed: digest it, if it is compared. True: it is not to be handed in.

        `common`: what its note has in common with those of all replicas.
        """
        is_shadow = self.is_shadow(replica, own)
        if is_shadow or (self._is_cleared and replica == self._shadow.replica):
            slots = [self.slot(buffer) if is_shadow else buffer.slot(replica) for buffer in self._buffers]
            self.digest = _digest(replica, not is_shadow, slots, common)
            self._slots.clear()
        return is_shadow


def tell_other_bits(owner: int) -> str:
    return f"computed other gradients than worker {owner} from the same samples and weights"


def _digest(replica: int, is_owner: bool, slots: Iterable[Array], common: bytes) -> Digest:
    sha, is_anything = hashlib.sha256(common), False
    for slot in slots:
        sha.update(slot.view(np.uint8).data)
        is_anything = is_anything or bool(slot.any())
    return Digest(replica, is_owner, is_anything, sha.digest())
