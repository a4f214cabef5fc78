"""Trainings in which worker 1 flips a bit; prints what the checks found, and a digest of all weights at the end.

    KERAS_BACKEND=... duoka run --devices W --replicas R tests/process/keras_equality.py name ...

Checks come before steps 4, 8 and 12.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers
from results import print_result

import duoka
from duoka.events import Checked, Drifted, listen

EVERY, VICTIM = 4, 1
X = np.random.default_rng(0).standard_normal((156, 6)).astype("float32")
Y = np.random.default_rng(1).standard_normal((156, 2)).astype("float32")
SCENARIOS: dict[str, Callable[[duoka.Mirrored], Any]] = {}


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


def make(strategy: duoka.Mirrored) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def flip_one_bit(variable: Any) -> None:
    value = np.array(keras.ops.convert_to_numpy(variable.value))
    value.reshape(-1).view(np.int32)[-1] ^= 1 << 22
    variable.assign(value)


class Flip(keras.callbacks.Callback):
    """After the sixth batch, or at the end of the first epoch."""

    def __init__(self, strategy: duoka.Mirrored, pick: Callable[[Any], Any], *, after_epoch: bool = False) -> None:
        super().__init__()
        self._strategy, self._pick, self._after_epoch = strategy, pick, after_epoch
        self._num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_batches += 1
        if not self._after_epoch and self._num_batches == 6:
            self._flip()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._after_epoch and epoch == 0:
            self._flip()

    def _flip(self) -> None:
        if self._strategy.worker == VICTIM:
            flip_one_bit(self._pick(self.model))


def fit(strategy: duoka.Mirrored, pick: Callable[[Any], Any] | None, *, after_epoch: bool = False) -> list[Any]:
    model = make(strategy)
    callbacks = [Flip(strategy, pick, after_epoch=after_epoch)] if pick is not None else []
    model.fit(X[:120], Y[:120], batch_size=12, epochs=1 + after_epoch, shuffle=False, verbose=0, callbacks=callbacks)
    return [*model.variables, *model.optimizer.variables]


@scenario
def calm(strategy):
    return fit(strategy, None)


@scenario
def a_weight(strategy):
    return fit(strategy, lambda model: model.layers[0].kernel)


@scenario
def a_moment_of_adam(strategy):
    return fit(strategy, lambda model: model.optimizer.variables[-1])


@scenario
def a_weight_at_the_end_of_an_epoch(strategy):
    return fit(strategy, lambda model: model.layers[-1].bias, after_epoch=True)


# Loops of TensorFlow.


def make_step(strategy: duoka.Mirrored) -> tuple[Any, Callable, list[Any]]:
    import tensorflow as tf

    model = make(strategy)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = strategy.average_loss(tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, step, [*model.variables, *optimizer.variables]


def loop(strategy: duoka.Mirrored, wrap: Callable, flipped: Callable[[list[Any]], Any] | None) -> list[Any]:
    _, step, variables = make_step(strategy)
    run = wrap(lambda x, y: strategy.run(step, args=(x, y)))
    for number in range(10):
        rows = slice(12 * number, 12 * number + 12)
        run(X[rows], Y[rows])
        if number == 5 and strategy.worker == VICTIM and flipped is not None:
            flip_one_bit(flipped(variables))
    return variables


def function(run: Callable) -> Callable:
    import tensorflow as tf

    return tf.function(run)


@scenario
def a_calm_loop(strategy):
    return loop(strategy, function, None)


@scenario
def a_weight_in_a_loop(strategy):
    return loop(strategy, function, lambda variables: variables[0])


@scenario
def a_moment_in_an_eager_loop(strategy):
    return loop(strategy, lambda run: run, lambda variables: variables[-1])


def epochs_in_a_graph(strategy: duoka.Mirrored, *, is_flipped: bool) -> list[Any]:
    """Six steps in one call of a graph; the check before step 8 comes in its middle."""
    import tensorflow as tf

    _, step, variables = make_step(strategy)
    dataset = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices((X[:72], Y[:72])).batch(12))

    @tf.function
    def epoch():
        for x, y in dataset:
            strategy.run(step, args=(x, y))

    epoch()
    if is_flipped and strategy.worker == VICTIM:
        flip_one_bit(variables[0])
    epoch()
    return variables


@scenario
def a_calm_loop_inside_a_graph(strategy):
    return epochs_in_a_graph(strategy, is_flipped=False)


@scenario
def a_weight_in_a_loop_inside_a_graph(strategy):
    return epochs_in_a_graph(strategy, is_flipped=True)


def main() -> None:
    results = {}
    for name in sys.argv[1:]:
        events: list = []
        stop = listen(events.append)
        variables = SCENARIOS[name](duoka.Mirrored(check_every=EVERY))
        stop()
        values = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
        results[name] = {
            "weights": hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest(),
            "digests": {event.step: event.digest for event in events if isinstance(event, Checked)},
            "drifted": [[e.step, *e.drifted, e.first.split("/")[-1]] for e in events if isinstance(e, Drifted)],
        }
    print_result(results)


if __name__ == "__main__":
    main()
