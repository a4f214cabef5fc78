"""Keras scripts that save between two calls of `fit`, and change something around it: they go on at the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, start

pytestmark = [pytest.mark.slow]
LEAVES = ("torchinductor_", "__autograph_generated_file")

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
import keras
import numpy as np
import duoka

where, workers = sys.argv[1], int(sys.argv[2])
strategy = duoka.Mirrored(devices=workers, replicas=2, respawn=False)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).standard_normal((40, 6)).astype("float32")
y = x.sum(1, keepdims=True)
with strategy.scope():
    parts = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential(parts)
    model.compile(keras.optimizers.Adam(0.01), "mse")
checkpoints = None if where == "calm" else strategy.checkpoint("../saved", every_steps=1000)
num_saves = 0


def die(place):
    struck = Path("../struck")
    if place == where and not struck.exists():
        strategy.barrier()
        struck.touch()
        os.kill(os.getpid(), 9)


def save():
    global num_saves
    num_saves += 1
    if checkpoints is not None:
        checkpoints.save()
    die(f"save {num_saves}")


def change():
    model.optimizer.learning_rate = 0.5 * float(model.optimizer.learning_rate)
    for variable in model.trainable_variables:
        variable.assign(0.9 * variable)
    np.random.rand()


class Dying(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if num_saves == 2 and batch == 2:
            die("second fit")


def fit():
    return model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Dying()]).history


first = fit()
model.save("../first.keras")
change()
save()
change()
save()
change()
second = fit()
change()
save()
digest = hashlib.sha256()
for variable in (*model.variables, *model.optimizer.variables):
    if "seed" not in variable.path:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
for weights in keras.saving.load_model("../first.keras", compile=False).get_weights():
    digest.update(weights.tobytes())  # those of the first fit, whatever came later
strategy.print("hash", digest.hexdigest(), first, second, np.random.rand())
"""


def run(place: Path, backend: str, where: str, workers: int) -> Ended:
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return start(place, SCRIPT, where, str(workers), program=PYTHON, env=environ).finish(START_S, LEAVES)


@pytest.mark.parametrize(
    ("backend", "workers"),
    [
        pytest.param(backend, workers, marks=getattr(pytest.mark, backend))
        for backend, workers in (("torch", 2), ("jax", 1), ("tensorflow", 1))
    ],
)
def test_a_script_that_saves_between_fits_goes_on_at_the_place_of_the_save(backend, workers, tmp_path):
    calm = run(tmp_path / "calm", backend, "calm", workers)
    assert calm.code == 0 and "hash" in calm.out, calm.err
    for where in ("save 1", "save 2", "second fit", "save 3"):
        place = tmp_path / where.replace(" ", "-")
        struck = run(place, backend, where, workers)
        assert struck.code == 137 and (place / "struck").exists(), struck.err
        before = len(os.listdir(place / "saved"))
        ended = run(place, backend, where, workers)
        assert ended.code == 0 and "resumed from" in ended.err, ended.err
        assert ended.out == calm.out, where
        assert before > 1, "something was saved"
