"""Small Keras trainings, run as a script on some number of workers; prints one JSON line of digests and weights.

    KERAS_BACKEND=jax duoka run --devices W --replicas R tests/process/keras_scenarios.py [name ...]

With --plain each scenario is also trained in the ordinary way: on one device, tied to no strategy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers

SCENARIOS: dict[str, Callable] = {}
is_plain = False


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


class Plain:
    """Duoka's words on one device: what an unconverted script does."""

    def scope(self):
        return contextlib.nullcontext()

    def prepare(self, model):
        return model


def numbers(rows: int = 101, features: int = 12):
    generator = np.random.default_rng(5)
    x = generator.standard_normal((rows, features)).astype("float32")
    return x, generator.integers(0, 4, rows)


def tokens(rows: int = 101, length: int = 9, vocabulary: int = 30):
    """Few of them come often, so that the gradient of the table has repeated rows."""
    generator = np.random.default_rng(6)
    x = (generator.random((rows, length)) ** 3 * vocabulary).astype("int32")
    return x, generator.integers(0, 4, rows), generator.random(rows).astype("float32") + 0.5


@scenario
def everything_at_once(strategy):
    """BatchNorm, dropout, embedding, accumulation, EMA, an uneven last batch, shuffling."""
    keras.utils.set_random_seed(7)
    x, y, _ = tokens(93)
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Embedding(30, 8),
                layers.Conv1D(8, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Dropout(0.3),
                layers.GlobalMaxPooling1D(),
                layers.Dense(4),
            ]
        )
        optimizer = keras.optimizers.Adam(
            1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=5, global_clipnorm=1.0
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model, model.fit(x, y, batch_size=12, epochs=3, verbose=0)


def train_text(strategy, optimizer, epochs=20):
    """Convolution, embedding with repeated tokens, clip norm, l2, sample weights, an uneven last batch; 220 steps."""
    keras.utils.set_random_seed(7)
    x, y, weight = tokens(101)
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Embedding(30, 8),
                layers.Conv1D(8, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
                layers.GlobalMaxPooling1D(),
                layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model, model.fit(x, y, sample_weight=weight, batch_size=10, epochs=epochs, verbose=0, shuffle=True)


@scenario
def sgd_briefly(strategy):
    return train_text(strategy, keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5), epochs=3)


@scenario
def sgd(strategy):
    return train_text(strategy, keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5))


@scenario
def adamw(strategy):
    return train_text(strategy, keras.optimizers.AdamW(1e-3, weight_decay=1e-2, global_clipnorm=0.5))


@scenario
def nadam(strategy):
    return train_text(strategy, keras.optimizers.Nadam(1e-3, global_clipnorm=0.5))


@scenario
def last_batch_of_one(strategy):
    """More replicas than rows: those without are left out."""
    keras.utils.set_random_seed(7)
    x, y = numbers(31)
    model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    model = strategy.prepare(model)
    return model, model.fit(x, y, batch_size=10, epochs=5, verbose=0, validation_data=(x[:13], y[:13]))


@scenario
def frozen_layers(strategy):
    """Weights that nobody trains stay as they are, to the last bit; BatchNorm in them does, too."""
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    with strategy.scope():
        base = keras.Sequential([keras.Input((12,)), layers.Dense(16), layers.BatchNormalization()])
        base.trainable = False
        model = keras.Sequential([base, layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    before = [keras.ops.convert_to_numpy(variable.value) for variable in base.variables]
    history = model.fit(x, y, batch_size=10, epochs=3, verbose=0)
    for variable, value in zip(base.variables, before, strict=True):
        assert np.array_equal(keras.ops.convert_to_numpy(variable.value), value), variable.path
    return model, history


class Moods(keras.callbacks.Callback):
    """Changes the learning rate by the logs; stops after a batch, on one worker only."""

    def __init__(self, stops: bool):
        super().__init__()
        self.stops, self.batches = stops, 0

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.05 / (1 + logs["val_loss"])

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 10 and self.stops:
            self.model.stop_training = True


@scenario
def moody_callbacks(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    is_last = getattr(strategy, "worker", 0) == getattr(strategy, "num_workers", 1) - 1
    return model, model.fit(
        x, y, batch_size=10, epochs=4, verbose=0, callbacks=[Moods(is_last)], validation_data=(x[:13], y[:13])
    )


class Death(keras.callbacks.Callback):
    """With --struck, worker 1 dies before its part of a batch."""

    def __init__(self, strategy):
        super().__init__()
        self.is_victim, self.batches = getattr(strategy, "worker", 0) == 1 and "--struck" in sys.argv, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        if self.is_victim and self.batches == 6:
            os.kill(os.getpid(), signal.SIGKILL)


@scenario
def a_death(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(53)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model, model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Death(strategy)])


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


@scenario
def own_train_step(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.build((None, x.shape[1]))
        history = model.fit(x, y, batch_size=10, epochs=4, verbose=0)  # training inside the scope, too
    return model, history


@scenario
def masked_beside_unmasked(strategy):
    """Two outputs, one hidden by a mask where rows are padded; weighted means; class weights are below."""
    keras.utils.set_random_seed(7)
    x, y, weight = tokens(41)
    x[np.arange(9)[None] >= np.random.default_rng(2).integers(2, 9, (41, 1))] = 0
    with strategy.scope():
        inputs = keras.Input((9,), dtype="int32")
        embedded = layers.Embedding(30, 8, mask_zero=True)(inputs)
        steps = layers.Dense(30, name="steps")(embedded)
        whole = layers.Dense(4, name="whole")(layers.GlobalAveragePooling1D()(embedded))
        model = keras.Model(inputs, {"steps": steps, "whole": whole})
        losses = {
            "steps": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "whole": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        }
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), losses, loss_weights={"steps": 0.7, "whole": 1.0})
    weights = {"steps": np.repeat(weight[:, None], 9, 1), "whole": weight}
    return model, model.fit(x, {"steps": x, "whole": y}, sample_weight=weights, batch_size=10, epochs=4, verbose=0)


@scenario
def sum_reduction(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    weights = {0: 1.0, 1: 0.5, 2: 2.0, 3: 1.5}
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0, class_weight=weights, validation_split=0.2)


@scenario
def batches_from_a_dataset(strategy):
    """A PyDataset with dictionaries, and train_on_batch afterwards."""
    keras.utils.set_random_seed(7)
    x, y = numbers(33)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(10 * index, 10 * index + 10)
            return {"left": x[rows, :6], "right": x[rows, 6:]}, y[rows]

    with strategy.scope():
        left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
        hidden = layers.Dense(16, activation="relu")(layers.Concatenate()([left, right]))
        model = keras.Model({"left": left, "right": right}, layers.Dense(4)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    history = model.fit(Batches(), epochs=3, verbose=0, steps_per_epoch=3)
    more = model.train_on_batch({"left": x[:7, :6], "right": x[:7, 6:]}, y[:7], return_dict=True)
    history.history["more"] = [float(more["loss"])]
    return model, history


@scenario
def weights_now_and_then(strategy):
    """The denominator of the loss is a number of rows at first, then a sum of weights, and so on."""
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    weight = np.random.default_rng(3).random(33).astype("float32") + 0.1
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    losses = []
    for given in (None, weight, None, weight):
        history = model.fit(x, y, sample_weight=given, batch_size=10, epochs=1, verbose=0)
        losses += history.history["loss"]
    history.history["loss"] = losses
    return model, history


class Positions(layers.Layer):
    """Adds an embedding of the place of a word: its gradient has the same rows in every replica."""

    def __init__(self):
        super().__init__()
        self.words, self.places = layers.Embedding(30, 8), layers.Embedding(9, 8)

    def build(self, shape):
        self.words.build(shape)
        self.places.build((9,))

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(9))


@scenario
def positions(strategy):
    keras.utils.set_random_seed(7)
    x, y, _ = tokens(37)
    with strategy.scope():
        model = keras.Sequential([Positions(), layers.GlobalAveragePooling1D(), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1), loss)
    return model, model.fit(x, y, batch_size=10, epochs=3, verbose=0)


class Additions(layers.Layer):
    """A mean and a sum of its own among the losses."""

    def call(self, x):
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        if is_plain:
            self.add_loss(1e-3 * keras.ops.sum(keras.ops.abs(x)))
        else:
            import duoka.keras

            self.add_loss(1e-3 * duoka.keras.sum_loss(keras.ops.sum(keras.ops.abs(x))))
        return x


@scenario
def added_losses(strategy):
    """Regularisers and add_loss are means; a sum is said to be one."""
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), Additions(), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


@scenario
def no_reduction(strategy):
    """A loss for each row: only TensorFlow takes its gradient, as that of the sum."""
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    reduction = "none" if keras.backend.backend() == "tensorflow" else "sum"
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


@scenario
def mixed_precision(strategy):
    """Losses are scaled before, and gradients unscaled after the sum.

    Softplus and a small scale: at the kink of ReLU a rounding to 16 bits turns units on or off, on one device as on
    four; and where gradients overflow 16 bits, which depends on the size of a share, a step is left out.
    """
    keras.utils.set_random_seed(7)
    x, y = numbers(33)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential([layers.Dense(16, activation="softplus"), layers.Dense(4, dtype="float32")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model.compile(keras.optimizers.LossScaleOptimizer(optimizer, 256.0), loss, metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


@scenario
def compiled_further(strategy):
    """XLA, and several batches in one call of the training function, which the number of batches does not divide."""
    keras.utils.set_random_seed(7)
    x, y = numbers(47)
    is_torch = keras.backend.backend() == "torch"
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dropout(0.2, seed=3), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            loss,
            metrics=["accuracy"],
            jit_compile=not is_torch,
            steps_per_execution=1 if is_torch else 2,
        )
    return model, model.fit(x, y, batch_size=10, epochs=3, verbose=0)


@scenario
def eager(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(23)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], run_eagerly=True)
    return model, model.fit(x, y, batch_size=10, epochs=2, verbose=0)


class Largest(keras.metrics.Metric):
    """No sum: Duoka says so."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


@scenario
def a_metric_that_is_no_sum(strategy):
    keras.utils.set_random_seed(7)
    x, y = numbers(23)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = [Largest(), keras.metrics.SparseTopKCategoricalAccuracy(2)]
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
    return model, model.fit(x, y, batch_size=10, epochs=2, verbose=0)


def describe(model, history) -> dict:
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    weights = {f"{n} {v.path}": keras.ops.convert_to_numpy(v.value) for n, v in enumerate(model.trainable_variables)}
    return {
        "sha256": digest.hexdigest(),
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "weights": {name: value.astype(float).tolist() for name, value in weights.items()},
    }


def main(scenarios: dict[str, Callable]) -> None:
    global is_plain
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or list(scenarios)
    results = {}
    for kind in ("plain", "ours") if "--plain" in sys.argv else ("ours",):
        is_plain = kind == "plain"
        for name in names:
            import duoka

            strategy = Plain() if is_plain else duoka.Mirrored(devices=2)
            begin = time.perf_counter()
            results.setdefault(kind, {})[name] = describe(*scenarios[name](strategy))
            print(f"{kind} {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main(SCENARIOS)
