"""Keras trainings that end: one clear message, the traceback of whoever failed, and nobody waits for ever.

On PyTorch, which starts fastest: what is tried here is not a matter of the backend.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.limits import START_S
from tests.process.scripts import start

pytestmark = [pytest.mark.torch]
ENVIRON = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
LEAVES = ("torchinductor_",)  # a folder of PyTorch's own

MODEL = """\
import os, signal, sys, time
import keras, numpy as np
import duoka

strategy = duoka.Mirrored(devices=2)
generator = np.random.default_rng(5)
x, y = generator.random((40, 6)).astype("float32"), generator.integers(0, 3, 40)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""


@pytest.mark.slow
def test_a_model_trained_without_a_scope_is_named_in_one_line_also_when_keras_is_imported_later(tmp_path):
    source = """
import duoka

strategy = duoka.Mirrored(devices=2)
import keras, numpy as np

for _ in range(2):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)], name="mine")
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32"))
"""
    ended = start(tmp_path, source, env=ENVIRON).finish(START_S, LEAVES)
    assert ended.code == 0, ended.err[-2000:]
    assert ended.err.count("mine is not part of the strategy, and every worker trains all of it") == 1


@pytest.mark.slow
def test_an_exception_in_the_callback_of_one_worker_stops_all_with_its_traceback(tmp_path):
    source = """
class Mine(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and strategy.worker == 1:
            print("FAILING", flush=True)
            raise ZeroDivisionError("mine")

model.fit(x, y, batch_size=10, epochs=9, verbose=0, callbacks=[Mine()])
"""
    going = start(tmp_path, MODEL + source, env=ENVIRON)
    going.wait_for("FAILING", timeout_s=START_S)
    ended = going.finish(START_S, LEAVES)
    assert ended.code == 1
    assert "ZeroDivisionError: mine" in ended.err
    assert "on_train_batch_end" in ended.err
    assert "stopped because worker 1" in ended.err


@pytest.mark.slow
def test_a_generator_that_ends_early_on_one_worker_is_an_error_on_all(tmp_path):
    source = """
def batches():
    for _ in range(3 - strategy.worker):
        yield x[:10], y[:10]

model.fit(batches(), verbose=0)
"""
    ended = start(tmp_path, MODEL + source, env=ENVIRON).finish(START_S, LEAVES)
    assert ended.code == 1
    assert "The workers did not call the same thing" in ended.err
    assert "the end of epoch 0" in ended.err


@pytest.mark.slow
def test_an_interrupt_ends_fit_on_all_workers(tmp_path):
    source = """
print("READY", flush=True)
model.fit(x, y, batch_size=2, epochs=100000, verbose=0)
"""
    going = start(tmp_path, MODEL + source, env=ENVIRON)
    going.wait_for("READY", timeout_s=START_S)
    time.sleep(1)
    going.signal(signal.SIGINT)
    ended = going.finish(START_S, LEAVES)
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_backend_that_is_not_installed_is_named(tmp_path):
    source = """
import sys
sys.modules["jax"] = None  # as if it were not installed
import duoka

strategy = duoka.Mirrored(devices=1, replicas=2)
with strategy.scope():
    pass
"""
    ended = start(tmp_path, source, env=ENVIRON | {"KERAS_BACKEND": "jax"}).finish(START_S, LEAVES)
    assert ended.code == 1
    assert "Keras cannot be imported." in ended.err
    assert "KERAS_BACKEND is jax" in ended.err
    assert ended.err.count("LaunchError") == 1


@pytest.mark.slow
def test_the_role_of_writing_moves_when_the_main_worker_is_lost(tmp_path):
    source = """
folder = sys.argv[1]

class Death(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and strategy.worker == 0:
            os.kill(os.getpid(), signal.SIGKILL)

kinds = keras.callbacks
callbacks = [kinds.CSVLogger(folder + "/log.csv"), kinds.ModelCheckpoint(folder + "/{epoch}.keras"), Death()]
history = model.fit(x, y, batch_size=10, epochs=4, callbacks=callbacks)
model.save(folder + "/end.keras")
"""
    files = tmp_path / "files"
    files.mkdir()
    ended = start(tmp_path, MODEL + source, str(files), env=ENVIRON).finish(START_S, LEAVES)
    assert ended.code == 0, ended.err[-2000:]
    assert "SIGKILL" in ended.err
    assert sorted(path.name for path in files.iterdir()) == [
        *(f"{n}.keras" for n in range(1, 5)),
        "end.keras",
        "log.csv",
    ]
    lines = (files / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]
    assert ended.out.count("Epoch 4/4") == 1, "the bar goes on where it was"
