"""Workers whose values differ: what each of them has, and bytes from those that are right. Losses are made up for."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.errors import WorkerLost

_WORKER = struct.Struct("<I")
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Rows:
    """What every worker has said, and which of them has spoken for which replica: the same on all workers."""

    of_worker: dict[int, Array]
    speakers: tuple[int, ...]  # by replica


def gather_rows(collective: Collective, row: Array, name: str) -> Rows:
    """Every worker's row of 64-bit numbers, equally many on all of them."""
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
    speakers = _read_speakers(exchange.notes)
    return Rows(dict(zip(speakers, rows, strict=True)), speakers)


def take_bytes(
    collective: Collective, data: Array, sources: Collection[int], speakers: Sequence[int], name: str
) -> Array:
    """The bytes of one of these workers, on all of them; `data` are this worker's own, equally many.

    Who gives them follows from what everybody has heard before, not from who seems to be alive here.
    """
    taken = np.empty_like(data)
    for start in range(0, len(data), _PIECE_BYTES):
        piece = slice(start, start + _PIECE_BYTES)
        taken[piece], speakers = _take_piece(collective, data[piece], sources, speakers, f"{name}, from byte {start},")
    return taken


def _take_piece(
    collective: Collective, data: Array, sources: Collection[int], speakers: Sequence[int], name: str
) -> tuple[Array, Sequence[int]]:
    buffer = collective.scratch(len(data), np.uint8)
    while True:
        giving = next((replica for replica, worker in enumerate(speakers) if worker in sources), None)
        if giving is None:
            raise WorkerLost(
                "The workers that had the right values were lost before they could pass them on.",
                do="start the run again: it goes on from the last checkpoint.",
            )
        exchange = collective.exchange([buffer], f"{name} as replica {giving} has it")
        exchange.carry_out(partial(_place, exchange, buffer, data, giving, collective.worker))
        taken = exchange.result(buffer).copy()
        exchange.release()
        speakers = _read_speakers(exchange.notes)
        if speakers[giving] in sources:  # otherwise it was lost, and one that has drifted has taken its place
            return taken, speakers


def _place(exchange: Exchange, buffer: Buffer, data: Array, giving: int, worker: int, replica: int) -> bytes:
    exchange.slot(buffer, replica)[:] = data if replica == giving else 0
    return _WORKER.pack(worker)


def _read_speakers(notes: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(int(_WORKER.unpack(note)[0]) for note in notes)
