"""Ties a Keras model to a run: `fit` finds other functions on it. They are attributes of the instance, never saved."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import keras

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.keras.backend import Backend
from duoka.frameworks.keras.course import Course
from duoka.frameworks.keras.memory import Memory
from duoka.frameworks.keras.start import agree_on_start
from duoka.frameworks.keras.steps import Progress, Steps
from duoka.frameworks.keras.terms import Terms
from duoka.frameworks.keras.votes import with_vote
from duoka.frameworks.keras.whole_share import WholeShareSteps

_BACKENDS = {
    "tensorflow": ("tensorflow_backend", "TensorFlowBackend"),
    "jax": ("jax_backend", "JaxBackend"),
    "torch": ("torch_backend", "TorchBackend"),
}
_SHADOWED = ("make_train_function", "make_test_function", "fit", "evaluate")


class Attachment:
    """One model of a run.

    Training is shared between replicas, and so is the validation that belongs to `fit`. Any other `evaluate`, and
    `predict`, is this worker's own business: it may be called by one worker alone, and waits for nobody.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        memory: Memory,
        progress: Progress,
        tell: Callable[[str], None],
        *,
        sync_batchnorm: bool = False,
    ) -> None:
        self._model, self._collective = model, collective
        self._memory, self._progress, self._tell = memory, progress, tell
        self._sync_batchnorm = sync_batchnorm
        self._is_validating = False
        self._is_built = False
        self._own_test_function: Any = None  # this worker's
        self._shared_test_function: Any = None

    def attach(self) -> None:
        for name in _SHADOWED:
            self._model.__dict__[name] = getattr(self, name)

    def make_train_function(self, force: bool = False) -> Any:
        """What `fit` and `train_on_batch` call before they train."""
        if self._model.train_function is None or force:
            self._is_built = False
            if keras.backend.backend() != "tensorflow":
                # Here everything is built; on JAX the variables are empty while `fit` runs.
                agree_on_start(self._model, self._collective)
            self._model.train_function = self._make_function(is_training=True)
        return self._model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        model = self._model
        if model.test_function is None or force:  # compiled anew
            self._own_test_function = self._shared_test_function = None
        if self._is_validating:
            self._shared_test_function = self._shared_test_function or self._make_function(is_training=False)
            model.test_function = self._shared_test_function
        else:
            model.test_function = self._own_test_function
            type(model).make_test_function(model)
            self._own_test_function = model.test_function
        return model.test_function

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """With a callback of ours behind the user's: any stop stops all."""
        if len(self._collective.workers) == 1:
            return type(self._model).fit(self._model, *args, **kwargs)
        return type(self._model).fit(self._model, **with_vote(self._model, self._collective, args, kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`fit` says with an argument of its own that it is the one who calls; it does so on all workers."""
        self._is_validating = bool(kwargs.get("_use_cached_eval_dataset"))
        try:
            return type(self._model).evaluate(self._model, *args, **kwargs)
        finally:
            self._is_validating = False

    def _make_function(self, *, is_training: bool) -> Any:
        """With the arguments and results that this backend's `fit` expects."""
        name = keras.backend.backend()
        if name not in _BACKENDS:
            raise MismatchError(f"Keras runs on {name}.", do=f"use one of {', '.join(_BACKENDS)}.")
        module, kind = _BACKENDS[name]
        backend_class = getattr(importlib.import_module(f"duoka.frameworks.keras.{module}"), kind)
        terms = Terms()
        backend: Backend = backend_class(self._model, terms, self._tell, is_training=is_training)
        steps = Steps(
            self._collective, self._memory, backend, terms, self._progress, self._tell, is_training=is_training
        )

        def make_whole(reason: str) -> WholeShareSteps:
            return WholeShareSteps(
                self._model,
                self._collective,
                self._progress,
                self._tell,
                reason=reason,
                sync_batchnorm=self._sync_batchnorm,
            )

        reason = "sync_batchnorm=True" if self._sync_batchnorm and is_training else None
        course = Course(self._model, steps, backend, make_whole, reason)
        num_batches = self._model.steps_per_execution

        def run(batches: Any) -> dict[str, Any]:
            return run_with_state(None, batches)[0]

        def run_with_state(state: Any, batches: Any) -> tuple[dict[str, Any], Any]:
            logs = course.run(self._build(next(batches)), state)
            for batch in _some(batches, num_batches - 1):
                logs = course.run(batch, course.state)
            return logs, course.state

        if name == "jax":
            return run_with_state
        return (lambda batches: run(iter(batches))) if name == "torch" else run

    def _build(self, batch: Any) -> Any:
        """On TensorFlow it is the first batch that shows the shapes: from here on all variables exist."""
        if keras.backend.backend() == "tensorflow" and not self._is_built:
            with suppress(RuntimeError):  # a model without `call` is built by its train_step
                self._model._symbolic_build(data_batch=batch)
            agree_on_start(self._model, self._collective)
            self._is_built = True
        return batch


def is_attached(model: Any) -> bool:
    return _SHADOWED[0] in model.__dict__


def _some(batches: Any, count: int) -> Any:
    """Up to so many more: the last execution of an epoch may have fewer."""
    for _ in range(count):
        try:
            yield next(batches)
        except StopIteration:
            return
