"""Before variables are trained: they are the same on all workers, or are made so."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.frameworks.exchange.agreement import hear_all
from duoka.frameworks.structure import raise_difference


def agree_on_values(
    lines: Sequence[str], values: Sequence[Array], collective: Collective, when: str
) -> dict[int, Array]:
    """The first worker's values, by their places, where this worker has others. All workers call it.

    They may differ when the main worker alone has loaded weights. `lines` describe them, as "name: shape and type".
    """
    if len(collective.workers) == 1:
        return {}
    kinds = hashlib.sha256("\n".join(map(_without_name, lines)).encode()).digest()
    content = np.array([zlib.crc32(_bytes_of(value).data) for value in values], np.uint32).tobytes()
    notes = hear_all(collective, kinds + hashlib.sha256(content).digest(), f"of the variables {when}")
    if len({note[: len(kinds)] for note in notes}) > 1:
        raise_difference(lines, collective, compared=_without_name)
    if len(set(notes)) == 1:
        return {}
    received = collective.broadcast(np.concatenate([_bytes_of(value) for value in values]))
    others, start = {}, 0
    for place, value in enumerate(values):
        new = received[start : start + value.nbytes].copy().view(value.dtype).reshape(value.shape)
        start += value.nbytes
        if new.tobytes() != value.tobytes():
            others[place] = new
    return others


def _without_name(line: str) -> str:
    """A worker that has built other models before has counted on: dense_3 there may be dense here."""
    return line.rpartition(": ")[2]


def _bytes_of(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
