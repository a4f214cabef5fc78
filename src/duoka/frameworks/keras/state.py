"""The variables of a model and of its optimizer, as bits: what must be equal on all workers between two steps."""

from __future__ import annotations

from typing import Any

from duoka.collectives.arrays import Array
from duoka.frameworks.exchange.digest import as_bytes
from duoka.frameworks.keras.seeds_of_replicas import seed_variables
from duoka.frameworks.keras.start import read_value


class KerasState:
    """Without the states of seed generators, which follow from the number of the batch and the replica.

    On JAX, `fit` hands the values from batch to batch as a tuple, and variables are empty meanwhile.
    """

    def __init__(self, model: Any, state: Any = None) -> None:
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        seeds = {id(seed) for seed in seed_variables(model)}
        self._values = None if state is None else [list(part) for part in state[:3]]
        self._places = [
            (group, position, variable)
            for group, variables in enumerate((model.trainable_variables, model.non_trainable_variables, optimizer))
            for position, variable in enumerate(variables)
            if id(variable) not in seeds
        ]
        self.lines = [f"{variable.path}: {tuple(variable.shape)} {variable.dtype}" for _, _, variable in self._places]

    def read(self, place: int) -> Array:
        group, position, variable = self._places[place]
        return as_bytes(read_value(variable.value if self._values is None else self._values[group][position]))
