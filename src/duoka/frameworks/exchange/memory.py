"""Shared buffers by place and size: handed out once, and used again by every model that needs the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from duoka.collectives.arena import round_to_pages
from duoka.collectives.arrays import Array
from duoka.collectives.collective import Buffer, Collective
from duoka.collectives.packing import Packing


class Memory:
    def __init__(self, collective: Collective, name: str = "") -> None:
        """With a name, it does not matter in which order a worker comes to need buffers: one that joins later."""
        self._collective, self._name = collective, name
        self.places: list[Array] = []  # two that all workers see, used in turn by one who writes
        self.rooms: list[int] = []  # in bytes, that have been made
        self._buffers: dict[tuple[int, int, np.dtype[Any]], Buffer] = {}

    def buffers(self, packing: Packing) -> list[Buffer]:
        found = []
        for place, (dtype, count) in enumerate(packing.sizes.items()):
            key = place, count, dtype
            if key not in self._buffers:
                self._buffers[key] = self._collective.buffer(count, dtype, self._name and f"{self._name} {place}")
            found.append(self._buffers[key])
        return found

    def make_room(self, nbytes: int) -> None:
        """For so many bytes in each place, and some more: the next batch may be larger. All workers call it."""
        half = round_to_pages(nbytes + nbytes // 4)
        both = self._collective.common(2 * half)
        self.places = [both[:half], both[half:]]
        self.rooms.append(nbytes)

    def make_same_rooms(self, rooms: list[int]) -> None:
        """As another worker has made them: whoever asks for as many of the same size finds the same memory."""
        for nbytes in rooms[len(self.rooms) :]:
            self.make_room(nbytes)
