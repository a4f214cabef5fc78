"""What the small TensorFlow loops of tests are made of: data, a model, the loop of the articles, one device."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

ROWS = 95  # of 12 a batch: the last one has 11, of which some of 2, 3 or 4 replicas have more than others


class Plain:
    """One device: what a script without a strategy does."""

    replicas, worker = 1, 0

    def scope(self):
        return nullcontext()

    def run(self, fn, args=()):
        return fn(*args)

    def reduce(self, op, value, axis=None):
        return value

    def distribute_dataset(self, dataset):
        return dataset

    def average_loss(self, losses, size=None):
        return tf.reduce_sum(losses) / tf.cast(size or tf.shape(losses)[0], losses.dtype)


def batches(size=12, rows=ROWS):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 6)).astype("float32")
    tokens = rng.integers(0, 11, size=(rows, 4))
    y = rng.integers(0, 3, rows)
    return tf.data.Dataset.from_tensor_slices((x, tokens, y)).shuffle(rows, seed=5).batch(size)


def network(*, is_noisy=False, is_regular=False):
    keras.utils.set_random_seed(4)
    numbers, words = keras.Input((6,)), keras.Input((4,), dtype="int32")
    regular = keras.regularizers.L2(1e-2) if is_regular else None
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=regular)(numbers)
    if is_noisy:
        hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(hidden))
    looked_up = keras.layers.Flatten()(keras.layers.Embedding(11, 3)(words))
    return keras.Model([numbers, words], keras.layers.Dense(3)(keras.layers.Concatenate()([hidden, looked_up])))


def each_loss(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def train(strategy, model, optimizer, compute_loss, *, is_eager=False, epochs=2, on_batch=lambda number: None):
    """The loop of the articles. The loss of each step, and the accuracy at the end."""
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    variables = model.trainable_variables
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        variables = [variable.value for variable in variables]  # it knows TensorFlow's own

    def train_step(batch):
        x, tokens, y = batch
        with tf.GradientTape() as tape:
            logits = model([x, tokens], training=True)
            loss = compute_loss(y, logits)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        accuracy.update_state(y, logits)
        return tf.reduce_mean(each_loss(y, logits))

    def distributed(batch):
        return strategy.reduce("mean", strategy.run(train_step, args=(batch,)))

    step = distributed if is_eager else tf.function(distributed, reduce_retracing=True)
    losses, number = [], 0
    for _ in range(epochs):
        accuracy.reset_state()
        for batch in strategy.distribute_dataset(batches()):
            on_batch(number)
            losses.append(float(step(batch)))
            number += 1
    return describe([*model.variables, *variables_of(optimizer)], [*losses, float(accuracy.result())])


def variables_of(optimizer):
    return list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)


def describe(variables, numbers):
    values = [np.ascontiguousarray(variable.numpy()) for variable in variables]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    return {
        "sha256": digest,
        "numbers": numbers,
        "weights": [value.ravel().tolist() for value in values if value.dtype.kind == "f"],
    }
