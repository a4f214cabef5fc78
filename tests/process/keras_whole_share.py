"""Keras steps that exchange in their middle, run as a script on some number of workers; prints one JSON line.

    KERAS_BACKEND=jax duoka run --devices W --replicas R tests/process/keras_whole_share.py [name ...]

With --plain each scenario is trained in the ordinary way, on one device and without Duoka.
"""

from __future__ import annotations

import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers, ops
from keras_pieces import SCENARIOS, Plain, Positions, compiled, crossentropy, numbers, scenario
from keras_pieces import describe as describe_training
from results import print_result

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
else:
    import torch

LOSS = crossentropy()


def make_strategy(**options):
    if "--plain" in sys.argv:
        return Plain()
    import duoka

    return duoka.Mirrored(devices=2, **options)


def padded_tokens(rows: int, length: int = 9, vocabulary: int = 30):
    """Few of them come often, and rows are padded with zeros to different lengths."""
    generator = np.random.default_rng(6)
    x = (1 + generator.random((rows, length)) ** 3 * (vocabulary - 1)).astype("int32")
    x[np.arange(length)[None] >= generator.integers(2, length, (rows, 1))] = 0
    return x


def differentiate(loss_of, variables):
    """The loss and its gradients, where variables are what they are."""
    if BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            loss = loss_of()
        return loss, tape.gradient(loss, variables)
    for variable in variables:
        variable.value.grad = None
    loss = loss_of()
    return loss, torch.autograd.grad(loss, [variable.value for variable in variables])


class WithAverage(keras.Model):
    """Keeps an average of its weights, taken after each update."""

    decay = 0.9

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.averages = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"average_{n}")
            for n, v in enumerate(inner.trainable_variables)
        ]

    def call(self, x, training=False):
        return self.inner(x, training=training)

    if BACKEND == "jax":

        def train_step(self, state, data):
            logs, (weights, other, slots, counted) = super().train_step(state, data)
            at = {id(v): n for n, v in enumerate(self.non_trainable_variables)}
            other = list(other)
            for average, weight in zip(self.averages, weights, strict=True):
                n = at[id(average)]
                other[n] = self.decay * other[n] + (1 - self.decay) * weight
            return logs, (weights, other, slots, counted)

    else:

        def train_step(self, data):
            logs = super().train_step(data)
            for average, weight in zip(self.averages, self.trainable_variables, strict=True):
                average.assign(self.decay * average + (1 - self.decay) * weight)
            return logs


class Averages(keras.callbacks.Callback):
    """Computes the averages once more, from the weights after each batch."""

    def __init__(self):
        super().__init__()
        self.expected, self.largest = None, 0.0

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        weights = [ops.convert_to_numpy(v.value).copy() for v in model.trainable_variables]
        self.expected = self.expected or [np.zeros_like(w) for w in weights]
        self.expected = [model.decay * e + (1 - model.decay) * w for e, w in zip(self.expected, weights, strict=True)]
        found = [ops.convert_to_numpy(v.value) for v in model.averages]
        self.largest = max(float(np.abs(e - f).max()) for e, f in zip(self.expected, found, strict=True))


@scenario
def average_of_weights(eager=False):
    """An embedding with repeated tokens, a masked loss, clipping, momentum, and an uneven last batch of one row."""
    x = padded_tokens(21 if eager else 41)
    inner = keras.Sequential([keras.Input((9,), dtype="int32"), layers.Embedding(30, 8, mask_zero=True)])
    inner.add(layers.Dense(30))
    model = WithAverage(inner)
    model.build((None, 9))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    model.compile(optimizer, LOSS, metrics=["accuracy"], run_eagerly=eager)
    model = make_strategy().prepare(model)
    check = Averages()
    history = model.fit(x, x, batch_size=10, epochs=1 if eager else 4, verbose=0, callbacks=[check])
    return describe(model, history) | {"average_off": check.largest}


@scenario
def average_run_eagerly():
    return average_of_weights(eager=True)


class Adversaries(keras.Model):
    """Two optimizers, of which the second sees what the first has changed. Noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(12)])
        self.critic = keras.Sequential([keras.Input((12,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
        self.critic_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.slots = list(self.critic_optimizer.variables)  # kept with the model: on JAX they are its state
        self.judge = keras.losses.BinaryCrossentropy(from_logits=True)
        self.right = keras.metrics.Mean(name="right")
        self.built = True

    def call(self, noise):
        return self.generator(noise)

    def critic_loss(self, judged):
        n = ops.shape(judged)[0] // 2
        labels = ops.concatenate([ops.ones((n, 1)), ops.zeros((n, 1))], 0)
        return self.judge(labels, judged)

    if BACKEND == "jax":

        def train_step(self, state, data):
            weights, other, slots, counted = state
            real, noise = data["real"], data["noise"]
            at = {id(v): n for n, v in enumerate(self.trainable_variables)}
            parts = [self.generator, self.critic]
            made, judge = ([weights[at[id(v)]] for v in part.trainable_variables] for part in parts)
            state_at = {id(v): n for n, v in enumerate(self.non_trainable_variables)}
            critic_slots = [other[state_at[id(v)]] for v in self.slots]

            def critic_loss(judge):
                fake, _ = self.generator.stateless_call(made, [], noise)
                judged, _ = self.critic.stateless_call(judge, [], ops.concatenate([real, fake], 0))
                return self.critic_loss(judged)

            def generator_loss(made):
                fake, _ = self.generator.stateless_call(made, [], noise)
                judged, _ = self.critic.stateless_call(judge, [], fake)
                return self.judge(ops.ones_like(judged), judged)

            first, gradients = jax.value_and_grad(critic_loss)(judge)
            judge, critic_slots = self.critic_optimizer.stateless_apply(critic_slots, gradients, judge)
            second, gradients = jax.value_and_grad(generator_loss)(made)
            made, slots = self.optimizer.stateless_apply(slots, gradients, made)
            weights, other = list(weights), list(other)
            for part, values in zip(parts, (made, judge), strict=True):
                for v, value in zip(part.trainable_variables, values, strict=True):
                    weights[at[id(v)]] = value
            for v, value in zip(self.slots, critic_slots, strict=True):
                other[state_at[id(v)]] = value
            with keras.StatelessScope(list(zip(self.metrics_variables, counted, strict=True))) as scope:
                self.right.update_state(first, sample_weight=real.shape[0])
                logs = {"right": self.right.result(), "second": second}
            counted = [scope.get_current_value(v) for v in self.metrics_variables]
            return logs, (weights, other, slots, counted)

    else:

        def train_step(self, data):
            real, noise = data["real"], data["noise"]
            fake = self.generator(noise)
            fake = tf.stop_gradient(fake) if BACKEND == "tensorflow" else fake.detach()
            variables = self.critic.trainable_variables
            both = ops.concatenate([real, fake], 0)
            first, gradients = differentiate(lambda: self.critic_loss(self.critic(both)), variables)
            self.apply(self.critic_optimizer, gradients, variables)
            variables = self.generator.trainable_variables
            second, gradients = differentiate(lambda: self.generator_loss(noise), variables)
            self.apply(self.optimizer, gradients, variables)
            self.right.update_state(first, sample_weight=ops.shape(real)[0])
            return {"right": self.right.result(), "second": second}

        def generator_loss(self, noise):
            judged = self.critic(self.generator(noise))
            return self.judge(ops.ones_like(judged), judged)

        def apply(self, optimizer, gradients, variables):
            if BACKEND == "tensorflow":
                return optimizer.apply(gradients, variables)
            with torch.no_grad():
                return optimizer.apply(gradients, variables)


def train_adversaries():
    x, _ = numbers(45)
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.05))
    model.optimizer.build(model.generator.trainable_variables)
    model = make_strategy().prepare(model)
    data = {"real": x, "noise": np.random.default_rng(3).standard_normal((45, 4)).astype("float32")}
    return model, model.fit(data, batch_size=10, epochs=10, verbose=0)


@scenario
def adversaries():
    return describe(*train_adversaries())


class AppliesTwice(keras.Model):
    """One optimizer, two updates a batch; the second from a loss that is a sum. The metric named loss is left alone."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(4)
        self.total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        self.rest = keras.metrics.Mean(name="rest")

    def call(self, x):
        return self.out(x)

    if BACKEND == "jax":

        def train_step(self, state, data):
            weights, other, slots, counted = state
            x, y = data
            for loss, scale in ((LOSS, 1.0), (self.total, 0.01)):
                value, gradients = jax.value_and_grad(
                    lambda w, loss=loss, scale=scale: scale * loss(y, self.stateless_call(w, other, x)[0])
                )(weights)
                weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            return {"last": value, "loss": value}, (weights, other, slots, counted)

    else:

        def train_step(self, data):
            x, y = data
            for loss, scale in ((LOSS, 1.0), (self.total, 0.01)):
                value, gradients = differentiate(
                    lambda loss=loss, scale=scale: scale * loss(y, self(x)), self.trainable_variables
                )
                Adversaries.apply(self, self.optimizer, gradients, self.trainable_variables)
            return {"last": value, "loss": value}


@scenario
def applies_twice():
    x, y = numbers(33)
    model = AppliesTwice()
    model.build((None, 12))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    model = make_strategy().prepare(model)
    return describe(model, model.fit(x, y, batch_size=10, epochs=4, verbose=0))


@scenario
def positions(**options):
    """A table whose gradient has a row for each place, not for each row of the batch, with its norm clipped."""
    x = padded_tokens(37)
    inner = keras.Sequential([keras.Input((9,), dtype="int32"), Positions(), layers.GlobalAveragePooling1D()])
    inner.add(layers.Dense(4))
    model = WithAverage(inner)
    model.build((None, 9))
    compiled(model, keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1), **options)
    model = make_strategy().prepare(model)
    return describe(model, model.fit(x, x[:, 0] % 4, batch_size=10, epochs=3, verbose=0))


@scenario
def positions_run_eagerly():
    return positions(run_eagerly=True)


class Rates(keras.callbacks.Callback):
    """Sets another learning rate on each worker."""

    def __init__(self, strategy):
        super().__init__()
        self.worker = strategy.worker

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 + self.worker


@scenario
def different_rates():
    """Behind a loss scale, which has a learning rate of its own that nobody uses."""
    x, y = numbers(33)
    model = AppliesTwice()
    model.build((None, 12))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0))
    strategy = make_strategy()
    model = strategy.prepare(model)
    try:
        return describe(model, model.fit(x, y, batch_size=10, verbose=0, callbacks=[Rates(strategy)]))
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


@scenario
def own_statistics():
    """BatchNorm of each worker's rows, and dropout: not one device's numbers, but the same ones on all workers."""
    x, y = numbers(41)
    inner = keras.Sequential([keras.Input((12,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3)])
    inner.add(layers.Dense(4))
    model = WithAverage(inner)
    model.build((None, 12))
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    model = make_strategy().prepare(model)
    check = Averages()
    history = model.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[check], validation_data=(x, y))
    return describe(model, history) | {"average_off": check.largest}


@scenario
def synchronised():
    """BatchNorm over the whole batch, 205 steps, the last of each epoch with one row.

    Smooth activations: with ReLU, plain `fit` on JAX ends 2e-2 away from itself when its input is off by 1e-7.
    """
    x = np.random.default_rng(4).standard_normal((41, 6, 6, 3)).astype("float32") * 2 + 3
    y = np.random.default_rng(5).integers(0, 4, 41)
    model = keras.Sequential(
        [
            layers.BatchNormalization(),
            layers.Activation("softplus"),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("softplus"),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(scale=False),
            layers.Activation("softplus"),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    model.compile(keras.optimizers.SGD(0.02), LOSS)
    model = make_strategy(sync_batchnorm=True).prepare(model)
    history = model.fit(x, y, batch_size=10, epochs=41, verbose=0, validation_data=(x[:13], y[:13]), validation_freq=20)
    return describe(model, history)


@scenario
def synchronised_with_masks():
    """BatchNorm that leaves padded steps out, and a masked loss."""
    x = padded_tokens(43)
    model = keras.Sequential([layers.Embedding(30, 8, mask_zero=True), layers.BatchNormalization(), layers.Dense(30)])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    model = make_strategy(sync_batchnorm=True).prepare(model)
    return describe(model, model.fit(x, x, batch_size=10, epochs=4, verbose=0))


@scenario
def synchronised_layer():
    """One layer asks for the statistics of the whole batch by itself, as for tf.distribute."""
    x, y = numbers(41)
    norm = layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([layers.Dense(8, use_bias=False), norm, layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    model = make_strategy().prepare(model)
    return describe(model, model.fit(x, y, batch_size=10, epochs=4, verbose=0))


@scenario
def refused_compiler():
    """On TensorFlow XLA cannot call out of a step; elsewhere this trains."""
    x, y = numbers(20)
    model = keras.Sequential([layers.Dense(8, use_bias=False), layers.BatchNormalization(), layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), LOSS, jit_compile=BACKEND != "torch")
    strategy = make_strategy(sync_batchnorm=True)
    model = strategy.prepare(model)
    try:
        return describe(model, model.fit(x, y, batch_size=10, epochs=1, verbose=0))
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


class Death(keras.callbacks.Callback):
    """Worker 1 dies before its part of a batch."""

    def __init__(self, strategy):
        super().__init__()
        self.is_victim, self.batches = strategy.worker == 1, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        if self.is_victim and self.batches == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def struck():
    x, y = numbers(53)
    model = keras.Sequential([layers.Dense(16), layers.BatchNormalization(), layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.01), LOSS)
    strategy = make_strategy(sync_batchnorm=True)
    model = strategy.prepare(model)
    model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Death(strategy)])
    return {"error": "none"}


def describe(model, history) -> dict:
    variables = [v for v in model.variables if v.value is not None and "seed" not in v.path]
    return describe_training(model, history, variables)


def main() -> None:
    known = SCENARIOS | {"struck": struck}
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or list(SCENARIOS)
    if BACKEND != "tensorflow":
        # On PyTorch everything runs eagerly, and on JAX that takes too long. Both know of no synchronized=True.
        left_out = ("average_run_eagerly", "positions_run_eagerly", "synchronised_layer")
        names = [name for name in names if name not in left_out]
    results = {}
    for name in names:
        keras.utils.set_random_seed(7)
        results[name] = known[name]()
    print_result(results)


if __name__ == "__main__":
    main()
