"""The start of a training: all workers have the same variables, with worker 0's values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.start import agree_on_values


def variables_of(model: Any) -> list[Any]:
    """Weights, other state, the optimizer's slots: what a saved model would hold."""
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else [])]


def agree_on_start(model: Any, collective: Collective) -> None:
    """Compare the model between workers, and copy the first worker's values to all where they differ."""
    if len(collective.workers) == 1:
        return
    variables = variables_of(model)
    lines = [f"{variable.path}: {tuple(variable.shape)} {variable.dtype}" for variable in variables]
    values = [read_value(variable.value) for variable in variables]
    for place, value in agree_on_values(lines, values, collective, "at the start of a training").items():
        variables[place].assign(value)


def read_value(value: Any) -> Array:
    """Of a variable."""
    try:
        return as_array(value)
    except MismatchError:  # on another device
        return np.asarray(keras.ops.convert_to_numpy(value))
