"""Before variables are trained for the first time: they are the same on all workers, or are made so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.frameworks.keras.agreement import hear_all
from duoka.frameworks.structure import raise_difference


def agree_on_variables(variables: Sequence[Any], collective: Collective) -> bool:
    """All workers take the values of the first one where they differ. True where something was taken."""
    if len(collective.workers) == 1:
        return False
    values = [np.array(variable) for variable in variables]
    lines = [f"{v.name}: {tuple(v.shape)} {v.dtype.name}" for v in variables]
    kinds = hashlib.sha256("\n".join(map(_without_name, lines)).encode()).digest()
    content = hashlib.sha256(b"".join(hashlib.sha256(value.tobytes()).digest() for value in values)).digest()
    notes = hear_all(collective, kinds + content, "of the variables before they are trained")
    if len({note[: len(kinds)] for note in notes}) > 1:
        raise_difference(lines, collective, compared=_without_name)
    if len(set(notes)) == 1:
        return False
    flat = np.concatenate([_bytes_of(value) for value in values])
    received, start, is_changed = collective.broadcast(flat), 0, False
    for variable, value in zip(variables, values, strict=True):
        part = received[start : start + value.nbytes]
        start += value.nbytes
        if part.tobytes() != value.tobytes():
            variable.assign(part.copy().view(value.dtype).reshape(value.shape))
            is_changed = True
    return is_changed


def _without_name(line: str) -> str:
    return line.rpartition(": ")[2]


def _bytes_of(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
