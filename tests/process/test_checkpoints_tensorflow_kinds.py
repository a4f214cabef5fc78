"""Checkpoints of unusual TensorFlow loops: one replica, steps that exchange in their middle, loops that are refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]
LEAVES = ("__autograph_generated_file",)

START = """
import hashlib, json, os, signal, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf
import duoka

given = json.loads(sys.argv[1])
strategy = duoka.Mirrored(devices=given["workers"], replicas=given["workers"], respawn=given.get("respawn", False))
if "directory" in given:
    strategy.checkpoint(given["directory"], every_steps=3)
keras.utils.set_random_seed(3)
x = np.random.default_rng(5).standard_normal((50, 12)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices(x)
"""

END = """
digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables() if "seed" not in v.path))
strategy.print("hash", digest.hexdigest(), strategy.step if "directory" in given else "", flush=True)
"""

ONE_REPLICA = f"""{START}
model = keras.Sequential([keras.layers.Dense(6), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)

@tf.function
def train(batch):
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss
    return strategy.run(step, args=(batch,))

dataset = strategy.distribute_dataset(rows.shuffle(50, seed=2).cache().batch(8))
for epoch in range(4):
    for number, batch in strategy.enumerate(dataset):
        loss = float(train(batch))
        print("did", epoch, number, flush=True)
        time.sleep(given.get("seconds", 0))

def variables():
    return [*model.variables, *optimizer.variables]
{END}"""

IN_TURNS = f"""{START}
life = Path("../lives")
first, second = keras.layers.Dense(12), keras.layers.Dense(1)
first.build((None, 12)), second.build((None, 12))
one, two = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)

def step(batch):
    for layer, optimizer, sign in ((second, one, 1.0), (first, two, -1.0)):
        with tf.GradientTape() as tape:
            loss = sign * tf.reduce_mean(second(tf.nn.relu(first(batch))) ** 2)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    return loss

train = tf.function(lambda batch: strategy.run(step, args=(batch,)), reduce_retracing=True)
dataset = strategy.distribute_dataset(rows.shuffle(50, seed=2).batch(8))
for epoch in strategy.epochs(3):
    for batch in dataset:
        if given.get("dies") and strategy.worker == 1 and strategy.step == 10 and not life.exists():
            life.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(batch)

def variables():
    return [*first.variables, *second.variables, *one.variables, *two.variables]
{END}""".replace("import duoka\n", "from pathlib import Path\nimport duoka\n", 1)

REFUSED = f"""{START}
weight, optimizer = tf.Variable([1.0] * 12), keras.optimizers.SGD(0.01)

def step(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch * weight) ** 2)
    optimizer.apply(tape.gradient(loss, [weight]), [weight])
    return loss

def run(batch):
    return strategy.reduce("mean", strategy.run(step, args=(batch,)))

@tf.function
def whole_epoch(dataset):
    for batch in dataset:
        run(batch)

def refused(name, call):
    try:
        call()
    except Exception as error:
        print("refused", name, "cannot save this loop" in str(error), flush=True)

dataset = strategy.distribute_dataset(rows.batch(8))
refused("raw", lambda: run(x[:8]))
refused("graph", lambda: whole_epoch(dataset))
refused("iterator", lambda: tf.function(lambda iterator: run(next(iterator)))(iter(dataset)))
refused("taken", lambda: [run(batch) for batch in dataset.take(2)])
print("weights", weight.numpy().tolist() == [1.0] * 12)
"""


def start(place: Path, script: str, **given) -> Run:
    environ = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    command = [*PYTHON, str(write(place, script)), json.dumps(given)]
    return Run(place, command, env=environ | {"KERAS_BACKEND": "tensorflow"})


def hash_of(ended: Ended) -> str:
    assert ended.code == 0, ended.err
    return next(line for line in ended.out.splitlines() if line.startswith("hash")).split()[1]


def test_one_replica_goes_on_after_sigterm_with_the_bits_of_a_calm_loop(tmp_path):
    calm = hash_of(start(tmp_path, ONE_REPLICA, workers=1).finish(START_S, LEAVES))
    run = start(tmp_path, ONE_REPLICA, workers=1, directory="../saved", seconds=0.1)
    run.wait_for("did 2 3", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    assert run.finish(START_S, LEAVES).code == 143
    ended = start(tmp_path, ONE_REPLICA, workers=1, directory="../saved").finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    assert "did 1 " not in ended.out and "did 2 3" not in ended.out and "did 3 6" in ended.out


def test_a_worker_lost_in_a_step_with_two_updates_sends_all_back_to_the_checkpoint_and_the_bits_are_the_same(tmp_path):
    calm = hash_of(start(tmp_path, IN_TURNS, workers=2).finish(START_S, LEAVES))
    run = start(tmp_path, IN_TURNS, respawn=True, workers=2, directory="../saved", dies=True)
    ended = run.finish(150, LEAVES)
    assert "all workers start anew, and go back to the checkpoint of step 9" in " ".join(ended.err.split()), ended.err
    assert hash_of(ended) == calm


def test_loops_whose_place_in_their_data_is_not_known_are_refused_before_anything_is_trained(tmp_path):
    ended = start(tmp_path, REFUSED, workers=2, directory="../saved").finish(START_S, LEAVES)
    for name in ("raw", "graph", "iterator", "taken"):
        assert f"refused {name} True" in ended.out, ended.out + ended.err
    assert "weights True" in ended.out
