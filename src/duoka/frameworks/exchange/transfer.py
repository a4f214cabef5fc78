"""An outcome on its way: into a replica's slots, weighted by its rows, and out of the sums."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Buffer, Collective, Exchange
from duoka.collectives.packing import Kind, Packing
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.outcome import Outcome, Slices, Total


@dataclass(frozen=True)
class SlicesKind:
    """Slices travel as they are, each replica's behind the one's before it: merged ones would be clipped differently.

    So that everybody knows where they go, there must be the same number of them for every row.
    """

    entries_per_row: int
    row: Kind
    index_dtype: np.dtype


class Transfer:
    """One step's numbers between an `Outcome` and an exchange. The first outcome shows what has to travel."""

    def __init__(self, collective: Collective, memory: Memory, first: Outcome, num_rows: int, total_rows: int) -> None:
        self._collective = collective
        self._num_replicas = collective.num_replicas
        self._total_rows = total_rows
        self._dense_at = [n for n, part in enumerate(first.gradients) if not isinstance(part, Slices)]
        self._slices = {
            n: _kind_of_slices(part, num_rows) for n, part in enumerate(first.gradients) if isinstance(part, Slices)
        }
        self._counts = len(self._dense_at), len(first.moving), len(first.logs), len(first.metrics)
        self._packing = Packing.of(self._summed(first))
        self._other_kinds = [Kind.of(part) for part in first.others]
        self._other_bytes = sum(kind.size * kind.dtype.itemsize for kind in self._other_kinds)
        self._slices_packing = Packing(
            [
                kind
                for slices in self._slices.values()
                for kind in (
                    Kind(slices.index_dtype, (slices.entries_per_row * total_rows,)),
                    Kind(slices.row.dtype, (slices.entries_per_row * total_rows, *slices.row.shape)),
                )
            ]
        )
        self._fixed = memory.buffers(self._packing)
        if self._other_bytes:
            self._fixed += memory.buffers(Packing([Kind(np.dtype(np.uint8), (self._other_bytes,))]))
        self._buffers: list[Buffer] = []
        # Equal where the same things travel.
        self._digest = zlib.crc32(repr((self._packing.digest, self._slices_packing.digest, self._other_bytes)).encode())
        self._views: dict[int, list[Array]] = {}  # of the fixed slots, by replica

    def open(self, name: str, *, is_tried: bool = False) -> Exchange:
        """Begin an exchange; the name is compared between workers, and with it what travels."""
        sizes = self._slices_packing.sizes.items()
        self._buffers = [*self._fixed, *(self._collective.scratch(count, dtype) for dtype, count in sizes)]
        exchange = self._collective.exchange(self._buffers, f"{name}, contents {self._digest:08x},")
        if is_tried:
            exchange.compare_juniors()
        return exchange

    def _summed(self, outcome: Outcome) -> list[Array]:
        dense: list[Array] = []
        for n in self._dense_at:
            part = outcome.gradients[n]
            assert not isinstance(part, Slices)
            dense.append(part)
        return [*dense, *outcome.moving, *outcome.logs, *outcome.metrics]

    # In.

    def write(self, exchange: Exchange, replica: int, outcome: Outcome, num_rows: int) -> None:
        """Gradients, moving state and logs are weighted by rows; metrics are sums; other state is replica 0's."""
        weight = num_rows / self._total_rows
        flats, others, scratch = self._slots(exchange, replica)
        arrays = self._summed(outcome)
        num_weighted = len(arrays) - len(outcome.metrics)
        for n, (slot, array) in enumerate(zip(self._views_of(exchange, replica, flats), arrays, strict=True)):
            if n < num_weighted:
                np.multiply(array, weight, out=slot, dtype=slot.dtype, casting="same_kind")
            else:
                np.copyto(slot, array)
        if self._other_bytes:
            others[:] = _bytes_of(outcome.others) if replica == 0 else 0
        places = self._slices_packing.views(scratch)
        rows = share(self._total_rows, self._num_replicas, replica)
        for place, (n, kind) in enumerate(self._slices.items()):
            part = outcome.gradients[n]
            assert isinstance(part, Slices)
            indices, values = places[2 * place], places[2 * place + 1]
            start, stop = rows.start * kind.entries_per_row, rows.stop * kind.entries_per_row
            for array in (indices, values):
                array[:start], array[stop:] = 0, 0
            if len(part.indices) != stop - start:
                raise _uneven(len(part.indices), num_rows)
            indices[start:stop] = part.indices
            np.multiply(part.values, weight, out=values[start:stop], dtype=values.dtype, casting="same_kind")

    def _views_of(self, exchange: Exchange, replica: int, flats: Sequence[Array]) -> list[Array]:
        if exchange.is_shadow(replica):
            return self._packing.views(flats)
        if replica not in self._views:
            self._views[replica] = self._packing.views(flats)
        return self._views[replica]

    def write_nothing(self, exchange: Exchange, replica: int) -> None:
        """For a replica without rows: left out of every sum."""
        flats, others, scratch = self._slots(exchange, replica)
        for flat in (*flats, *scratch):
            flat[:] = 0
        if self._other_bytes:
            others[:] = 0

    def _slots(self, exchange: Exchange, replica: int) -> tuple[list[Array], Array, list[Array]]:
        slots = [exchange.slot(buffer, replica) for buffer in self._buffers]
        return self._split(slots)

    def _split(self, flats: Sequence[Array]) -> tuple[list[Array], Array, list[Array]]:
        num_summed = len(self._packing.sizes)
        others = flats[num_summed] if self._other_bytes else np.empty(0, np.uint8)
        return list(flats[:num_summed]), others, list(flats[len(self._fixed) :])

    # Out.

    def read(self, exchange: Exchange) -> Total:
        flats, others, scratch = self._split([exchange.result(buffer) for buffer in self._buffers])
        places = self._slices_packing.views([flat.copy() for flat in scratch])
        slices = [
            Slices(indices, values if values.dtype == kind.row.dtype else values.astype(kind.row.dtype))
            for indices, values, kind in zip(places[::2], places[1::2], self._slices.values(), strict=True)
        ]
        return Total(self._packing, [flat.copy() for flat in flats], slices, self._read_others(others), self._counts)

    def _read_others(self, data: Array) -> list[Array]:
        arrays, start = [], 0
        for kind in self._other_kinds:
            stop = start + kind.size * kind.dtype.itemsize
            # Copied: an array of another type must begin at a multiple of its size.
            arrays.append(data[start:stop].copy().view(kind.dtype).reshape(kind.shape))
            start = stop
        return arrays


def digest_of(arrays: Sequence[Array]) -> int:
    return zlib.crc32(_bytes_of(arrays).data)


def _bytes_of(arrays: Sequence[Array]) -> Array:
    return np.concatenate(
        [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays] or [np.empty(0, np.uint8)]
    )


def _kind_of_slices(part: Slices, num_rows: int) -> SlicesKind:
    if len(part.indices) % num_rows:
        raise _uneven(len(part.indices), num_rows)
    row = Kind(part.values.dtype, tuple(part.values.shape[1:]))
    return SlicesKind(len(part.indices) // num_rows, row, part.indices.dtype)


def _uneven(num_entries: int, num_rows: int) -> MismatchError:
    return MismatchError(
        f"A sparse gradient of {num_rows} rows has {num_entries} entries.",
        why="the rows of a batch must look up equally many entries of a table, so that everybody knows their places.",
        do="pad the rows of a batch to one length.",
    )
