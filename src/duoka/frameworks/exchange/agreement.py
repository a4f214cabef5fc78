"""Small things that all workers must know of one another. A worker that is lost meanwhile is made up for."""

from __future__ import annotations

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective


def hear_all(collective: Collective, note: bytes, name: str) -> list[bytes]:
    """Every replica's note; one worker's replicas all say the same."""
    exchange = collective.exchange([], name)
    exchange.carry_out(lambda replica: note)
    return exchange.notes


def take_from_first(collective: Collective, data: Array, name: str) -> Array:
    """The bytes of the worker that runs replica 0: a few thousand, equally many on all workers."""
    buffer = collective.scratch(len(data), np.uint8)
    exchange = collective.exchange([buffer], name)

    def place(replica: int) -> bytes:
        exchange.slot(buffer, replica)[:] = data if replica == 0 else 0
        return b""

    exchange.carry_out(place)
    taken = exchange.result(buffer).copy()
    exchange.release()
    return taken
