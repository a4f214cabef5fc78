"""The models of the Keras benchmarks, their data, and the time that `fit` takes for one step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


def make_reuters() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((300,), dtype="int32"),
            layers.Embedding(30982, 7),
            layers.Conv1D(64, 5, activation="relu"),
            layers.MaxPool1D(2),
            layers.Conv1D(32, 3, activation="relu"),
            layers.MaxPool1D(2),
            layers.Flatten(),
            layers.Dense(46, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Nadam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_mobilenet() -> keras.Model:
    model = keras.applications.MobileNetV2(input_shape=(32, 32, 3), weights=None, classes=10)
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def reuters_rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """As frequent as words are: few of them often."""
    rng = np.random.default_rng(0)
    return (rng.random((num_rows, 300)) ** 4 * 30982).astype("int32"), rng.integers(0, 46, num_rows).astype("int32")


def picture_rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((num_rows, 32, 32, 3), "float32"), rng.integers(0, 10, num_rows).astype("int32")


def batches_of(rows: tuple[np.ndarray, np.ndarray], batch_size: int) -> dict[str, Any]:
    """Arguments of `fit`: a dataset of tf.data on TensorFlow, arrays elsewhere."""
    if keras.backend.backend() != "tensorflow":
        return {"x": rows[0], "y": rows[1], "batch_size": batch_size, "shuffle": False}
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices(rows).batch(batch_size).cache().prefetch(tf.data.AUTOTUNE)}


class EpochTimes(keras.callbacks.Callback):
    """Seconds of an epoch by the wall, and of its steps, from the return of one to that of the next.

    It has no method for batches: with one, Keras waits for each step's logs, and Duoka's workers vote after each step.
    `barrier` is called after each step, once the step is computed (JAX returns earlier).
    """

    def __init__(self, barrier: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._barrier = barrier

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._own = run = self.model.train_function
        self._ends: list[float] = []

        def timed(*given: Any) -> Any:
            results = run(*given)
            if self._barrier is not None:
                _wait_until_computed(results)
                self._barrier()
            self._ends.append(time.perf_counter())
            return results

        self.model.train_function = timed
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._begin
        self.model.train_function = self._own

    @property
    def steps(self) -> list[float]:
        return [end - begin for begin, end in itertools.pairwise(self._ends)]

    @property
    def mean(self) -> float:
        return self.seconds / len(self._ends)


def _wait_until_computed(results: Any) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready(results)


def time_epoch(model: keras.Model, batches: dict[str, Any], barrier: Callable[[], None] | None = None) -> EpochTimes:
    times = EpochTimes(barrier)
    model.fit(**batches, epochs=1, verbose=0, callbacks=[times])
    return times


MODELS = {"reuters": (make_reuters, reuters_rows), "mobilenet": (make_mobilenet, picture_rows)}
