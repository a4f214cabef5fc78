"""The placement of the first step of `fit`, as each backend of Keras can tell it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from duoka.frameworks.keras.start import variables_of
from duoka.frameworks.placement_log import PlacementLog, Row


@contextmanager
def log_fit_placement(
    log: PlacementLog | None, model: Any, programs: Callable[[], Sequence[str]], state: Callable[[], Any]
) -> Iterator[None]:
    """Around a global batch; all but the first pass through.

    ``programs`` names what runs as one compiled program: nobody sees its operations, but they are where its
    variables are. ``state`` is JAX's: its variables are empty while `fit` runs.
    """
    if log is None or not log.is_wanted:
        yield
        return
    name = keras.backend.backend()
    module = importlib.import_module(f"duoka.frameworks.{name}.step_placement")
    operations: list[Row] = []
    if name == "jax" or (name == "torch" and model.jit_compile):
        yield
    else:
        with module.watching_operations() as operations:
            yield
    if name == "jax":
        rows = [module.array_row(path, array) for path, array in _name_arrays(model, state())]
    else:
        rows = [module.variable_row(variable) for variable in variables_of(model)]
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    log.show([*rows, *operations, *(Row("program", title, "compiled as one", devices) for title in programs())])


def _name_arrays(model: Any, state: Any) -> list[tuple[str, Any]]:
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    pairs = zip(groups, state, strict=True)
    return [
        (variable.path, array) for variables, arrays in pairs for variable, array in zip(variables, arrays, strict=True)
    ]


def log_plain_fit_placement(log: PlacementLog, model: Any) -> None:
    """For a model with one replica, whose `fit` stays Keras's own: only its first step is looked at."""
    own = type(model).make_train_function.__get__(model)

    def make_train_function(force: bool = False) -> Any:
        own(force)
        train = model.train_function
        results: list[Any] = []

        def run(*args: Any) -> Any:
            titles = ["train_step"] if model.jit_compile or keras.backend.backend() == "jax" else []
            with log_fit_placement(log, model, lambda: titles, lambda: results[0][1]):
                results[:] = [train(*args)]
            return results.pop()

        if log.is_wanted:
            model.train_function = run
        return model.train_function

    model.__dict__["make_train_function"] = make_train_function
