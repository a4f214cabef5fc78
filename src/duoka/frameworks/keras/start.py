"""The start of a training: all workers have the same variables, with worker 0's values."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import keras
import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.keras.agreement import hear_all
from duoka.frameworks.structure import raise_difference


def variables_of(model: Any) -> list[Any]:
    """Weights, other state, the optimizer's slots: what a saved model would hold."""
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else [])]


def agree_on_start(model: Any, collective: Collective) -> None:
    """Compare the model between workers, and copy the first worker's values to all where they differ.

    They may, when the main worker alone has loaded weights.
    """
    if len(collective.workers) == 1:
        return
    variables = variables_of(model)
    values = [_read(variable) for variable in variables]
    lines = [f"{variable.path}: {tuple(variable.shape)} {variable.dtype}" for variable in variables]
    kinds = hashlib.sha256("\n".join(map(_without_name, lines)).encode()).digest()
    content = np.array([zlib.crc32(_bytes_of(value).data) for value in values], np.uint32).tobytes()
    notes = hear_all(
        collective, kinds + hashlib.sha256(content).digest(), "of the variables at the start of a training"
    )
    if len({note[: len(kinds)] for note in notes}) > 1:
        raise_difference(lines, collective, compared=_without_name)
    if len(set(notes)) > 1:
        _copy_from_first(variables, values, collective)


def _without_name(line: str) -> str:
    """A worker that has built other models before has counted on: dense_3 there may be dense here."""
    return line.rpartition(": ")[2]


def _copy_from_first(variables: list[Any], values: list[Array], collective: Collective) -> None:
    flat = np.concatenate([_bytes_of(value) for value in values])
    received = collective.broadcast(flat)
    start = 0
    for variable, value in zip(variables, values, strict=True):
        stop = start + value.nbytes
        new = received[start:stop].copy().view(value.dtype).reshape(value.shape)
        if new.tobytes() != value.tobytes():
            variable.assign(new)
        start = stop


def _read(variable: Any) -> Array:
    try:
        return as_array(variable.value)
    except MismatchError:  # on another device
        return np.asarray(keras.ops.convert_to_numpy(variable.value))


def _bytes_of(value: Array) -> Array:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
