"""Small Keras trainings, run as a script on some number of workers; prints one JSON line of digests and weights.

    KERAS_BACKEND=jax duoka run --devices W --replicas R tests/process/keras_scenarios.py [name ...]

With --plain each scenario is also trained in the ordinary way: on one device, tied to no strategy.
"""

from __future__ import annotations

import os
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers
from keras_losses import (
    added_losses,
    masked_beside_unmasked,
    no_reduction,
    one_number_for_a_batch,
    sum_reduction,
    weights_now_and_then,
)
from keras_own_step import own_train_step
from keras_pieces import (
    SCENARIOS,
    Plain,
    Positions,
    classifier,
    compiled,
    describe,
    numbers,
    scenario,
    tokens,
)
from results import print_result

# Made before any strategy, without a seed, as people do.
ORDER = np.random.permutation(93)
LABELS = list({"grain", "crude", "trade", "ship"})


@scenario
def everything_at_once(strategy):
    """BatchNorm, dropout, embedding, accumulation, EMA, an uneven last batch, shuffling."""
    x, y, _ = tokens(93)
    x, y = x[ORDER], np.array([LABELS.index(sorted(LABELS)[label]) for label in y[ORDER]])
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
        compiled(model, optimizer, metrics=["accuracy"])
    return model, model.fit(x, y, batch_size=12, epochs=3, verbose=0)


def train_text(strategy, optimizer, epochs=20):
    """Convolution, embedding with repeated tokens, clip norm, l2, sample weights, an uneven last batch; 220 steps."""
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
        compiled(model, optimizer, metrics=["accuracy"], weighted_metrics=["accuracy"])
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
    x, y = numbers(31)
    model = compiled(classifier(), metrics=["accuracy"])
    model = strategy.prepare(model)
    return model, model.fit(x, y, batch_size=10, epochs=5, verbose=0, validation_data=(x[:13], y[:13]))


@scenario
def frozen_layers(strategy):
    """Weights that nobody trains stay as they are, to the last bit; BatchNorm in them does, too."""
    x, y = numbers(33)
    with strategy.scope():
        base = keras.Sequential([keras.Input((12,)), layers.Dense(16), layers.BatchNormalization()])
        base.trainable = False
        model = compiled(keras.Sequential([base, layers.Dense(4)]), keras.optimizers.SGD(0.1))
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
    x, y = numbers(33)
    with strategy.scope():
        model = compiled(classifier(), metrics=["accuracy"])
    is_last = strategy.worker == strategy.num_workers - 1
    return model, model.fit(
        x, y, batch_size=10, epochs=4, verbose=0, callbacks=[Moods(is_last)], validation_data=(x[:13], y[:13])
    )


class Death(keras.callbacks.Callback):
    """With --struck, worker 1 dies before its part of a batch."""

    def __init__(self, strategy):
        super().__init__()
        self.is_victim, self.batches = strategy.worker == 1 and "--struck" in sys.argv, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        if self.is_victim and self.batches == 6:
            os.kill(os.getpid(), signal.SIGKILL)


@scenario
def a_death(strategy):
    x, y = numbers(53)
    with strategy.scope():
        model = compiled(
            keras.Sequential([layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(4)]),
            keras.optimizers.Adam(0.01),
            metrics=["accuracy"],
        )
    return model, model.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Death(strategy)])


@scenario
def batches_from_a_dataset(strategy):
    """A PyDataset with dictionaries, and train_on_batch afterwards."""
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
        compiled(model, metrics=["accuracy"])
    history = model.fit(Batches(), epochs=3, verbose=0, steps_per_epoch=3)
    more = model.train_on_batch({"left": x[:7, :6], "right": x[:7, 6:]}, y[:7], return_dict=True)
    history.history["more"] = [float(more["loss"])]
    return model, history


@scenario
def positions(strategy, epochs=3, **options):
    x, y, _ = tokens(37)
    with strategy.scope():
        model = compiled(
            keras.Sequential([Positions(), layers.GlobalAveragePooling1D(), layers.Dense(4)]),
            keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1),
            **options,
        )
    return model, model.fit(x, y, batch_size=10, epochs=epochs, verbose=0)


@scenario
def positions_run_eagerly(strategy):
    return positions(strategy, epochs=1, run_eagerly=True)


@scenario
def positions_of_several_lengths(strategy):
    """On TensorFlow, one graph for all of them: it knows neither the number of rows nor that of places."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return tokens(12 - index % 2, length=(9, 12, 6, 12)[index])[:2]

    with strategy.scope():
        model = compiled(
            keras.Sequential([Positions(), layers.GlobalAveragePooling1D(), layers.Dense(4)]),
            keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1),
        )
    return model, model.fit(Batches(), epochs=2, verbose=0, shuffle=False)


@scenario
def mixed_precision(strategy):
    """Losses are scaled before, and gradients unscaled after the sum.

    Softplus and a small scale: at the kink of ReLU a rounding to 16 bits turns units on or off, on one device as on
    four; and where gradients overflow 16 bits, which depends on the size of a share, a step is left out.
    """
    x, y = numbers(33)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential([layers.Dense(16, activation="softplus"), layers.Dense(4, dtype="float32")])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            compiled(model, keras.optimizers.LossScaleOptimizer(optimizer, 256.0), metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    return model, model.fit(x, y, batch_size=10, epochs=4, verbose=0)


@scenario
def compiled_further(strategy):
    """XLA, and several batches in one call of the training function, which the number of batches does not divide."""
    x, y = numbers(47)
    is_torch = keras.backend.backend() == "torch"
    with strategy.scope():
        model = compiled(
            classifier(layers.Dropout(0.2, seed=3)),
            metrics=["accuracy"],
            jit_compile=not is_torch,
            steps_per_execution=1 if is_torch else 2,
        )
    return model, model.fit(x, y, batch_size=10, epochs=3, verbose=0)


@scenario
def accumulated(strategy):
    """What happens after the mean, in `fit` as it is compiled at most: the numbers of one device."""
    x, y = numbers(47)
    is_torch = keras.backend.backend() == "torch"
    with strategy.scope():
        optimizer = keras.optimizers.SGD(
            0.05, momentum=0.9, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=4, clipnorm=0.5
        )
        options = {} if is_torch else {"jit_compile": True, "steps_per_execution": 2}
        model = compiled(classifier(), optimizer, metrics=["accuracy"], **options)
    return model, model.fit(x, y, batch_size=10, epochs=6, verbose=0)


class Odd(layers.Layer):
    """A count of rows, a mean that is no BatchNorm's, a weight without a gradient, noise of the global generator."""

    def build(self, shape):
        self.most = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="most")
        self.level = self.add_weight(shape=(), initializer="zeros", trainable=False, name="level")
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def call(self, x, training=False):
        if not training:
            return x
        self.most.assign(keras.ops.maximum(self.most, keras.ops.cast(keras.ops.max(x) * 100, "int32")))
        self.level.assign(keras.ops.mean(x))
        is_jax = keras.backend.backend() == "jax"  # where a step cannot draw from it
        return x if is_jax else x + 0.01 * keras.random.normal(keras.ops.shape(x))


@scenario
def odd_state(strategy):
    x, y = numbers(31)
    with strategy.scope():
        model = compiled(classifier(Odd()), keras.optimizers.SGD(0.1))
    return model, model.fit(x, y, batch_size=10, epochs=3, verbose=0)


@scenario
def eager(strategy):
    x, y = numbers(23)
    with strategy.scope():
        model = compiled(classifier(), metrics=["accuracy"], run_eagerly=True)
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
    x, y = numbers(23)
    with strategy.scope():
        metrics = [Largest(), keras.metrics.SparseTopKCategoricalAccuracy(2)]
        model = compiled(keras.Sequential([layers.Dense(4)]), keras.optimizers.SGD(0.1), metrics=metrics)
    return model, model.fit(x, y, batch_size=10, epochs=2, verbose=0)


class Seen(keras.metrics.Metric):
    """A metric of the user's own: counts batches, or rows."""

    def __init__(self, name):
        super().__init__(name=name)
        self.number = self.add_variable((), "zeros", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(1.0 if self.name == "batches_seen" else keras.ops.sum(keras.ops.ones_like(y_true)))

    def result(self):
        return keras.ops.convert_to_tensor(self.number)


@scenario
def a_metric_that_counts_batches(strategy):
    x, y = numbers(23)
    with strategy.scope():
        metrics = [Seen("batches_seen"), Seen("rows_seen"), "accuracy"]
        model = compiled(classifier(layers.BatchNormalization(), layers.Dropout(0.3)), metrics=metrics)
    return model, model.fit(x, y, batch_size=12, epochs=2, verbose=0)


for function in (
    own_train_step,
    masked_beside_unmasked,
    sum_reduction,
    weights_now_and_then,
    added_losses,
    no_reduction,
    one_number_for_a_batch,
):
    scenario(function)


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or list(SCENARIOS)
    results: dict[str, dict] = {}
    for kind in ("plain", "ours") if "--plain" in sys.argv else ("ours",):
        for name in names:
            import duoka

            strategy = Plain() if kind == "plain" else duoka.Mirrored(devices=2)
            begin = time.perf_counter()
            keras.utils.set_random_seed(7)
            model, history = SCENARIOS[name](strategy)
            results.setdefault(kind, {})[name] = describe(model, history, model.trainable_variables)
            print(f"{kind} {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    print_result(results)


if __name__ == "__main__":
    main()
