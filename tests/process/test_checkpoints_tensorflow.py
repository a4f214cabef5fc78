"""TensorFlow loops that are ended in every way, and go on from checkpoints with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.tensorflow]
LEAVES = ("__autograph_generated_file",)  # TensorFlow's, when it is killed

SCRIPT = """
import hashlib, json, os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf
from keras import layers
import duoka

given = json.loads(sys.argv[1])
kind = given.get("kind", "graph")
replicas, seed = given.get("replicas", 4), given.get("seed", 0)
strategy = duoka.Mirrored(devices=given["workers"], replicas=replicas, seed=seed, respawn=False)
if "directory" in given:
    strategy.checkpoint(given["directory"], every_steps=given.get("every", 3))
keras.utils.set_random_seed(3)
numbers = np.random.default_rng(5)
x, y = numbers.standard_normal((50, 12)).astype("float32"), numbers.integers(0, 4, 50)
with strategy.scope():
    width = given.get("width", 16)
    parts = [layers.Dense(width), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3), layers.Dense(4)]
    model = keras.Sequential(parts if kind == "lazy" else [keras.Input((12,)), *parts])
    optimizer = getattr(keras.optimizers, given.get("optimizer", "Adam"))(given.get("rate", 0.01), name="adam")
    seen = keras.metrics.SparseCategoricalAccuracy()
noise = tf.random.Generator.from_seed(7)
losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def train_step(batch):
    inputs, labels = batch
    with tf.GradientTape() as tape:
        logits = model(inputs + noise.normal(tf.shape(inputs), stddev=0.1), training=True)
        loss = strategy.average_loss(losses_of(labels, logits))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    seen.update_state(labels, logits)
    return loss


def test_step(batch):
    seen.update_state(batch[1], model(batch[0], training=False))


def distributed(batch):
    return strategy.reduce("sum", strategy.run(train_step, args=(batch,)))


step = tf.function(distributed, reduce_retracing=True) if kind in ("graph", "lazy") else distributed
if kind == "function":
    train_step = tf.function(train_step, reduce_retracing=True)
rows = tf.data.Dataset.from_tensor_slices((x, y))
shake = lambda inputs, labels: (inputs + 0.01 * tf.random.normal([12]), labels)
train = strategy.distribute_dataset(rows.shuffle(50).map(shake, num_parallel_calls=4).batch(8).prefetch(2))
test = strategy.distribute_dataset(rows.batch(20))
outside = []


def train_one(epoch):
    optimizer.learning_rate = 0.01 / (1 + epoch)
    for number, batch in strategy.enumerate(train):
        loss = step(batch)
        strategy.print(f"did {strategy.step} {number} {float(loss):.6f}", flush=True)
        outside.append(float(np.random.rand()) + float(tf.random.uniform([])))
        time.sleep(given.get("seconds", 0))
    if not given.get("plain"):  # else finished epochs give no batches
        strategy.print(f"epoch {epoch} ends with {float(loss)}")  # a name that every run must have by now
    seen.reset_state()
    for batch in test:
        strategy.run(test_step, args=(batch,))


for epoch in range(4) if given.get("plain") else strategy.epochs(given.get("epochs", 4)):
    train_one(epoch)
digest = hashlib.sha256()
for variable in (*model.variables, *optimizer.variables, *seen.variables):
    if "seed" not in variable.path:
        digest.update(variable.numpy().tobytes())
digest.update(noise.state.numpy().tobytes())
strategy.print("hash", digest.hexdigest(), float(np.random.rand()), strategy.step, flush=True)
"""


def start(place: Path, **given) -> Run:
    environ = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    command = [*PYTHON, str(write(place, SCRIPT)), json.dumps(given)]
    return Run(place, command, env=environ | {"KERAS_BACKEND": "tensorflow"})


def hash_of(ended: Ended) -> str:
    assert ended.code == 0, ended.err
    return next(line for line in ended.out.splitlines() if line.startswith("hash"))


def newest(directory: Path) -> Path:
    return max((directory / "saved").glob("step-*"))


def kill_all(run: Run, after: str) -> None:
    run.wait_for(after, timeout_s=START_S)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 137 and "no worker is left" in ended.err, ended.err


@pytest.mark.slow
def test_a_loop_whose_workers_were_all_killed_goes_on_to_the_bits_of_a_calm_one_on_another_number_of_them(tmp_path):
    calm = hash_of(start(tmp_path, workers=1).finish(START_S, LEAVES))
    kill_all(start(tmp_path, workers=2, directory="../saved", seconds=0.1, every=7), "did 10 ")
    ended = start(tmp_path, workers=1, directory="../saved", rate=0.5).finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    assert "resumed from" in ended.err and "training held up for" in ended.err
    line = "not with those of this script: learning_rate of adam (Adam) is 0.5 here, and was 0.01\n"
    assert ended.err.count(line) == 1, ended.err
    assert ended.err.count("draws random numbers, or counts, in parallel calls (RandomStandardNormal)") == 1
    assert "did 8 0 " in ended.out and "did 7 " not in ended.out, "what is due with an epoch's last step is of the next"


@pytest.mark.slow
def test_loops_that_are_ended_in_turns_go_on_to_the_bits_of_a_calm_one_on_other_numbers_of_workers(tmp_path):
    calm = hash_of(start(tmp_path, workers=2).finish(START_S, LEAVES))
    given = {"directory": "../saved", "seconds": 0.1}
    kill_all(start(tmp_path, workers=2, **given), "did 10 ")

    run = start(tmp_path, workers=1, **given)  # preempted, on another number of workers
    run.wait_for("did 12 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    assert "resumed from" in ended.err and "is saved in" in ended.err and "training held up for" in ended.err
    assert "did 10 2 " in ended.out and "did 9 " not in ended.out, ended.out
    saved = int(newest(tmp_path).name.removeprefix("step-"))
    assert saved > 11 and f"did {saved} " in ended.out and f"did {saved + 1} " not in ended.out

    ended = start(tmp_path, workers=3, directory="../saved").finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    assert f"did {saved} " not in ended.out and f"did {saved + 1} " in ended.out


@pytest.mark.slow
def test_a_finished_run_that_is_given_more_epochs_ends_with_the_bits_of_a_longer_one(tmp_path):
    calm = hash_of(start(tmp_path, workers=1).finish(START_S, LEAVES))
    assert start(tmp_path, workers=1, epochs=2, directory="../saved").finish(START_S, LEAVES).code == 0
    ended = start(tmp_path, workers=2, directory="../saved").finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    assert "did 14 " not in ended.out and "did 15 0 " in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "function", "lazy"])
def test_other_kinds_of_steps_with_plain_epochs_go_on_after_all_workers_and_the_supervisor_were_killed(tmp_path, kind):
    given = {"kind": kind, "plain": True}
    calm = hash_of(start(tmp_path, workers=2, **given).finish(START_S, LEAVES))
    given |= {"directory": "../saved", "seconds": 0.1}
    kill_all(start(tmp_path, workers=2, **given), "did 6 ")
    run = start(tmp_path, workers=3, **given)
    run.wait_for("did 17 ", timeout_s=START_S)
    assert "did 2 " not in run.out
    run.signal(signal.SIGKILL)
    run.process.wait(START_S)
    run.wait_until_all_are_gone()
    state = newest(tmp_path) / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-5] ^= 1
    state.write_bytes(data)
    ended = start(tmp_path, workers=1, kind=kind, plain=True, directory="../saved").finish(START_S, LEAVES)
    assert hash_of(ended) == calm
    assert "This checkpoint is skipped" in ended.err and state.exists()


@pytest.mark.slow
def test_another_model_seed_or_number_of_replicas_is_refused_with_the_difference(tmp_path):
    run = start(tmp_path, workers=1, directory="../saved", seconds=0.1)
    run.wait_for("did 4 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    assert run.finish(START_S, LEAVES).code == 143
    first = "dense/kernel (12, 5) float32 is in this one where the saved one has sequential/dense/kernel (12, 16)"
    for other, words in (
        ({"width": 5}, first),
        ({"optimizer": "SGD"}, "this script trains with SGD, and the saved run with Adam"),
        ({"epochs": 0}, "Epoch 1 is under way in the saved run, and strategy.epochs is asked for 0 now"),
        ({"seed": 3}, "is of a run with seed=0; this one has seed=3"),
        ({"replicas": 2}, "is of a run with replicas=4; this one has replicas=2"),
    ):
        ended = start(tmp_path, workers=2, directory="../saved", **other).finish(START_S, LEAVES)
        assert ended.code == 1 and words in ended.err, ended.err
