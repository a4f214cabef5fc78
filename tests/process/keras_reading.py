"""Streams that take long to read, on one worker or several; each worker prints what it found, as JSON.

    KERAS_BACKEND=torch duoka run --devices 3 tests/process/keras_reading.py [--twice] [--struck] [name ...]

With --struck, the worker that reads for all is killed in the last two scenarios, as long as there is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
from keras import layers

import duoka

SCENARIOS: dict[str, Callable] = {}
SHARE = True
STRUCK: list[str] = []  # not empty: the reader is killed
LONG_S = 0.01  # a good part of a step
ROWS = 9


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


def make(strategy, **options) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **options)
    return strategy.prepare(model)


def batch_of(generator, rows: int = ROWS):
    return generator.standard_normal((rows, 6)).astype("float32"), generator.integers(0, 3, rows)


def validation():
    return batch_of(np.random.default_rng(11))


class Batches:
    """A generator that counts what is read of it."""

    def __init__(self, count: int, long_s: float = LONG_S, strike: Callable = lambda index: None):
        self.count, self.long_s, self.strike, self.num_read = count, long_s, strike, 0

    def __call__(self):
        draws = np.random.default_rng(5)
        for index in range(self.count):
            self.strike(index)
            if self.long_s:
                time.sleep(self.long_s)
            self.num_read += 1
            yield self.make(draws, index)

    def make(self, draws, index):
        return batch_of(draws)


class Dataset(keras.utils.PyDataset):
    """Shuffled by Keras, and changed with what comes from NumPy's global generator, as people do."""

    def __init__(self, count: int):
        super().__init__()
        self.count, self.num_read = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(LONG_S)
        self.num_read += 1
        x, y = batch_of(np.random.default_rng(index), ROWS if index else 5)
        return x + np.random.rand(*x.shape).astype("float32"), y


def facts_of(model, history, batches=None) -> dict:
    state = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        state.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    return {"sha256": state.hexdigest(), "history": history.history, "read": getattr(batches, "num_read", None)}


def train(strategy, batches, **options) -> dict:
    model = make(strategy)
    x = batches() if isinstance(batches, Batches) else batches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of streams that end
        history = model.fit(x, **({"epochs": 1, "verbose": 0} | options))
    return facts_of(model, history, batches)


@scenario
def quick_generator(strategy):
    """Every worker reads it: it takes no time."""
    return train(strategy, Batches(40, long_s=0), steps_per_epoch=13, epochs=3, validation_data=validation())


@scenario
def slow_generator(strategy):
    """The same batches; and the last one of 40 is never asked for."""
    return train(strategy, Batches(40), steps_per_epoch=13, epochs=3, validation_data=validation())


@scenario
def slow_dataset(strategy):
    """Each epoch anew, shuffled; afterwards generators are where one device would have left them."""
    found = train(strategy, Dataset(13), epochs=3, shuffle=True)
    return found | {"drawn": [float(np.random.rand()), float(np.random.default_rng(1).random())]}


@scenario
def generator_twice(strategy):
    """What a worker has left to another one in the first training, it does not take for new in the second.

    On TensorFlow threads read ahead, and a second training goes on behind what they have read: there is one only.
    """
    model, batches = make(strategy), Batches(40)
    x = batches()
    trainings = (20,) if keras.backend.backend() == "tensorflow" else (14, 6)
    histories = [model.fit(x, steps_per_epoch=steps, verbose=0) for steps in trainings]
    return facts_of(model, histories[-1], batches)


class Changing(Dataset):
    """Draws from a generator of its own, too, and shuffles itself with NumPy's at the end of an epoch."""

    def __init__(self, count: int):
        super().__init__(count)
        self.own, self.order = np.random.default_rng(3), np.arange(count)

    def __getitem__(self, index):
        x, y = super().__getitem__(self.order[index])
        return x + self.own.standard_normal(x.shape).astype("float32"), y

    def on_epoch_end(self):
        np.random.shuffle(self.order)


@scenario
def changing_dataset_twice(strategy):
    model, dataset = make(strategy), Changing(7)
    np.random.seed(3)
    model.fit(dataset, epochs=2, verbose=0, validation_data=validation())
    return facts_of(model, model.fit(dataset, epochs=2, verbose=0), dataset) | {"order": dataset.order.tolist()}


@scenario
def several_steps_at_once(strategy):
    model, batches = make(strategy, steps_per_execution=4), Batches(40)
    return facts_of(model, model.fit(batches(), steps_per_epoch=38, verbose=0), batches)


@scenario
def early_end(strategy):
    return train(strategy, Batches(17), steps_per_epoch=30, epochs=2)


@scenario
def growing_batches(strategy):
    """Larger ones than there is room for, others without rows for all replicas, and weights now and then."""

    class Growing(Batches):
        def make(self, draws, index):
            x, y = batch_of(draws, 1 if index == 15 else 4 + index**3)
            is_other = index == 18 and keras.backend.backend() != "tensorflow"  # which wants one structure
            return (x, y, np.ones(len(y), "float32")) if is_other else (x, y)

    return train(strategy, Growing(20))


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@scenario
def batch_that_cannot_be_shared(strategy):
    class Changing(Batches):
        def make(self, draws, index):
            batch = batch_of(draws)
            return Pair(*batch) if index == 15 and keras.backend.backend() != "tensorflow" else batch

    return train(strategy, Changing(20))


@scenario
def broken_stream(strategy):
    """An error that the script catches; all workers can go on."""

    def strike(index):
        if index == 15:
            raise ValueError("the file is broken")

    try:
        return train(strategy, Batches(20, strike=strike)) | {"error": "none"}
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return train(strategy, Batches(3)) | {"error": kind, "names": "the file is broken" in text}


@scenario
def reader_dies_while_it_reads(strategy):
    def strike(index):
        if index == 20 and strategy.worker == 0 and STRUCK:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(strategy, Batches(30, strike=strike), steps_per_epoch=15, epochs=2)


@scenario
def reader_dies_in_a_later_epoch(strategy):
    class Death(keras.callbacks.Callback):
        num_batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.num_batches += 1
            is_victim = strategy.worker == 1 and strategy.num_workers > 1 and STRUCK
            if self.num_batches == 30 and is_victim:
                os.kill(os.getpid(), signal.SIGKILL)

    return train(strategy, Dataset(13), epochs=3, shuffle=True, callbacks=[Death()])


def main() -> None:
    """With --twice, every worker reads for itself at first, and nobody is killed."""
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
