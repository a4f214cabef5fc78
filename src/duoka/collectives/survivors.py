"""Values that each worker alone has, made known to all; after a loss, what the survivors still know of them.

The plain calls of a collective end in an error when a worker is lost in them. These go on: what the lost worker would
have given is left out, on all survivors alike, and they are told whose it was.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from duoka.collectives.arrays import Array, deliver, sum_dtype, weigh
from duoka.collectives.collective import Collective
from duoka.collectives.staging import SLOT_BYTES
from duoka.topology.tree import Node, fold

_WEIGHT = struct.Struct("<?d")
_LENGTH = struct.Struct("<?Q")
_LONGEST_INLINE = 3000  # bytes that travel in a note, which holds 4 KB
_LEAST_PIECE = 8 * 1024


@dataclass(frozen=True)
class Known:
    """The answer, and the replicas that are not in it because they were lost with their worker."""

    value: Array
    lost: tuple[int, ...] = ()


def add_up(
    collective: Collective, values: Mapping[int, Array], weights: Mapping[int, float | None], *, is_mean: bool
) -> Known:
    """The sum, or the weighted mean, of what the replicas give, in tree order.

    `values` are those of this worker's own replicas, all of one type and shape; without a weight one is taken as it is.
    """
    like = next(iter(values.values()))
    flat = {replica: value.reshape(-1) for replica, value in values.items()}
    total = np.empty(like.size, sum_dtype(like.dtype))
    name = f"{'mean' if is_mean else 'sum'} of {like.dtype}{list(like.shape)}"
    step = SLOT_BYTES // total.itemsize
    while True:
        starts = range(0, max(1, total.size), step)
        notes = {_add_piece(collective, flat, weights, total[n : n + step], n, name) for n in starts}
        if len(notes) == 1:
            break  # else a worker was lost between two pieces: once more, wholly without it
    told = [_WEIGHT.unpack(note) for note in notes.pop()]
    target = np.empty(like.shape, like.dtype)
    divisor = _add_weights([weight for _, weight in told]) if is_mean else None
    deliver(total.reshape(like.shape), target, divisor)
    return Known(target, tuple(replica for replica, (is_given, _) in enumerate(told) if not is_given))


def _add_piece(
    collective: Collective,
    values: Mapping[int, Array],
    weights: Mapping[int, float | None],
    total: Array,
    start: int,
    name: str,
) -> tuple[bytes, ...]:
    """Small enough for one meeting: sums of larger ones may have been begun with a value that then is left out."""
    buffer = collective.scratch(total.size, total.dtype)
    exchange = collective.exchange([buffer], f"{name}, from {start}")

    def place(replica: int) -> bytes:
        if replica not in values:
            exchange.slot(buffer, replica)[:] = 0
            return _WEIGHT.pack(False, 0.0)
        weight = weights[replica]
        weigh(values[replica][start : start + total.size], weight, exchange.slot(buffer, replica))
        return _WEIGHT.pack(True, 1.0 if weight is None else weight)

    exchange.carry_out(place)
    total[:] = exchange.result(buffer)
    exchange.release()
    return tuple(exchange.notes)


def _add_weights(weights: list[float]) -> float:
    leaves = tuple(Node(replica, replica + 1) for replica in range(len(weights)))
    return fold(len(weights), leaves, weights, lambda left, right: left + right)


def gather(collective: Collective, values: Mapping[int, bytes], name: str) -> list[bytes | None]:
    """Every replica's bytes, in order; None for what was lost. `values` are those of this worker's own replicas."""
    exchange = collective.exchange([], f"gather {name}")

    def announce(replica: int) -> bytes:
        data = values.get(replica)
        if data is None:
            return _LENGTH.pack(False, 0)
        return _LENGTH.pack(True, len(data)) + (data if len(data) <= _LONGEST_INLINE else b"")

    exchange.carry_out(announce)
    heads = [_LENGTH.unpack_from(note) for note in exchange.notes]
    inline = [note[_LENGTH.size :] for note in exchange.notes]
    lengths = [length for _, length in heads]
    if max(lengths) <= _LONGEST_INLINE:
        return [data if is_given else None for (is_given, _), data in zip(heads, inline, strict=True)]
    parts = _Parts(collective, values, lengths)
    for start in range(0, max(lengths), parts.piece):
        parts.take(start, name)
    return parts.known()


class _Parts:
    """Long values, piece by piece: in each exchange all replicas' pieces lie side by side."""

    def __init__(self, collective: Collective, values: Mapping[int, bytes], lengths: list[int]) -> None:
        self._collective, self._values = collective, values
        self._arrays = [np.empty(length, np.uint8) for length in lengths]
        self._lost: set[int] = set()
        self.piece = max(SLOT_BYTES // collective.num_replicas, _LEAST_PIECE)

    def take(self, start: int, name: str) -> None:
        piece = self.piece
        buffer = self._collective.scratch(piece * self._collective.num_replicas, np.uint8)
        exchange = self._collective.exchange([buffer], f"gather {name}, from byte {start}")

        def place(replica: int) -> bytes:
            slot = exchange.slot(buffer, replica)
            slot[:] = 0
            if replica not in self._values:
                return b"lost"
            data = np.frombuffer(self._values[replica], np.uint8)[start : start + piece]
            slot[replica * piece : replica * piece + len(data)] = data
            return b""

        exchange.carry_out(place)
        result = exchange.result(buffer)
        for replica, (array, note) in enumerate(zip(self._arrays, exchange.notes, strict=True)):
            own = array[start : start + piece]
            own[:] = result[replica * piece : replica * piece + len(own)]
            if note:
                self._lost.add(replica)
        exchange.release()

    def known(self) -> list[bytes | None]:
        return [None if replica in self._lost else array.tobytes() for replica, array in enumerate(self._arrays)]
