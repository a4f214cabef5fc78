"""The variables of the models that a run trains, and the generators outside of steps: read, and put back."""

from __future__ import annotations

import functools
import random
import sys
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from duoka.collectives.arrays import Array
from duoka.errors import CheckpointError
from duoka.frameworks.exchange.digest import as_bytes
from duoka.frameworks.keras.generators import AT_THE_START, Generator, read_random, write_random
from duoka.frameworks.keras.given import Changes, Given, describe, list_optimizers
from duoka.frameworks.keras.seeds_of_replicas import global_seed_variable, seed_variables
from duoka.frameworks.keras.start import read_value

FRAMEWORK = "keras"
_PLAIN_TYPES = {1: np.uint8, 2: np.uint16}  # for types that files of tensors do not know: bfloat16 and smaller ones


class Models:
    """The models that have been trained, in the order of their first training; others have nothing to be saved.

    On JAX, `fit` hands the values of its model from batch to batch as a tuple (`state`), and variables are empty.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._given: dict[str, dict[str, Given]] = {}  # by number: the values of optimizers

    def add(self, model: Any) -> None:
        """Before its first training."""
        if not self.knows(model):
            self._models.append(weakref.ref(model))
            self._given[self.number(model)] = {name: describe(each) for name, each in list_optimizers(model).items()}

    def knows(self, model: Any) -> bool:
        return any(known() is model for known in self._models)

    def number(self, model: Any) -> str:
        return str(next(number for number, known in enumerate(self._models) if known() is model))

    def capture(self, model: Any = None, state: Any = None) -> dict[str, Any]:
        """Of each one that is still there. `model` is the one under way, with its `state`."""
        values = _values_in(model, state)

        def read(variable: Any) -> Array:
            if id(variable) not in values:
                values[id(variable)] = variable.value
            if not isinstance(values[id(variable)], np.ndarray):
                values[id(variable)] = _storable(read_value(values[id(variable)]))
            return values[id(variable)]  # one array for each: what several models share is stored once

        known = {str(number): each() for number, each in enumerate(self._models)}
        return {
            number: {"kinds": _kinds(each), "given": self._given[number]}
            | {"variables": {name: read(variable) for name, variable in _named(each)}}
            for number, each in known.items()
            if each is not None
        }

    def digest(self) -> int:
        """Of all variables: another one if any of them has changed. Outside of batches."""
        known = [model for each in self._models if (model := each()) is not None]
        values = (read_value(variable.value) for model in known for _, variable in _named(model))
        return functools.reduce(lambda sum_, value: zlib.crc32(as_bytes(value).data, sum_), values, 0)

    def restore(self, saved: dict[str, Any], model: Any = None, state: Any = None) -> Any:
        """All of it is checked before anything is changed. Gives JAX's state, with what was saved."""
        fitting = [(each(), saved.get(str(number))) for number, each in enumerate(self._models)]
        known = [(each, kept) for each, kept in fitting if each is not None and kept is not None]
        if model is not None and not any(each is model for each, _ in known):
            raise _other_run(f"{model.name} was not trained in the saved run")
        for each, kept in known:
            _build_optimizers(each)
            _compare(each, kept)
        state = None if state is None else tuple(map(list, state))
        for each, kept in known:
            _write(each, kept, state if each is model else None)
        return state

    def name_changes(self, saved: dict[str, Any]) -> list[str]:
        """What this script gives to optimizers otherwise than the saved run, which had the same ones."""
        changes = Changes()
        for number, model in ((str(number), each()) for number, each in enumerate(self._models)):
            if model is not None and number in saved:
                for name, values in saved[number]["given"].items():
                    changes.add(f"the {name} of {model.name}", self._given[number].get(name, {}), values)
                self._given[number] = saved[number]["given"]
        return changes.lines()

    def restore_one(self, saved: dict[str, Any], model: Any) -> None:
        """What is known of a model whose training is over; nothing, where it has been changed since."""
        kept = saved.get(self.number(model))
        if kept is None:
            return
        try:
            _compare(model, kept)
        except CheckpointError:
            return
        _write(model, kept, None)


def _kinds(model: Any) -> dict[str, str]:
    optimizers = {name: type(each).__name__ for name, each in list_optimizers(model).items()}
    return {"model": type(model).__name__} | optimizers


def _groups(model: Any) -> list[list[Any]]:
    """In the order of JAX's state; then what it does not have."""
    optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
    known = [model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables]
    rest = [*seed_variables(model), *(v for each in _further_optimizers(model) for v in each.variables)]
    return [*map(list, known), rest]


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    """Each once, under its path, or `path#2` where that is taken."""
    seen: set[int] = set()
    names: dict[str, int] = {}
    for variable in (variable for group in _groups(model) for variable in group):
        if id(variable) not in seen:
            seen.add(id(variable))
            count = names[variable.path] = names.get(variable.path, 0) + 1
            yield variable.path if count == 1 else f"{variable.path}#{count}", variable


def _further_optimizers(model: Any) -> list[Any]:
    """Beside the one that it is compiled with: those of a GAN, say."""
    return [optimizer for name, optimizer in list_optimizers(model).items() if optimizer is not model.optimizer]


def _build_optimizers(model: Any) -> None:
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for optimizer in _further_optimizers(model):
        if not optimizer.built:
            raise CheckpointError(
                f"The optimizer {optimizer.name} of {model.name} has no variables yet that a saved state could go to.",
                do="build it before fit: optimizer.build(model.trainable_variables).",
            )


def _values_in(model: Any, state: Any) -> dict[int, Any]:
    """JAX's values, by variable."""
    if state is None:
        return {}
    groups = zip(_groups(model), state, strict=False)
    return {id(variable): value for group, values in groups for variable, value in zip(group, values, strict=True)}


def _write(model: Any, kept: dict[str, Any], state: Any) -> None:
    saved = dict(zip((id(variable) for _, variable in _named(model)), kept["variables"].values(), strict=True))
    in_state = set()
    for group, values in zip(_groups(model), state or (), strict=False):
        for position, variable in enumerate(group):
            values[position] = _own(saved[id(variable)], variable)
            in_state.add(id(variable))
    for _, variable in _named(model):
        if id(variable) not in in_state:
            variable.assign(_own(saved[id(variable)], variable))


def _own(data: Array, variable: Any) -> Any:
    """In memory of its own: JAX uses what it is given where it lies, and the next update takes it over."""
    name = keras.backend.standardize_dtype(variable.dtype)
    if data.dtype.name == name:
        return keras.ops.copy(keras.ops.convert_to_tensor(data))
    return keras.ops.copy(keras.ops.convert_to_tensor(data.view(_numpy_type(name)).reshape(variable.shape)))


def _numpy_type(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name)


def _storable(array: Array) -> Array:
    is_plain = array.dtype.kind in "biufc"
    return array if is_plain else np.ascontiguousarray(array).view(_PLAIN_TYPES[array.itemsize])


def _compare(model: Any, kept: dict[str, Any]) -> None:
    """Name the first difference. Names may differ: a script that has made other models before has counted on."""
    here, saved_kinds = _kinds(model), kept["kinds"]
    for what in {**here, **saved_kinds}:
        if here.get(what) != saved_kinds.get(what):
            raise _other_run(f"the {what} is {here.get(what)} here, and {saved_kinds.get(what)} in the saved run")
    here_list, saved = [(name, _form(variable)) for name, variable in _named(model)], kept["variables"]
    for (name, form), (other, array) in zip(here_list, saved.items(), strict=False):
        if form[0] != array.shape or (array.dtype.name != form[1] and hasattr(np, form[1])):
            raise _other_run(f"{name} is {form[0]} {form[1]} here, and {other} {array.shape} {array.dtype} saved")
    if len(here_list) > len(saved):
        raise _other_run(f"{here_list[len(saved)][0]} is in this model, and not in the saved one")
    if len(here_list) < len(saved):
        raise _other_run(f"{list(saved)[len(here_list)]} is in the saved model, and not in this one")


def _form(variable: Any) -> tuple[tuple[int, ...], str]:
    return tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def _other_run(why: str) -> CheckpointError:
    return CheckpointError(
        "The saved state is of another model.",
        why=f"{why}.",
        do="use the model of that run, or begin a new run in another directory.",
    )


# Generators outside of steps: one stream, common to all workers.


def _tensorflow_random() -> random.Random | None:
    """What TensorFlow draws the seeds of operations from."""
    if "tensorflow" not in sys.modules:
        return None
    from tensorflow.python.eager import context

    return getattr(context.context(), "_rng", None)


def _read_tensorflow() -> Array:
    source = _tensorflow_random()
    return np.empty(0, np.uint8) if source is None else read_random(source)


def _write_tensorflow(data: Array) -> None:
    source = _tensorflow_random()
    if source is not None:
        write_random(source, data)


_GENERATORS: dict[str, Generator] = dict(zip(("python", "numpy", "torch"), AT_THE_START, strict=True)) | {
    "tensorflow": Generator(_read_tensorflow, _write_tensorflow)
}


def capture_generators() -> dict[str, Array]:
    found = {name: generator.read() for name, generator in _GENERATORS.items()}
    if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None:
        found["keras"] = np.array(read_value(global_seed_variable().value))
    return {name: state for name, state in found.items() if len(state)}


def restore_generators(saved: dict[str, Array]) -> None:
    for name, state in saved.items():
        if name == "keras":
            global_seed_variable().assign(state)
        elif len(_GENERATORS[name].read()):  # in use here, too
            _GENERATORS[name].write(state)
