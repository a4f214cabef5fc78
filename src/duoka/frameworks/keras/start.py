"""The start of a training: all workers have the same variables, with worker 0's values."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError


def variables_of(model: Any) -> list[Any]:
    """Weights, other state, the optimizer's slots: what a saved model would hold."""
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else [])]


def agree_on_start(model: Any, collective: Collective) -> None:
    """Compare the structure of the model between workers, then copy the first worker's values to all."""
    if len(collective.workers) == 1:
        return
    variables = variables_of(model)
    lines = "\n".join(f"{tuple(variable.shape)} {variable.dtype}" for variable in variables)
    mine = np.frombuffer(hashlib.sha256(lines.encode()).digest(), np.uint8)
    if len({bytes(part) for part in collective.all_gather([mine] * len(collective.replicas))}) > 1:
        raise MismatchError(
            f"The workers built different models: here it has {len(variables)} variables.",
            why="the script made choices that differ between workers.",
            do="build the model from the same arguments on every worker.",
        )
    values = [np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)) for variable in variables]
    flat = np.concatenate([value.reshape(-1).view(np.uint8) for value in values])
    received = collective.broadcast(flat)
    if collective.worker == collective.placement.owner(0) or np.array_equal(received, flat):
        return
    start = 0
    for variable, value in zip(variables, values, strict=True):
        stop = start + value.nbytes
        variable.assign(received[start:stop].copy().view(value.dtype).reshape(value.shape))
        start = stop
