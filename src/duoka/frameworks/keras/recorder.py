"""Watches a training step: what it hands to the optimizer, which is held back, and which variables it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from keras import layers

from duoka.frameworks.keras.applying import Applying
from duoka.frameworks.keras.assignments import watching_assignments
from duoka.frameworks.keras.given import list_optimizers
from duoka.frameworks.keras.refusals import refuse_own_optimizers
from duoka.frameworks.replacing import shadowing
from duoka.frameworks.switching import switching


class NeedsWholeShares(BaseException):
    """What a step does that cannot be held back until its end. Nobody but us catches it: no `except Exception`,
    and Keras makes no error of its own of it."""


class Recorder:
    """Use it around runs, or tracings, of a `train_step` or `test_step`. Nothing of it stays on the optimizer.

    An `apply` that the user has put on the optimizer itself is held back with the rest: it gets the gradients of all.
    """

    def __init__(self, model: Any, *, is_training: bool, find_place: Callable[[], int] | None = None) -> None:
        """`find_place` tells where a graph is that is being traced."""
        self._model, self._is_training, self._find_place = model, is_training, find_place
        self._metric_ids = {id(variable) for variable in model.metrics_variables}
        self._weight_ids = {id(variable) for variable in model.trainable_variables}
        self._forget()

    def _forget(self) -> None:
        self.gradients: list[Any] | None = None
        self.variables: list[Any] = []  # that the gradients are of
        self.applied_at: int | None = None  # the place where they were applied
        self.changed: dict[int, Any] = {}  # variables that were assigned to, by id
        self.counted: set[int] = set()  # ids of variables of metrics that were assigned to

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Once for each run: what was recorded before is forgotten."""
        self._forget()
        shadow = {"apply": self._apply, "stateless_apply": self._stateless_apply}
        others = Applying(self._refuse_others, list_optimizers(self._model))
        with (
            watching_assignments(self._see),
            others.watching() if self._is_training else nullcontext(),
            shadowing(self._model.optimizer, shadow) if self._is_training else nullcontext(),
            _finding_synchronised_layers(),
        ):
            yield
        if self.gradients is None and self._is_training:
            refuse_own_optimizers(self._model)

    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = self._model.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        self._record(list(grads), list(variables))

    def _stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        self._record(list(grads), list(self._model.optimizer._trainable_variables))
        return trainable_variables, optimizer_variables

    def _record(self, gradients: list[Any], variables: list[Any]) -> None:
        if self.gradients is not None:
            raise NeedsWholeShares("it applies gradients more than once")
        self.gradients, self.variables = gradients, variables
        self.applied_at = self._find_place() if self._find_place is not None else None

    def _refuse_others(self, gradients: list[Any]) -> list[Any]:
        """The model's own optimizer is shadowed, and does not come here."""
        raise NeedsWholeShares("it uses an optimizer that is not model.optimizer")

    def _see(self, variable: Any) -> None:
        is_metric = id(variable) in self._metric_ids
        if self._is_training and not is_metric:
            if self.gradients is not None:
                raise NeedsWholeShares(f"it changes {variable.path} after it has applied gradients")
            if id(variable) in self._weight_ids:
                raise NeedsWholeShares(f"it changes {variable.path} by itself")
        if is_metric:
            self.counted.add(id(variable))
        else:
            self.changed[id(variable)] = variable


@contextmanager
def _finding_synchronised_layers() -> Iterator[None]:
    """A layer that is to normalise with the statistics of all replicas has to hear of them in the middle of a step."""

    def moments(own: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
        if layer.synchronized:
            raise NeedsWholeShares(f"the layer {layer.name} has synchronized=True")
        return own(layer, inputs, mask)

    with switching([(layers.BatchNormalization, "_moments", moments)]):
        yield
