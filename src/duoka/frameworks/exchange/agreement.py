"""Small things that all workers must know of one another. A worker that is lost meanwhile is made up for."""

from __future__ import annotations

import struct

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.collectives.staging import SLOT_BYTES
from duoka.errors import WorkerLost

_WORKER = struct.Struct("<I")


def hear_all(collective: Collective, note: bytes, name: str) -> list[bytes]:
    """Every replica's note; one worker's replicas all say the same."""
    exchange = collective.exchange([], name)
    exchange.carry_out(lambda replica: note)
    return exchange.notes


def gather_rows(collective: Collective, row: Array, name: str) -> dict[int, Array]:
    """Each worker's row of 64-bit numbers, equally many on all of them; of workers with replicas."""
    buffer = collective.scratch(collective.num_replicas * len(row), np.uint64)
    exchange = collective.exchange([buffer], name)

    def place(replica: int) -> bytes:
        slot = exchange.slot(buffer, replica)
        slot[:] = 0
        slot.reshape(-1, len(row))[replica] = row
        return _WORKER.pack(collective.worker)

    exchange.carry_out(place)
    rows = exchange.result(buffer).reshape(-1, len(row)).copy()
    exchange.release()
    workers = [int(_WORKER.unpack(note)[0]) for note in exchange.notes]
    return dict(sorted(zip(workers, rows, strict=True), key=lambda each: each[0]))


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


class FirstWorker:
    """The worker that runs replica 0 gives arrays of any size to all, piece by piece.

    With `must_be`, that worker and no other: when it is lost on the way, all of them raise the same error.
    """

    def __init__(self, collective: Collective, must_be: int | None = None) -> None:
        self._collective = collective
        self._must_be = must_be

    def give(self, array: Array, name: str) -> Array:
        """Its array, on every worker; all of them have one of that type and shape."""
        mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        taken = np.empty_like(mine)
        while True:
            senders = {
                self._give_piece(mine[start : start + SLOT_BYTES], taken[start : start + SLOT_BYTES], name)
                for start in range(0, len(mine), SLOT_BYTES)
            }
            if len(senders) <= 1:
                return taken.view(array.dtype).reshape(array.shape)

    def _give_piece(self, data: Array, taken: Array, name: str) -> int:
        """Small enough for one meeting, so that it comes from one worker; says from which."""
        buffer = self._collective.scratch(len(data), np.uint8)
        exchange = self._collective.exchange([buffer], name)

        def place(replica: int) -> bytes:
            exchange.slot(buffer, replica)[:] = data if replica == 0 else 0
            return str(self._collective.worker).encode()

        exchange.carry_out(place)
        taken[:] = exchange.result(buffer)
        exchange.release()
        sender = int(exchange.notes[0])
        if self._must_be not in (None, sender):
            raise WorkerLost(
                f"Worker {self._must_be} was lost while it gave its values to the others ({name}).",
                why="the workers had different values, and its own are those that count.",
                do="start again; where every worker loads the same values, nothing has to be given.",
            )
        return sender
