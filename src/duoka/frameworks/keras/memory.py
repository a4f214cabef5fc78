"""Shared buffers by place and size: handed out once, and used again by every model that needs the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from duoka.collectives.collective import Buffer, Collective
from duoka.collectives.packing import Packing


class Memory:
    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._buffers: dict[tuple[int, int, np.dtype[Any]], Buffer] = {}

    def buffers(self, packing: Packing) -> list[Buffer]:
        found = []
        for place, (dtype, count) in enumerate(packing.sizes.items()):
            key = place, count, dtype
            if key not in self._buffers:
                self._buffers[key] = self._collective.buffer(count, dtype)
            found.append(self._buffers[key])
        return found
