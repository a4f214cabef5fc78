"""A scenario of keras_scenarios.py: a training step of the user's own."""

from __future__ import annotations

import keras
from keras import layers
from keras_pieces import numbers


class OwnStep(keras.Model):
    """A train_step of the user's own, as each backend writes it; it reports a loss that no metric keeps."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(16, activation="relu"), layers.Dense(4)
        self.rest, self.batches = keras.metrics.Mean(name="rest"), keras.metrics.Mean(name="batches")

    def call(self, x, training=False):
        return self.out(self.hidden(x))

    def loss_of(self, x, y):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True))

    if keras.backend.backend() == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y)
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            self.rest.update_state(loss, sample_weight=tf.shape(x)[0])
            self.batches.update_state(loss)
            return {"rest": self.rest.result(), "batches": self.batches.result(), "loss": loss, "twice": 2 * loss}

    elif keras.backend.backend() == "torch":

        def train_step(self, data):
            import torch

            x, y = data
            self.zero_grad()
            loss = self.loss_of(x, y)
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            self.rest.update_state(loss, sample_weight=x.shape[0])
            self.batches.update_state(loss)
            return {"rest": self.rest.result(), "batches": self.batches.result(), "loss": loss, "twice": 2 * loss}

    else:

        def train_step(self, state, data):
            import jax

            weights, other, slots, counted = state
            x, y = data

            def loss_and_state(weights, other):
                logits, other = self.stateless_call(weights, other, x, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
                return keras.ops.mean(losses), other

            (loss, other), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(weights, other)
            weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            with keras.StatelessScope(list(zip(self.metrics_variables, counted, strict=True))) as scope:
                self.rest.update_state(loss, sample_weight=x.shape[0])
                self.batches.update_state(loss)
                logs = {"rest": self.rest.result(), "batches": self.batches.result(), "loss": loss, "twice": 2 * loss}
            counted = [scope.get_current_value(v) for v in self.metrics_variables]
            return logs, (weights, other, slots, counted)


def own_train_step(strategy):
    x, y = numbers(33)
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.build((None, x.shape[1]))
        history = model.fit(x, y, batch_size=10, epochs=4, verbose=0)  # training inside the scope, too
    return model, history
