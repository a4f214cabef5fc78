r"""A Keras script whose steps exchange in their middle, and whose workers are killed there: all of them start anew.

    KERAS_BACKEND=jax python tests/process/keras_going_back.py \
        '{"kind": "batchnorm", "strikes": [[0, 6]], "every": 4, "folder": "/tmp/folder"}'

Each worker prints what it ends with, as JSON. A strike is a worker, and a step in whose exchange it dies, once.
`kind` is batchnorm (sync_batchnorm), or twice (a train_step that applies two times).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import duoka

given = json.loads(sys.argv[1])
strategy = duoka.Mirrored(devices=2, sync_batchnorm=given["kind"] == "batchnorm")

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from duoka.frameworks.exchange.wire import Wire  # noqa: E402

BACKEND = keras.backend.backend()
MSE = keras.losses.MeanSquaredError()
print("life", flush=True)


class AppliesTwice(keras.Model):
    """Two updates a batch, of which the second sees what the first has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(x)

    if BACKEND == "jax":

        def train_step(self, state, data):
            import jax

            weights, other, slots, counted = state
            x, y = data
            for scale in (1.0, 0.5):
                loss, gradients = jax.value_and_grad(
                    lambda w, scale=scale: scale * MSE(y, self.stateless_call(w, other, x)[0])
                )(weights)
                weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
            return {"last": loss}, (weights, other, slots, counted)

    elif BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            for scale in (1.0, 0.5):
                with tf.GradientTape() as tape:
                    loss = scale * MSE(y, self(x))
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"last": loss}

    else:

        def train_step(self, data):
            import torch

            x, y = data
            for scale in (1.0, 0.5):
                loss = scale * MSE(y, self(x))
                gradients = torch.autograd.grad(loss, [variable.value for variable in self.trainable_variables])
                with torch.no_grad():
                    self.optimizer.apply(gradients, self.trainable_variables)
            return {"last": loss.detach()}


def strike_in_the_middle() -> None:
    exchange = Wire.sum_gradients

    def struck(wire, *gradients):
        for number, (worker, step) in enumerate(given.get("strikes", [])):
            mark = Path(given["folder"], f"struck-{number}")
            if (strategy.worker, strategy.step) == (worker, step) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return exchange(wire, *gradients)

    Wire.sum_gradients = struck


def main() -> None:
    strike_in_the_middle()
    keras.utils.set_random_seed(3)
    x, y = np.random.rand(48, 8).astype("float32"), np.random.rand(48, 1).astype("float32")
    with strategy.scope():
        if given["kind"] == "twice":
            model = AppliesTwice()
        else:
            model = keras.Sequential([layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)])
            model.add(layers.Dense(1))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    if "every" in given:
        strategy.checkpoint(Path(given["folder"], "saved"), every_steps=given["every"], keep=2)
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=None)
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    facts = {"sha256": digest.hexdigest(), "step": strategy.step, "history": history.history}
    print(json.dumps(facts), flush=True)


main()
