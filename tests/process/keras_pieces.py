"""What the Keras scripts beside this file share: data, a small model, the list of scenarios, what is told of a run.

A script finds this file because it lies in the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

SCENARIOS: dict[str, Callable] = {}  # of the script that runs


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


class Plain:
    """Duoka's words on one device: what an unconverted script does."""

    worker = 0
    num_workers = 1

    def scope(self):
        return contextlib.nullcontext()

    def prepare(self, model):
        return model


def numbers(rows: int, features: int = 12, classes: int = 4):
    generator = np.random.default_rng(5)
    x = generator.standard_normal((rows, features)).astype("float32")
    return x, generator.integers(0, classes, rows)


def tokens(rows: int, length: int = 9, vocabulary: int = 30):
    """Few of them come often, so that the gradient of the table has repeated rows."""
    generator = np.random.default_rng(6)
    x = (generator.random((rows, length)) ** 3 * vocabulary).astype("int32")
    return x, generator.integers(0, 4, rows), generator.random(rows).astype("float32") + 0.5


def classifier(*between: keras.Layer) -> keras.Model:
    return keras.Sequential([layers.Dense(16, activation="relu"), *between, layers.Dense(4)])


def crossentropy(**options) -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def compiled(model: keras.Model, optimizer: keras.Optimizer | None = None, loss=None, **options) -> keras.Model:
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss or crossentropy(), **options)
    return model


class Positions(layers.Layer):
    """Adds an embedding of the place of a word: its gradient has the same rows in every replica."""

    def __init__(self):
        super().__init__()
        self.words, self.places = layers.Embedding(30, 8), layers.Embedding(12, 8)

    def build(self, shape):
        self.words.build(shape)
        self.places.build((12,))

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(keras.ops.shape(x)[1]))


def digest(model: keras.Model) -> str:
    state = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        state.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    return state.hexdigest()


def describe(model: keras.Model, history, variables) -> dict:
    """The digest of all variables, the history, and the values of these."""
    weights = {f"{n} {v.path}": keras.ops.convert_to_numpy(v.value) for n, v in enumerate(variables)}
    return {
        "sha256": digest(model),
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "weights": {name: value.astype(float).tolist() for name, value in weights.items()},
    }
