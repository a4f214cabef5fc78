"""The model and the data of keras_habits.py, and what it finds out about them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import keras_pieces
import numpy as np
from keras import layers


def numbers(rows: int = 33):
    return keras_pieces.numbers(rows, features=6, classes=3)


def make(*extra) -> keras.Model:
    keras.utils.set_random_seed(7)
    return compiled(keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), *extra, layers.Dense(3)]))


def compiled(model: keras.Model, **options) -> keras.Model:
    return keras_pieces.compiled(model, metrics=["accuracy"], **options)


def digest(model) -> str:
    return keras_pieces.digest(model)[:16]


def distance(model, other, *, with_state: bool = False) -> float:
    """max|a - b| / max|b| over weights, and other state; with the history, if they have one."""
    pairs = [
        (keras.ops.convert_to_numpy(a.value), keras.ops.convert_to_numpy(b.value))
        for a, b in zip(
            *((each.variables if with_state else each.trainable_variables) for each in (model, other)), strict=True
        )
    ]
    pairs += [
        (np.array(values), np.array(other.history.history[name])) for name, values in model.history.history.items()
    ]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in pairs)


class Hook(keras.callbacks.Callback):
    """One hook of the user's own."""

    def __init__(self, name: str, function: Callable):
        super().__init__()
        setattr(self, name, lambda *args, **_: function(self, *args))
