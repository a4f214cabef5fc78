"""A Keras script whose workers are killed in the middle of `fit`, and come back.

    KERAS_BACKEND=torch python tests/process/keras_joining.py '{"strikes": [[0, 1, 2]], "directory": "/tmp/lives"}'

Each worker prints what it knows at the end, as JSON. A strike is a worker, an epoch, and a batch of the second `fit`.
`kind` is what it trains on: arrays, dataset, rows (a PyDataset), loader, generator.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import duoka

given = json.loads(sys.argv[1])
directory, strikes = Path(given["directory"]), [tuple(strike) for strike in given["strikes"]]
strategy = duoka.Mirrored(devices=2, replicas=4, check_every=5, share_reading=given.get("share"))

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

lives = directory / f"lives-{strategy.worker}"
with lives.open("a") as file:
    file.write("x")
life = lives.stat().st_size


class Striker(keras.callbacks.Callback):
    """Kills a worker once, and holds up the others until the new one is on its way; then they are slow."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.seen = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        for worker, epoch, number in strikes:
            done = directory / f"struck-{worker}"
            if (worker, epoch, number) == (strategy.worker, self.epoch, batch) and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if done.exists() and (self.epoch, batch) > (epoch, number):
                wait_for(directory / f"ready-{worker}")
        if strategy.num_workers < 2:
            time.sleep(0.3)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, self.batches, logs["val_loss"]))


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


def make_source(x, y):
    """Both fits train on the same one."""
    kind = given.get("kind", "arrays")
    seed = life if given.get("unseeded") else 3
    if kind == "rows":
        return {"x": Rows(x, y)}
    if kind == "dataset":
        import tensorflow as tf

        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=seed).batch(8)}
    if kind == "loader":
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        return {"x": DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(7))}
    if kind == "generator":

        def draw():
            chance = np.random.default_rng(9)
            while True:
                rows = chance.integers(0, len(x), 8)
                yield x[rows], y[rows]

        return {"x": draw(), "steps_per_epoch": 7}
    return {"x": x, "y": y, "batch_size": 8}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < end, "nobody came"
        time.sleep(0.02)


anneal = {"value": 1.0}  # of the script's own: nobody hands it over


class Model(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * anneal["value"]


def main() -> None:
    keras.utils.set_random_seed(3)
    x, y = np.random.rand(50, 8).astype("float32"), np.random.rand(50, 1).astype("float32")
    with strategy.scope():
        model = Model([layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)])
        model.add(layers.Dense(1))
        eagerly = True if given.get("anneals") else None
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=eagerly)
    if given.get("saves"):
        strategy.checkpoint(directory / "saved", every_steps=2)
    source = make_source(x, y)
    first = model.fit(**source, epochs=2, verbose=0)
    drawn = float(np.random.rand())
    if life > 1:
        (directory / f"ready-{strategy.worker}").touch()
    striker = Striker()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=20, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05)
    callbacks = [striker, stopping, plateau]
    if given.get("anneals"):
        callbacks.append(
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: anneal.update(value=0.9 * anneal["value"]))
        )
    second = model.fit(**source, epochs=8, validation_data=(x[:13], y[:13]), verbose=0, callbacks=callbacks)
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    facts = {"sha256": digest.hexdigest(), "step": strategy.step, "drawn": [drawn, float(np.random.rand())]}
    facts["histories"] = [first.history, second.history, second.epoch]
    facts["callbacks"] = [striker.batches, striker.seen, stopping.best, stopping.best_epoch, plateau.wait]
    print(json.dumps({"life": life, "facts": facts}), flush=True)


main()
