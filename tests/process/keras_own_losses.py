"""What people write into losses and steps of their own, for keras_habits.py."""

from __future__ import annotations

import keras
from keras import layers, ops
from keras_habitual import distance, numbers
from keras_pieces import compiled, crossentropy

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "torch":
    import torch
else:
    import jax

EACH, TOTAL = crossentropy(reduction="none"), crossentropy(reduction="sum")


class OwnLoss(keras.Sequential):
    """A step as each backend writes it, with what `loss_of` says."""

    if BACKEND == "tensorflow":

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": ops.mean(loss)}

    elif BACKEND == "torch":

        def train_step(self, data):
            x, y = data
            for weight in self.trainable_weights:
                if weight.value.grad is not None:
                    weight.value.grad.zero_()  # in place: the gradients of an earlier run are gone
            loss = self.loss_of(y, self(x))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"loss": loss}

    else:

        def train_step(self, state, data):
            weights, other, slots, counted = state
            x, y = data

            def loss_of(weights):
                return self.loss_of(y, self.stateless_call(weights, other, x)[0])

            loss, gradients = jax.value_and_grad(loss_of)(weights)
            weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            return {"loss": loss}, (weights, other, slots, counted)


class MeanOfRows(OwnLoss):
    def loss_of(self, y, outputs):
        return ops.mean(EACH(y, outputs))


class EachRow(OwnLoss):
    """TensorFlow takes the gradient of the sum."""

    def loss_of(self, y, outputs):
        return 0.01 * EACH(y, outputs)


class AverageOfRows(OwnLoss):
    """As tf.distribute teaches it: the sum, by the rows of all replicas."""

    def loss_of(self, y, outputs):
        return tf.nn.compute_average_loss(EACH(y, outputs), global_batch_size=10)


class SumByRows(OwnLoss):
    """Divides the loss of all replicas by the rows of one: this has to be said."""

    def loss_of(self, y, outputs):
        return TOTAL(y, outputs) / ops.cast(ops.shape(outputs)[0], "float32")


class AddedSum(keras.Sequential):
    """Has a layer with a loss that is a sum, and does not tell: this has to be said."""


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        return x


class MadeOfMetrics(keras.Sequential):
    """Reports a number that depends on what metrics have counted: this has to be said."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"twice": 2 * self.metrics[0].result()}


class MeasuredLater(keras.Sequential):
    """Has a metric that its train_step reports, and leaves alone: nothing is to be said."""

    def __init__(self, parts):
        super().__init__(parts)
        self.later = keras.metrics.Mean(name="later")


class Clipping(OwnLoss):
    """With the gradient of one replica: this has to be said."""

    def loss_of(self, y, outputs):
        return ops.mean(EACH(y, outputs))

    if BACKEND == "tensorflow":

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            gradients = [tf.clip_by_norm(part, 0.1) for part in tape.gradient(loss, self.trainable_variables)]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}


class OtherNames(keras.Sequential):
    def fit(self, rows, rounds=1, **options):
        return super().fit(*rows, epochs=rounds, **options)


def own_losses(strategy):
    """How far each is from one device; the test looks at what is said, too."""
    rows = numbers()
    found = {}
    of_tensorflow = (EachRow, AverageOfRows, Clipping) if BACKEND == "tensorflow" else ()
    for kind in (MeanOfRows, SumByRows, AddedSum, MadeOfMetrics, MeasuredLater, OtherNames, *of_tensorflow):
        ends = []
        for prepare in (strategy.prepare, lambda model: model):
            keras.utils.set_random_seed(7)
            between = [Penalty()] if kind is AddedSum else []
            model = prepare(compiled(kind([keras.Input((6,)), layers.Dense(8), *between, layers.Dense(3)])))
            options = {"batch_size": 10, "verbose": 0, "shuffle": False}
            if kind is OtherNames:
                model.fit(rows, 2, **options)
            else:
                model.fit(*rows, epochs=2, **options)
            ends.append(model)
        found[kind.__name__] = distance(*ends)
    return found
