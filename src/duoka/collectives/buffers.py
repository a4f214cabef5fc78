"""Shared buffers of the large kind: a slot per replica, and the result in the slots themselves.

The workers share the work by slices. Slice i is added up by the worker that runs the first replica of
share i, its *home*, and the sum is written over the home's own slice: nobody else reads that part of
that slot, and no line of memory is fetched only to be overwritten (a separate result costs 40 % more
time at 100 MB). The finished slices, which lie in different slots, are mapped side by side as the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from duoka.collectives.arena import PAGE, Arena, round_to_pages
from duoka.collectives.arrays import Array, add, weigh
from duoka.collectives.collective import Buffer
from duoka.collectives.kept import Kept
from duoka.errors import MismatchError
from duoka.topology.placement import Placement
from duoka.topology.tree import Node, additions

# Sums of more than two parts go through pieces of this size, so that what lies between stays in the cache.
_PIECE_BYTES = 256 * 1024


class SharedBuffer(Buffer):
    def __init__(self, arena: Arena, num_replicas: int, count: int, dtype: Any, name: str = "") -> None:
        if count < 0:
            raise MismatchError(f"A buffer of {count} numbers.", do="use a count of 0 or more.")
        self.dtype = np.dtype(dtype)
        self._num_replicas = num_replicas
        self._capacity = count
        self._stride = max(PAGE, round_to_pages(count * self.dtype.itemsize))
        purpose = f"{count:,} x {self.dtype} x {num_replicas} replicas{f' ({name})' if name else ''}"
        self._piece = arena.reserve(num_replicas * self._stride, purpose)
        self._scratch: list[Array] = []
        self.last_exchange = 0
        self.count = -1
        self.use(count)

    def use(self, count: int) -> SharedBuffer:
        """From the next exchange on, only so many numbers count."""
        assert count <= self._capacity
        if count == self.count:
            return self  # mapping the slices side by side anew costs as much as a copy
        self.count = count
        self.nbytes = count * self.dtype.itemsize
        # Compared between workers: buffers of one size that were not made in the same order lie elsewhere.
        self.title = f"{self.dtype}[{count}]@{self._piece.offset}"
        self._slots = [self._piece.array(self.dtype, count, r * self._stride) for r in range(self._num_replicas)]
        self._results: dict[tuple[int, ...], Array] = {}
        return self

    def slot(self, replica: int) -> Array:
        return self._slots[replica]

    def add(self, into: Node, other: Node) -> None:
        """The sum of two subtrees, in the slot of the left one."""
        left, right = self._slots[into.start], self._slots[other.start]
        add(left, right, out=left)

    def reduce_slice(self, placement: Placement, homes: Sequence[int], home: int, kept: Kept | None = None) -> None:
        """Add up this home's slice of all partial sums, over the home's own slice. `kept`: what is not in it yet."""
        own = self.slice_of(homes, home)
        nodes, stop = placement.partials, own.stop
        if len(nodes) == 1:
            return
        # From the end: what was computed last, and may lie in the cache, stands at the start.
        for begin, array in reversed(list(kept.inside()) if kept is not None and kept.replica == home else []):
            assert kept is not None
            self._reduce_range(nodes, begin + array.size, stop, home)
            self._reduce_kept(nodes, begin, array, kept.weight, home)
            stop = begin
        self._reduce_range(nodes, own.start, stop, home)

    def _reduce_kept(self, nodes: tuple[Node, ...], begin: int, array: Array, weight: float, home: int) -> None:
        step = _PIECE_BYTES // self.dtype.itemsize
        for start in reversed(range(0, array.size, step)):
            piece = array[start : start + step]
            place = slice(begin + start, begin + start + piece.size)
            slot = self._slots[home][place]
            with np.errstate(all="ignore"):
                weigh(piece, weight, slot)
            self._reduce_range(nodes, place.start, place.stop, home)
            piece[:] = slot

    def _reduce_range(self, nodes: tuple[Node, ...], start: int, stop: int, home: int) -> None:
        if len(nodes) == 2:
            left, right = (self._slots[node.start][start:stop] for node in nodes)
            add(left, right, out=self._slots[home][start:stop])
            return
        step = _PIECE_BYTES // self.dtype.itemsize
        for begin in range(start, stop, step):
            self._reduce_piece(nodes, slice(begin, min(begin + step, stop)), home)

    def _reduce_piece(self, nodes: tuple[Node, ...], piece: slice, home: int) -> None:
        parts = [self._slots[node.start][piece] for node in nodes]
        scratch = [part[: piece.stop - piece.start] for part in self._scratches()]
        *inner, last = additions(self._num_replicas, nodes)
        # An inner sum is kept in scratch. It is written over one of its own terms when that is scratch already.
        mine: dict[int, Array] = {}
        for left, right in inner:
            target = mine.get(left)
            if target is None:
                target = mine.pop(right) if right in mine else scratch.pop()
            add(parts[left], parts[right], out=target)
            if right in mine:
                scratch.append(mine.pop(right))
            parts[left] = mine[left] = target
        left, right = last
        add(parts[left], parts[right], out=self._slots[home][piece])

    def _scratches(self) -> list[Array]:
        if not self._scratch:
            depth = self._num_replicas.bit_length() + 1
            size = _PIECE_BYTES // self.dtype.itemsize
            self._scratch = [np.empty(size, self.dtype) for _ in range(depth)]
        return self._scratch

    def result(self, homes: Sequence[int]) -> Array:
        """The slices of all homes as one array. Made once per dealing of replicas."""
        key = tuple(homes)
        if key not in self._results:
            self._results.clear()
            ranges = []
            for position, home in enumerate(homes):
                begin, end = self._page_range(len(homes), position)
                if end > begin:
                    ranges.append((home * self._stride + begin, end - begin))
            result = self._piece.stitch(ranges)[: self.nbytes].view(self.dtype)
            result.flags.writeable = False  # it is everybody's
            self._results[key] = result
        return self._results[key]

    def slice_of(self, homes: Sequence[int], home: int) -> slice:
        """What the worker of this home adds up."""
        begin, end = self._page_range(len(homes), list(homes).index(home))
        size = self.dtype.itemsize
        return slice(min(begin // size, self.count), min(end // size, self.count))

    def _page_range(self, parts: int, position: int) -> tuple[int, int]:
        pages = max(PAGE, round_to_pages(self.nbytes)) // PAGE
        return pages * position // parts * PAGE, pages * (position + 1) // parts * PAGE
