"""A model with one replica in a run with checkpoints: Keras trains it as ever, and is led and saved on the way.

Its train function is Keras's own, so that the bits are those of a plain `fit`. Before each call of it the run comes by
a border; calls that a saved run has behind it are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import keras

from duoka.frameworks.keras.reading import make_reading, some
from duoka.frameworks.keras.source import settle
from duoka.frameworks.keras.steps import Progress
from duoka.frameworks.keras.trainings import Trainings

Train = Callable[..., Any]


class LoneModel:
    def __init__(self, model: Any, progress: Progress, trainings: Trainings, tell: Callable[[str], None]) -> None:
        self._model, self._progress, self._trainings, self._tell = model, progress, trainings, tell
        self._is_validating = False
        self._own_test_function: Any = None
        self._make_train_function = model.make_train_function  # Keras's, or one that tells of the placement

    def attach(self) -> None:
        for name in ("make_train_function", "make_test_function", "fit", "evaluate"):
            self._model.__dict__[name] = getattr(self, name)
        self._model.train_function = None  # of trainings before

    def make_train_function(self, force: bool = False) -> Any:
        model = self._model
        if model.train_function is None or force:
            self._make_train_function(force)
            model.train_function = self._watch(model.train_function)
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        model = self._model
        if self._is_validating and self._trainings.is_led:
            model.test_function = make_reading(model.steps_per_execution)
            return model.test_function
        is_new = model.test_function is None or force  # compiled anew
        model.test_function = None if is_new else self._own_test_function
        type(model).make_test_function(model)
        self._own_test_function = model.test_function
        return model.test_function

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(settle(argument, self._tell) for argument in args)
        kwargs = {name: settle(argument, self._tell) for name, argument in kwargs.items()}
        given = inspect.signature(type(self._model).fit).bind(self._model, *args, **kwargs).arguments
        given = given | given.get("kwargs", {})
        return self._trainings.run(
            self._model,
            (given.get("x"), given.get("validation_data")),
            lambda: type(self._model).fit(self._model, *args, **kwargs),
            num_epochs=int(given.get("epochs", 1)),
            has_own_steps=given.get("steps_per_epoch") is not None,
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return type(self._model).evaluate(self._model, *args, **kwargs)

        if not kwargs.get("_use_cached_eval_dataset"):
            return self._trainings.evaluate(run)
        if self._trainings.reads_nothing:
            return {}
        self._is_validating = True
        try:
            return run()
        finally:
            self._is_validating = False

    def _watch(self, train: Train) -> Train:
        """The same function, behind a border, with the arguments and results that this backend's `fit` expects."""
        trainings, model = self._trainings, self._model

        def run(batches: Any, state: Any = None) -> tuple[Any, Any]:
            is_read = isinstance(batches, list)  # on PyTorch
            is_over, state = trainings.meet(model, batches[0] if is_read else None, state)
            if is_over:
                self._skip(batches)
                return trainings.logs_of_before(model), state
            results = train(batches) if state is None else train(state, batches)
            logs, state = (results, None) if state is None else results
            self._progress.step += model.steps_per_execution
            trainings.note_logs(model, logs)
            return logs, state

        if keras.backend.backend() == "jax":
            return lambda state, batches: run(batches, state)
        return lambda batches: run(batches)[0]

    def _skip(self, batches: Any) -> None:
        """On TensorFlow the first batch builds the model, which is given its values where the run goes on."""
        if keras.backend.backend() == "torch":
            return  # they are read already
        first = next(batches)
        if not self._model.built or not self._model.optimizer.built:
            with suppress(RuntimeError):  # a model without `call` is built by its train_step
                self._model._symbolic_build(data_batch=first)
        for _ in some(batches, self._model.steps_per_execution - 1):
            pass
