"""What the steps of a loop train: weights, moving state and optimizers, as bits that must be equal on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duoka.collectives.arrays import Array, as_array
from duoka.frameworks.exchange.digest import as_bytes
from duoka.frameworks.tensorflow.recording import Update, slots_of
from duoka.frameworks.tensorflow.variables import raw


class Trained:
    """In the order in which it was first seen, which is the same on all workers.

    Metrics and counters are left out: scripts reset them as they like.
    """

    def __init__(self) -> None:
        self._variables: dict[int, Any] = {}
        self._optimizers: dict[int, Any] = {}

    def see(self, updates: Sequence[Update], moving: Sequence[Any]) -> None:
        for update in updates:
            self._optimizers.setdefault(id(update.optimizer), update.optimizer)
            for variable in update.variables:
                self._variables.setdefault(id(raw(variable)), raw(variable))
        for variable in moving:
            self._variables.setdefault(id(variable), variable)

    def state(self) -> TensorFlowState:
        """Optimizers make their slots with the first update, so they are asked anew each time."""
        slots = [slot for optimizer in self._optimizers.values() for slot in slots_of(optimizer)]
        return TensorFlowState(list(({id(each): each for each in [*self._variables.values(), *slots]}).values()))


class TensorFlowState:
    """Variables, read and written outside of graphs: also by a call out of one, when nothing in it uses them."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [
            variable for variable in variables if variable.dtype.is_floating or variable.dtype.is_integer
        ]
        names = [each.name.removesuffix(":0") for each in self._variables]
        kinds = [f"{tuple(each.shape)} {each.dtype.name}" for each in self._variables]
        self.lines = [f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True)]

    def read(self, place: int) -> Array:
        return as_bytes(as_array(self._variables[place]))

    def write(self, place: int, data: Array) -> None:
        variable = self._variables[place]
        variable.assign(data.view(variable.dtype.as_numpy_dtype).reshape(variable.shape))
