"""Datasets of tf.data that one worker reads for all without being asked, and streams that it must not read alone.

    KERAS_BACKEND=tensorflow duoka run --devices 2 tests/process/keras_restarting.py [--twice] [--struck] [name ...]

Each worker prints what it found, as JSON. With --struck the worker that reads for all is killed in the last scenario.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import duoka
from duoka.frameworks.keras import restarting
from duoka.frameworks.keras.stream import Stream

SCENARIOS: dict[str, Callable] = {}
SHARE = None
STRUCK: list[str] = []  # not empty: the reader is killed
ROWS = 6
COUNT = 17  # batches
LONG_S = 0.01
READ = [0]  # batches, by this worker


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


def count_reads() -> None:
    read = Stream.read

    def counted(stream):
        READ[0] += 1
        return read(stream)

    Stream.read = counted


def make(strategy, **options) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return strategy.prepare(model)


def facts_of(model, *histories) -> dict:
    state = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        state.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    read, READ[0] = READ[0], 0
    return {"sha256": state.hexdigest(), "history": [history.history for history in histories], "read": read}


def paint(number):
    """What takes long, and follows from the number: powers of a matrix."""
    picture = tf.random.stateless_normal((96, 96), [tf.cast(number, tf.int32), 1])
    for _ in range(4):
        picture = tf.tanh(tf.matmul(picture, picture))
    return picture[:4, :4, None], number % 3


def pictures() -> tf.data.Dataset:
    """Shuffled anew for each run through them, as those of image_dataset_from_directory are."""
    numbers = tf.data.Dataset.range(COUNT * ROWS - 1).shuffle(40, seed=3)
    return numbers.map(paint, num_parallel_calls=tf.data.AUTOTUNE).batch(ROWS).prefetch(tf.data.AUTOTUNE)


def fit(model, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of streams that end
        return model.fit(x, **({"verbose": 0} | options))


@scenario
def two_fits(strategy):
    model, dataset = make(strategy), pictures()
    first = fit(model, dataset, epochs=3, validation_data=dataset, class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    return facts_of(model, first, fit(model, dataset, epochs=2))


@scenario
def several_steps_at_once(strategy):
    model = make(strategy, steps_per_execution=4)
    return facts_of(model, fit(model, pictures(), epochs=3))


@scenario
def a_part_of_each_run(strategy):
    """Other workers drop iterators that they have never read."""
    model, dataset = make(strategy), pictures()
    histories = [fit(model, dataset, steps_per_epoch=12, epochs=2), fit(model, dataset.take(3), epochs=2)]
    return facts_of(model, *histories, fit(model, dataset, epochs=1))


@scenario
def an_error_and_another_fit(strategy):
    """A callback fails in the middle; the script goes on with the same dataset."""

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 13:
                raise KeyError("caught")

    model, dataset = make(strategy), pictures()
    try:
        fit(model, dataset, epochs=2, callbacks=[Failing()])
    except KeyError:
        return facts_of(model, fit(model, dataset, epochs=2))


def slowly(pixels):
    time.sleep(LONG_S)
    return pixels


@scenario
def a_layer_that_draws(strategy):
    """The layer keeps a seed in a variable, which moves on with each batch that is read."""
    flip = layers.RandomFlip(seed=5)
    rows = np.random.default_rng(1).standard_normal((COUNT * ROWS, 4, 4, 1)).astype("float32"), np.arange(COUNT * ROWS)

    def change(pixels, label):
        pixels = tf.ensure_shape(tf.numpy_function(slowly, [flip(pixels, training=True)], tf.float32), (None, 4, 4, 1))
        return pixels, label % 3

    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(ROWS).map(change)
    model = make(strategy)
    return facts_of(model, fit(model, dataset, epochs=2), fit(model, dataset, epochs=1))


@scenario
def a_generator_that_goes_on(strategy):
    """On TensorFlow threads read ahead of it, and a second training goes on behind what they have read."""
    draws = np.random.default_rng(5)

    def batches():
        while True:
            time.sleep(LONG_S)
            yield draws.standard_normal((ROWS, 4, 4, 1)).astype("float32"), draws.integers(0, 3, ROWS)

    model, x = make(strategy), batches()
    times = 1 if keras.backend.backend() == "tensorflow" else 2
    return facts_of(model, *(fit(model, x, steps_per_epoch=COUNT) for _ in range(times)))


class Changing(keras.utils.PyDataset):
    """Shuffles itself at the end of an epoch, draws from a generator of its own and from NumPy's."""

    def __init__(self):
        super().__init__()
        self.own, self.order = np.random.default_rng(3), np.arange(COUNT)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        time.sleep(LONG_S)
        noise = self.own.standard_normal((ROWS, 4, 4, 1)) + np.random.rand(ROWS, 4, 4, 1)
        return (self.order[index] + noise).astype("float32"), np.arange(ROWS) % 3

    def on_epoch_end(self):
        np.random.shuffle(self.order)


@scenario
def a_dataset_with_generators(strategy):
    model, x = make(strategy), Changing()
    np.random.seed(3)
    return facts_of(model, *(fit(model, x, epochs=2, validation_data=x) for _ in range(2)))


@scenario
def who_restarts(strategy):
    """Which datasets may be read by one worker for all, by what they are made of."""
    return {"restarts": those_that_restart()}


@cache
def those_that_restart() -> list[str]:
    numbers = tf.data.Dataset.range(8)
    variable, generator = tf.Variable(1, dtype=tf.int64), tf.random.Generator.from_seed(1)
    flip = layers.RandomFlip(seed=5)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2], tf.int64, tf.int64), 0)
    unordered = tf.data.Options()
    unordered.deterministic = False
    datasets = {
        "pictures": pictures(),
        "folder": folder(),
        "slices": tf.data.Dataset.from_tensor_slices(np.ones(3)).repeat().batch(2),
        "records": tf.data.TFRecordDataset(["none"]).map(lambda record: tf.io.decode_raw(record, tf.uint8)),
        "interleaved": numbers.interleave(lambda n: tf.data.TFRecordDataset("none"), cycle_length=2),
        "shuffled, then repeated": numbers.shuffle(8, seed=1).repeat(2),
        "shuffled and concatenated": numbers.concatenate(numbers.shuffle(8, seed=1)),
        "shuffled inside": numbers.flat_map(lambda n: tf.data.Dataset.range(n).shuffle(8, seed=1)),
        "cached": numbers.shuffle(8, seed=1).cache(),
        "python": numbers.map(lambda n: tf.py_function(slowly, [n], tf.int64)),
        "numpy": numbers.map(lambda n: tf.numpy_function(slowly, [n], tf.int64, stateful=False)),
        "generator": tf.data.Dataset.from_generator(lambda: iter([1]), output_types=tf.int32),
        "variable": numbers.map(lambda n: n + variable.assign_add(1)),
        "table": numbers.map(table.lookup),
        "random": numbers.map(lambda n: tf.random.uniform(()) + tf.cast(n, tf.float32)),
        "random in a branch": numbers.map(lambda n: tf.cond(n > 3, lambda: tf.random.uniform(()), lambda: 0.0)),
        "random generator": numbers.map(lambda n: generator.uniform(())),
        "random numbers": tf.data.Dataset.random(seed=1),
        "layer": numbers.map(lambda n: flip(tf.zeros((1, 4, 4, 1)), training=True)),
        "without order": numbers.map(lambda n: n + 1, num_parallel_calls=2, deterministic=False),
        "without order by options": numbers.with_options(unordered),
    }
    return [name for name, dataset in datasets.items() if restarting.restarts(dataset)]


def folder() -> tf.data.Dataset:
    with tempfile.TemporaryDirectory() as directory:
        for number in range(4):
            path = Path(directory, str(number % 2), f"{number}.png")
            path.parent.mkdir(exist_ok=True)
            keras.utils.save_img(path, np.full((8, 8, 3), 60 * number))
        dataset = keras.utils.image_dataset_from_directory(directory, image_size=(4, 4), batch_size=2, verbose=False)
        return dataset.map(lambda pixels, label: (pixels / 127.5 - 1, label))


@scenario
def reader_dies_in_a_second_fit(strategy):
    class Death(keras.callbacks.Callback):
        num_batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.num_batches += 1
            if self.num_batches == COUNT + 9 and strategy.worker == 0 and strategy.num_workers > 1:
                os.kill(os.getpid(), signal.SIGKILL)

    model, dataset = make(strategy), pictures()
    first = fit(model, dataset, epochs=2)
    return facts_of(model, first, fit(model, dataset, epochs=3, callbacks=[Death()] if STRUCK else None))


def main() -> None:
    """With --twice, every worker reads for itself at first, and nobody is killed."""
    count_reads()
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or SCENARIOS
    facts: dict[str, dict] = {"by_all": {}, "by_one": {}}
    for who, share in (("by_all", False), ("by_one", SHARE)):
        strategy = duoka.Mirrored(share_reading=share)
        STRUCK[:] = ["--struck"] * (who == "by_one" and "--struck" in sys.argv)
        for name in names if who == "by_one" or "--twice" in sys.argv else ():
            print("BEGIN", name, flush=True)
            facts[who][name] = SCENARIOS[name](strategy)
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
