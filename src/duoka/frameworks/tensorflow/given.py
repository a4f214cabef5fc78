"""What a script gives to the optimizers of its loops, as they are when the first loop begins; see Keras's `given`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from duoka.frameworks.keras.given import Changes, Given, describe, list_values
from duoka.frameworks.tensorflow.variables import raw

Gifts = dict[str, dict[str, Given]]  # by kind, and by the names of optimizers
_KERAS, _OLD = "keras", "old"
_COUNTED = "/iteration"  # the variable that every optimizer of Keras begins with


def describe_optimizers(things: Sequence[Any], name_of: Callable[[Any], str | None]) -> Gifts:
    """Of those among these things. `name_of` names variables alike in all runs of a script."""
    return {_KERAS: _describe_keras(things, name_of), _OLD: _describe_old(things)}


def _describe_keras(things: Sequence[Any], name_of: Callable[[Any], str | None]) -> dict[str, Given]:
    known = [each for each in things if issubclass(type(each), BaseOptimizer) and hasattr(each, "iterations")]
    inner = {id(vars(each).get("inner_optimizer")) for each in known}  # described with the one around it
    named = ((name_of(raw(each.iterations)), each) for each in known if id(each) not in inner)
    # With the class: of another one no values are compared. It is refused with its first update.
    return {f"{name.replace(_COUNTED, '')} ({type(each).__name__})": describe(each) for name, each in named if name}


def _describe_old(things: Sequence[Any]) -> dict[str, Given]:
    """Of `tf.compat.v1.train`, which keep plain numbers. Two of a class cannot be told apart, and are left out."""
    known = [each for each in things if issubclass(type(each), tf.compat.v1.train.Optimizer)]
    counts = Counter(type(each).__name__ for each in known)
    return {name: _describe_numbers(each) for each in known if counts[name := type(each).__name__] == 1}


def _describe_numbers(optimizer: Any) -> Given:
    numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    return list_values({name.lstrip("_"): value for name, value in numbers.items() if not name.startswith("_update")})


def name_changes(here: Gifts, saved: Gifts) -> list[str]:
    """One line for values of the saved run that it goes on with, one for those of the script."""
    changes = Changes()
    for kind in (_KERAS, _OLD):
        for name, values in saved.get(kind, {}).items():
            if name in here.get(kind, {}):
                changes.add(name, here[kind][name], values, has_variables=kind == _KERAS)
    return changes.lines()
