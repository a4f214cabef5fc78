"""Trainings one after the other, in each of which a worker is killed; prints the digest of every one.

    KERAS_BACKEND=jax duoka run --devices 4 --replicas 4 tests/process/keras_chaos.py fit|loop PLAN FOLDER

PLAN is a list of strikes for each training (see strikes.py), with the seconds that it takes undisturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers
from results import print_result
from strikes import Calm, Strike, Victim

import duoka


def data(rows: int):
    generator = np.random.default_rng(5)
    return generator.standard_normal((rows, 12)).astype("float32"), generator.integers(0, 4, rows)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Dense(4),
        ]
    )


class Passing(keras.callbacks.Callback):
    """Comes by the places at which a worker may die, and moves the learning rate by what it has seen."""

    def __init__(self, victim: Victim) -> None:
        super().__init__()
        self._victim = victim

    def on_train_batch_begin(self, batch, logs=None):
        self._victim.pass_by("batch")

    def on_test_batch_begin(self, batch, logs=None):
        self._victim.pass_by("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._victim.pass_by("callback")
        self.model.optimizer.learning_rate = 0.01 / (1 + logs["val_loss"])


def fit(strategy, victim: Victim, path: str) -> tuple[str, list[float]]:
    x, y = data(53)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = make_model()
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    victim.pass_by("before fit")
    history = model.fit(
        x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Passing(victim)], validation_data=(x[:29], y[:29])
    ).history
    victim.pass_by("after fit")
    fsync = os.fsync

    def sync(descriptor):
        victim.pass_by("saving")
        fsync(descriptor)

    os.fsync = sync
    under_way = Path(f"{path}-{strategy.worker}-is-being-saved")
    under_way.touch()
    model.save(path)
    under_way.unlink()
    os.fsync = fsync
    return digest([*model.variables, *model.optimizer.variables]), [n for each in history.values() for n in each]


def loop(strategy, victim: Victim, path: str) -> tuple[str, list[float]]:
    import tensorflow as tf

    x, y = data(53)
    with strategy.scope():
        model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    dataset = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(12))
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = strategy.average_loss(losses_of(labels, model(inputs, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(reduce_retracing=True)
    def step(inputs, labels):
        return strategy.reduce("sum", strategy.run(train_step, args=(inputs, labels)))

    numbers = []
    for _ in range(3):
        for inputs, labels in dataset:
            victim.pass_by("batch")
            numbers.append(float(step(inputs, labels)))
            victim.pass_by("after step")
    return digest([*model.variables, *optimizer.variables]), numbers


def digest(variables) -> str:
    """SHA-256 of all values but those that only count what was drawn on this worker."""
    total = hashlib.sha256()
    for variable in variables:
        if "seed" not in variable.path:
            total.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    return total.hexdigest()


def main() -> None:
    kind, plan, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    strategy = duoka.Mirrored()
    found, seconds = [], []
    for number, planned in enumerate(plan):
        strikes = [Strike(**strike) for strike in planned["strikes"]]
        victim = Victim(strategy.worker, strikes, Calm({}, planned["seconds"]))
        begin = time.monotonic()
        sha256, numbers = {"fit": fit, "loop": loop}[kind](strategy, victim, f"{folder}/{number}.keras")
        seconds.append(time.monotonic() - begin)
        victim.await_death()
        found.append({"sha256": sha256, "numbers": numbers, "steps": strategy.step})
    strategy.print("SECONDS", json.dumps(seconds))
    print_result(found)


if __name__ == "__main__":
    main()
