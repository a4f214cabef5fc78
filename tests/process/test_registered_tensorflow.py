"""TensorFlow scripts that decide by registered objects between loops: a replacement goes the way of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.scripts import PYTHON, Ended, Run, write

TENSORFLOW = """
import os, signal, sys, time
from pathlib import Path
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf
import duoka

kind, stop_at, kill_at, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
strategy = duoka.Mirrored(devices=2, replicas=2)
killed, ready = directory / "killed", directory / "ready"
is_newcomer = killed.exists() and strategy.worker == 1

class Stopper:
    bad, best = 0, np.float32("inf")

    def state_dict(self):
        return {"bad": self.bad, "best": self.best}

    def load_state_dict(self, state):
        self.bad, self.best = state["bad"], state["best"]

keras.utils.set_random_seed(0)
x = np.random.rand(32, 6).astype("float32")
with strategy.scope():
    model, optimizer = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]), keras.optimizers.SGD(0.01)
data = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8))
stopper = Stopper()
strategy.register(stopper=stopper)
if kind == "resumed":
    strategy.checkpoint(directory / "saved", every_steps=2)

def train_step(batch, scale):
    with tf.GradientTape() as tape:
        loss = strategy.average_loss(scale * tf.reduce_sum((model(batch[0], training=True) - batch[1]) ** 2, axis=1))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

def train(scale):
    for batch in data:
        strategy.run(train_step, args=(batch, scale))
        stopper.bad, stopper.best = stopper.bad + 1, min(stopper.best, np.abs(model.weights[0].numpy()).sum())
        if strategy.step == stop_at:
            sys.exit(9)
        if strategy.step == kill_at and strategy.worker == 1 and not is_newcomer:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 120
        while strategy.step == kill_at + 4 and not ready.exists() and time.monotonic() < end:
            time.sleep(0.02)
        if kill_at > 0:
            time.sleep(0.05)

for _ in range(2) if kind == "range" else strategy.epochs(2):
    train(1.0)
if kind == "resumed":
    scale = 1 + stopper.bad / 10
    for _ in strategy.epochs(1):
        train(scale)
scale = 1.0
if stopper.bad >= 8 and stopper.best < 100:  # not so in a script that has trained nothing
    scale = 0.5 + float(strategy.sum(0.25))
if is_newcomer:
    ready.touch()
for _ in range(12):
    train(scale + stopper.bad / 100)
print("ends", stopper.bad, float(stopper.best).hex(), model.weights[0].numpy().tobytes().hex())
"""


def run(place: Path, script: str, kind: str, stop_at: int, kill_at: int) -> Ended:
    place.mkdir()
    words = [*PYTHON, str(write(place, script)), kind, str(stop_at), str(kill_at), str(place.parent)]
    ended = Run(place, words).finish(200, leaves=["torchinductor_", "__autograph_generated_file"])
    assert ended.code == (9 if stop_at > 0 else 0), ended.err
    return ended


def check(tmp_path: Path, script: str, kind: str, stop_at: int, kill_at: int) -> None:
    if stop_at > 0:
        run(tmp_path / "stopped", script, kind, stop_at, -9)
    ended = run(tmp_path / "struck", script, kind, -1, kill_at)
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL" in ended.err
    assert "worker 1 (cpu:0/v1) has rejoined at step " in ended.err, ended.err
    said = [[line for line in ended.log(worker).splitlines() if line.startswith("ends ")] for worker in range(2)]
    assert len(said[0]) == 1 and said[0] == said[1], ended.err


@pytest.mark.tensorflow
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop_at", "kill_at"), [("epochs", -1, 14), ("range", -1, 14), ("resumed", 18, 26)])
def test_a_tensorflow_worker_that_comes_back_decides_by_its_objects_as_the_others_did(kind, stop_at, kill_at, tmp_path):
    check(tmp_path, TENSORFLOW, kind, stop_at, kill_at)
