"""Mistakes in TensorFlow loops: one clear message each, and no hang."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, run, start

pytestmark = [pytest.mark.tensorflow]
SCRIPT = Path(__file__).with_name("tensorflow_misuse.py")
TOLD = {
    "no function": "was given a EagerTensor to run",
    "no tuple": "give a tuple: run(step, args=(batch,))",
    "run inside run": "strategy.run was called inside strategy.run",
    "no batch": "call .batch(n)",
    "no dataset": "give it a tf.data.Dataset",
    "ragged": "to_tensor()",
    "rows differ": "have 2, 5 rows",
    "no rows": "a batch without rows",
    "reduce a number": "not what strategy.run returned",
    "reduce a batch": "was given a batch",
    "number of each": "was read as one value",
    "number of each in a graph": "was read as one value",
    "array of each": 'do   take strategy.reduce("mean", value)',
    "no reduction": "'max' is no reduction",
    "axis of a number": "which has no axis",
    "axis of more": "arrays of 2 dimensions",
    "ragged batch": "to_tensor()",
    "shapes differ": "different shapes",
    "gather text": "cannot be sent to other workers",
    "average of a number": "was given one number",
    "weights of columns": "give one weight for each row",
    "average in a function": "inside a tf.function that the step calls",
    "average in a function in a graph": "inside a tf.function that the step calls",
    "optimizer in a function": "leave @tf.function away from it",
    "optimizer in a function in a graph": "leave @tf.function away from it",
    "unknown variable in a graph": "Unknown variable",
    "draws a batch": "args=(next(iterator),)",
    "draws a batch in a graph": "args=(next(iterator),)",
    "mean of integers": "tf.cast(value, tf.float32)",
    "average outside": "There is no replica here",
    "context outside": "There is no replica here",
    "a result again": "what another strategy.run has returned",
    "unknown variable": "Unknown variable",
    "weighed with more replicas": "it calls strategy.weigh",
    "more replicas than workers": "use one replica on each worker, replicas=2",
}
WAITING = """
    import os, sys, time
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    import duoka

    strategy = duoka.Mirrored(devices=2)
    weight = tf.Variable(1.0)

    def step(x):
        if strategy.worker == 1 and {is_late}:
            tf.numpy_function({what}, [], [])
        return tf.reduce_mean(x) * weight

    @tf.function
    def run(x):
        return strategy.reduce("mean", strategy.run(step, args=(x,)))

    def sleep():
        print("asleep", flush=True)
        time.sleep(60)

    def fail():
        raise ValueError("my own mistake")

    print(float(run(tf.constant([1.0, 2.0, 3.0]))), flush=True)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    words = [*DUOKA_RUN, "--devices", "2", "--replicas", "3"]
    ended = run(tmp_path_factory.mktemp("misuse"), SCRIPT.read_text(), program=words, timeout_s=200)
    (line, *_) = (line for line in ended.out.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND ")) | {"said": ended.err}


@pytest.mark.parametrize("mistake", TOLD)
def test_a_mistake_gets_a_clear_message(found, mistake):
    assert TOLD[mistake] in found[mistake]


def test_a_loop_goes_on_after_a_mistake(found):
    assert found["mean"] == pytest.approx(found["expected"])


def test_named_tuples_and_nothing_go_in_and_come_out_as_they_are(found):
    assert found["mean of named"] == pytest.approx(found["expected"]) and found["named"] == [None]


def test_a_step_with_the_same_text_as_one_that_cannot_wait_may_wait(found):
    needs, waits = found["of one text"]
    assert "it calls all_reduce" in needs and waits == "nothing"


def test_steps_that_draw_from_no_generator_are_named_once(found):
    for name in ("noisy_in_eager", "noisy_in_graph"):
        assert found["said"].count(f"{name} draws from tf.random") == 1


def test_sparse_gradients_of_batches_of_several_lengths_are_named_once(found):
    assert found["said"].count("looks_up_words takes batches of several lengths") == 1
    assert found["said"].count("looks_up_eagerly runs outside of graphs") == 1


def test_counters_without_an_aggregation_are_named_once(found):
    for name in ("counts_eagerly", "counts_in_graph"):
        assert found["said"].count(f"{name} adds to {name}_total:0, which has no aggregation") == 1
        assert found["said"].count(f"and replica 0's count: among {name}_rows:0") == 1


def test_metrics_that_a_step_resets_are_named_once(found):
    for name in ("resets_eagerly", "resets_in_graph"):
        assert found["said"].count(f"is not only added to in {name}") == 2  # a sum and a count


def test_sync_batchnorm_is_said_not_to_be_known_to_loops(found):
    assert found["said"].count("strategy.run does not know it") == 1


@pytest.mark.slow
@pytest.mark.torch
def test_keras_on_another_backend_is_named_where_a_loop_meets_it(tmp_path):
    source = """
        import os
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import keras, tensorflow as tf
        import duoka

        strategy = duoka.Mirrored(devices=1, replicas=2)
        weight, optimizer, layer = tf.Variable(1.0), keras.optimizers.SGD(0.1), keras.layers.Dense(1)

        def trains(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * weight)
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        def computes(x):
            return layer(x)

        for step in (trains, tf.function(trains), computes, tf.function(computes)):
            try:
                strategy.run(step, args=(tf.ones([4, 2]),))
            except Exception as error:  # in a graph TensorFlow makes one of its own of it, with the same words
                print("TOLD", error, flush=True)
        by_hand = strategy.run(lambda x: weight.assign_add(1.0), args=(tf.ones([4, 2]),))
        print("AND WITHOUT KERAS", float(weight), flush=True)
    """
    ended = start(tmp_path, source, env={"KERAS_BACKEND": "torch"}).finish(START_S, leaves=[""])
    assert ended.code == 0, ended.err[-2000:]
    for words in ("SGD sgd, and Keras runs on torch", "Dense dense, and Keras runs on torch"):
        assert ended.out.count(words) == 2, ended.out
    assert ended.out.count("do   set KERAS_BACKEND=tensorflow before Keras is imported") == 4
    assert "AND WITHOUT KERAS" in ended.out


@pytest.mark.slow
def test_ctrl_c_reaches_a_graph_that_waits_for_another_worker(tmp_path):
    going = start(tmp_path, WAITING.format(is_late=True, what="sleep"))
    going.wait_for("asleep", timeout_s=START_S)
    time.sleep(0.5)
    going.signal(signal.SIGINT)
    ended = going.finish(START_S, leaves=["__autograph_generated_file"])
    assert ended.code == 130


@pytest.mark.slow
def test_an_exception_in_one_replica_stops_all_with_its_text(tmp_path):
    source = WAITING.format(is_late=True, what="fail").replace('MIN_LOG_LEVEL"] = "3"', 'MIN_LOG_LEVEL"] = "0"')
    ended = start(tmp_path, source).finish(START_S)
    assert ended.code == 1
    assert "Stopped" in ended.log(0) and "Stopped" not in ended.err, "TensorFlow writes it, with a stack, twice"
    assert "my own mistake" in ended.err and "1 worker stopped because worker 1 (cpu:0/v1) failed" in ended.err


@pytest.mark.slow
def test_a_loss_in_the_middle_of_a_step_is_told_as_what_it_is(tmp_path):
    dies = """
        import os, signal
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import tensorflow as tf
        import duoka

        strategy = duoka.Mirrored(devices=2)

        def step(x):
            if strategy.worker == 1:
                tf.numpy_function(lambda: os.kill(os.getpid(), signal.SIGKILL), [], [])
            return duoka.tensorflow.get_replica_context().all_reduce("sum", x)

        @tf.function
        def run(x):
            return strategy.run(step, args=(x,))

        run(tf.constant([1.0, 2.0]))
    """
    ended = start(tmp_path, dies).finish(START_S, leaves=["__autograph_generated_file"])
    assert ended.code == 137 and "UnknownError" not in ended.err
    assert "WorkerLost" in ended.err and "start again from the last checkpoint" in ended.err
