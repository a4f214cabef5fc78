"""Before variables are trained: they are the same on all workers, or are made so."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.frameworks.exchange.agreement import FirstWorker, hear_all
from duoka.frameworks.structure import raise_difference


def agree_on_values(
    lines: Sequence[str], values: Sequence[Array], collective: Collective, when: str, *, by_name: bool = False
) -> dict[int, Array]:
    """The first worker's values, by their places, where this worker has others. All workers call it.

    They may differ when the main worker alone has loaded weights. `lines` describe them, as "name: shape and type";
    with `by_name`, names have to be the same, too.
    """
    if len(collective.workers) == 1:
        return {}
    compared = str if by_name else _without_name
    kinds = hashlib.sha256("\n".join(map(compared, lines)).encode()).digest()
    content = np.array([zlib.crc32(_bytes_of(value).data) for value in values], np.uint32).tobytes()
    digest = kinds + hashlib.sha256(content).digest()
    notes = hear_all(collective, digest + str(collective.worker).encode(), f"of the variables {when}")
    if len({note[: len(kinds)] for note in notes}) > 1:
        raise_difference(lines, collective, compared=compared)
    if len({note[: len(digest)] for note in notes}) == 1:
        return {}
    first = FirstWorker(collective, must_be=int(notes[0][len(digest) :]))
    given = [first.give(value, f"of the first worker's variables {when}") for value in values]
    pairs = enumerate(zip(given, values, strict=True))
    return {place: new for place, (new, value) in pairs if new.tobytes() != value.tobytes()}


def _without_name(line: str) -> str:
    """A worker that has built other models before has counted on: dense_3 there may be dense here."""
    return line.rpartition(": ")[2]


def _bytes_of(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
