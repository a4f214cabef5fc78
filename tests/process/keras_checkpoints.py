"""A Keras script with checkpoints, to be ended in every way: two calls of `fit`, and what is between them.

KERAS_BACKEND=torch python tests/process/keras_checkpoints.py '{"workers": 2, "directory": "saved", "seconds": 0.1}'
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import duoka

given = json.loads(sys.argv[1])
# Before Keras is imported: the process becomes the supervisor here, which has no use for it.
strategy = duoka.Mirrored(
    devices=given["workers"], replicas=given.get("replicas", 4), seed=given.get("seed", 0), respawn=False
)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402


class Tally:
    """An object in `also`, which callbacks and the script change."""

    def __init__(self) -> None:
        self.epochs, self.notes = 0, []

    def state_dict(self):
        return {"epochs": self.epochs, "notes": self.notes}

    def load_state_dict(self, state):
        self.epochs, self.notes = state["epochs"], state["notes"]


tally = Tally()


class Counter(keras.callbacks.Callback):
    """A user's own: it counts, draws, and says how far it is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.batches, self.drawn, self.notes = name, 0, 0.0, []

    def on_train_begin(self, logs=None):
        self.began = tally.epochs

    def on_epoch_begin(self, epoch, logs=None):
        self.drawn += np.random.rand()
        tally.epochs += 1

    def on_train_end(self, logs=None):
        tally.notes.append("end")

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.notes.append((self.batches, batch, round(float(logs["loss"]), 6)))
        strategy.print(f"did {self.name} {self.batches} {batch}", flush=True)
        time.sleep(given.get("seconds", 0))


class Parts(keras.metrics.MeanAbsoluteError):
    """Tells an array, as F1Score does for several classes."""

    def result(self):
        return keras.ops.stack([self.total.value, self.count.value])


class Rows(keras.utils.PyDataset):
    """Shuffles itself with a generator of its own."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.chance = x, y, np.random.default_rng(5)
        self.order = self.chance.permutation(len(x))

    def __len__(self):
        return 7

    def __getitem__(self, index):
        rows = self.order[index * 8 : index * 8 + 8]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.order = self.chance.permutation(len(self.x))


def make(width: int) -> keras.Model:
    model = keras.Sequential([layers.Dense(width, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)])
    model.add(layers.Dense(1))
    averages = {} if given.get("plain_end") else {"use_ema": True, "ema_overwrite_frequency": 5}
    rate, beta = given.get("rate", 0.01), given.get("beta", 0.9)
    optimizer = keras.optimizers.Adam(rate, beta_1=beta, **averages)
    if given.get("optimizer"):
        optimizer = getattr(keras.optimizers, given["optimizer"])(rate, **averages)
    metrics = ["mae", Parts(name="parts")]
    model.compile(optimizer, "mse", metrics=metrics, steps_per_execution=given.get("steps_per_execution", 1))
    return model


def draw_source(kind: str, x, y):
    """What `fit` trains on: `kind` is one of arrays, rows, dataset, drawing, loader, generator."""
    if kind == "rows":
        return {"x": Rows(x, y)}
    if kind in ("dataset", "drawing"):
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=3)
        if kind == "drawing":
            shake = lambda x, y: (x + 0.01 * tf.random.normal(tf.shape(x), dtype=x.dtype), y)  # noqa: E731
            dataset = dataset.map(shake, num_parallel_calls=4)
        return {"x": dataset.batch(8)}
    if kind == "loader":
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        return {"x": DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(7))}
    if kind == "generator":

        def draw():
            chance = np.random.default_rng(9)
            while True:
                rows = chance.integers(0, len(x), 7)
                yield x[rows], y[rows]

        return {"x": draw(), "steps_per_epoch": 7}
    return {"x": x, "y": y, "batch_size": 8}


def stop_early():
    is_kept, patience = not given.get("plain_end"), given.get("patience", 2)
    return keras.callbacks.EarlyStopping("val_loss", patience=patience, min_delta=0.001, restore_best_weights=is_kept)


def halve(model) -> None:
    model.set_weights([weight / 2 for weight in model.get_weights()])


def train_on_batches(model, x, y) -> None:
    """A loop of the user's own, which draws its batches from a common generator."""
    losses = []
    for number in range(24):
        rows = np.random.randint(0, len(x), 8)
        losses.append(float(model.train_on_batch(x[rows], y[rows])[0]))
        strategy.print(f"did batch {number}", flush=True)
        time.sleep(given.get("seconds", 0))
    strategy.print("losses", json.dumps(losses[-3:]))


def main() -> None:
    keras.utils.set_random_seed(3)
    x, y = np.random.rand(50, 8).astype("float32"), np.random.rand(50, 1).astype("float32")
    with strategy.scope():
        model = make(given.get("width", 16))
    strategy.register(tally=tally)
    if "directory" in given:
        strategy.checkpoint(given["directory"], every_steps=3)
    seen = [[], []]
    if given.get("by_hand"):
        train_on_batches(model, x, y)
    for number, kind in enumerate(given.get("kinds", ["arrays", "arrays"])):
        callbacks = [
            Counter(f"fit{number}"),
            stop_early(),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05, cooldown=1),
            keras.callbacks.CSVLogger(os.path.join(given.get("folder", "."), f"log{number}.csv")),
        ]
        if given.get("changes_end"):
            callbacks.append(keras.callbacks.LambdaCallback(on_train_end=lambda logs: halve(model)))
        history = model.fit(
            **draw_source(kind, x, y),
            epochs=given.get("epochs", 4),
            validation_data=(x[:13], y[:13]),
            verbose=0,
            callbacks=callbacks,
        )
        score = model.evaluate(x, y, verbose=0)
        counter, stopping, *_ = callbacks
        tally.notes.append(f"after {tally.epochs} epochs")
        seen.append([counter.began, tally.epochs, *tally.notes])
        seen.append([history.history, history.epoch, score, float(np.random.rand())])
        seen.append(
            [counter.batches, counter.drawn, counter.notes, stopping.best, stopping.wait, stopping.stopped_epoch]
        )
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    told = json.dumps(seen, default=np.ndarray.tolist)
    digest.update(told.encode())
    if given.get("verbose"):
        strategy.print("seen", told)
    strategy.print("hash", digest.hexdigest(), strategy.step, seen[-2][:2], flush=True)


main()
