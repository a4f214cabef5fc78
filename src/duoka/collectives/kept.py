"""What a worker keeps in its own memory: of its only replica, the slice that no other worker reads before the sum.

Without this, these numbers pass through memory three times more: into the slot, out of it to be added up, and as a sum
back into memory of the worker's own. A kept array is weighed and added up in pieces of the size of the cache, and is
the worker's part of the result afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from duoka.collectives.arrays import Array

Place = tuple[int, Array]  # where the array begins in the slot


@dataclass(frozen=True)
class Kept:
    replica: int
    own: slice  # of its slot: what this worker adds up
    arrays: Sequence[Place]  # flat, side by side or with gaps, from left to right; within the slice or beyond it
    weight: float  # of the numbers inside of the slice: they are written late. Those outside are in the slot
    owners: Sequence[Any]  # whose memory the arrays are

    def inside(self) -> Iterator[Place]:
        """The parts of the arrays in the slice. After the exchange they hold the sum."""
        for begin, array in self.arrays:
            yield from _cut(begin, array, max(begin, self.own.start), min(begin + array.size, self.own.stop))

    def outside(self) -> Iterator[Place]:
        """The parts of the arrays that other workers add up."""
        for begin, array in self.arrays:
            end = begin + array.size
            yield from _cut(begin, array, begin, min(end, self.own.start))
            yield from _cut(begin, array, max(begin, self.own.stop), end)


def _cut(begin: int, array: Array, low: int, high: int) -> Iterator[Place]:
    if low < high:
        yield low, array[low - begin : high - begin]
