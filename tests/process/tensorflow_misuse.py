"""Loops with mistakes in them, on two workers; prints what each is told, as one JSON line."""

from __future__ import annotations

import collections
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf

import duoka
import duoka.tensorflow

strategy = duoka.Mirrored(sync_batchnorm=True)
Pair = collections.namedtuple("Pair", "x y")
batch = tf.constant(np.arange(10, dtype="float32").reshape(5, 2))
weight = tf.Variable([[1.0], [2.0]])
optimizer = keras.optimizers.SGD(0.1)


def loss_of(x):
    return tf.reduce_mean(tf.matmul(x, weight) ** 2)


def run_inside_run(x):
    return strategy.run(loss_of, args=(x,))


known, other = keras.Variable([[1.0], [2.0]]), keras.Variable([[1.0], [2.0]])
optimizer.build([known])


def unknown_variable(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.matmul(x, other.value))
    optimizer.apply(tape.gradient(loss, [other.value]), [other])


def trains_and_looks(x):
    with tf.GradientTape() as tape:
        loss = loss_of(x)
    tf.compat.v1.train.GradientDescentOptimizer(0.1).apply_gradients([(tape.gradient(loss, weight), weight)])
    return tf.reduce_sum(weight)


def make_step(looks):
    def step(x):
        loss = loss_of(x)
        if looks:
            duoka.tensorflow.get_replica_context().all_reduce("sum", loss)
        return loss

    return step


def of_different_shapes():
    return strategy.reduce("sum", strategy.run(lambda x: x, args=(batch,)))


@tf.function
def average_inside(x):
    return tf.nn.compute_average_loss(x[:, 0])


@tf.function
def trains_inside(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.matmul(x, known.value))
    optimizer.apply([tape.gradient(loss, known.value)], [known])
    return loss


iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())


def told(mistake):
    try:
        mistake()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MISTAKES = {
    "no function": lambda: strategy.run(batch),
    "no tuple": lambda: strategy.run(loss_of, args=batch),
    "run inside run": lambda: strategy.run(run_inside_run, args=(batch,)),
    "no batch": lambda: strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(([1.0], [1]))),
    "no dataset": lambda: strategy.distribute_dataset([1, 2]),
    "ragged": lambda: strategy.distribute_dataset(tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]]))),
    "rows differ": lambda: strategy.run(lambda x, y: x, args=(batch, batch[:2])),
    "no rows": lambda: strategy.run(loss_of, args=(batch[:0],)),
    "reduce a number": lambda: strategy.reduce("sum", 1.0),
    "reduce a batch": lambda: strategy.reduce(
        "sum", next(iter(strategy.distribute_dataset(tf.data.Dataset.from_tensors(batch))))
    ),
    "number of each": lambda: float(strategy.run(loss_of, args=(batch,))),
    "number of each in a graph": lambda: tf.function(strategy.run)(loss_of, args=(batch,)).numpy(),
    "array of each": lambda: strategy.run(lambda x: x, args=(batch,)).numpy(),
    "no reduction": lambda: strategy.reduce("max", strategy.run(loss_of, args=(batch,))),
    "axis of a number": lambda: strategy.reduce("sum", strategy.run(loss_of, args=(batch,)), axis=0),
    "axis of more": lambda: strategy.reduce("sum", strategy.run(lambda x: x, args=(batch,)), axis=2),
    "ragged batch": lambda: strategy.run(lambda x: x, args=(tf.ragged.constant([[1.0], [2.0, 3.0]]),)),
    "shapes differ": of_different_shapes,
    "gather text": lambda: strategy.gather(strategy.run(lambda x: tf.strings.as_string(x), args=(batch,))),
    "average of a number": lambda: strategy.run(lambda x: strategy.average_loss(loss_of(x)), args=(batch,)),
    "weights of columns": lambda: strategy.run(lambda x: tf.nn.compute_average_loss(x[:, 0], x), args=(batch,)),
    "average in a function": lambda: strategy.run(lambda x: average_inside(x), args=(batch,)),
    "average in a function in a graph": lambda: tf.function(strategy.run)(lambda x: average_inside(x), args=(batch,)),
    "optimizer in a function": lambda: strategy.run(lambda x: trains_inside(x), args=(batch,)),
    "optimizer in a function in a graph": lambda: tf.function(strategy.run)(lambda x: trains_inside(x), args=(batch,)),
    "unknown variable in a graph": lambda: tf.function(strategy.run)(unknown_variable, args=(batch,)),
    "draws a batch": lambda: strategy.run(lambda: loss_of(next(iterator))),
    "draws a batch in a graph": lambda: strategy.run(tf.function(lambda: loss_of(next(iterator)))),
    "mean of integers": lambda: strategy.run(
        lambda x: duoka.tensorflow.get_replica_context().all_reduce("mean", tf.shape(x)[0]), args=(batch,)
    ),
    "average outside": lambda: strategy.average_loss(tf.constant([1.0, 2.0])),
    "context outside": duoka.tensorflow.get_replica_context,
    "a result again": lambda: strategy.run(loss_of, args=(strategy.run(loss_of, args=(batch,)),)),
    "unknown variable": lambda: strategy.run(unknown_variable, args=(batch,)),
    "weighed with more replicas": lambda: strategy.run(lambda x: strategy.weigh(loss_of(x), 1), args=(batch,)),
    "more replicas than workers": lambda: strategy.run(trains_and_looks, args=(batch,)),
}


def noisy_in_eager(x):
    return loss_of(x) + tf.random.normal([])


def noisy_in_graph(x):
    return loss_of(x) + tf.random.normal([])


def make_counter(name, is_eager):
    """Without an aggregation, or with a mean of whole numbers: what becomes of them must be said."""
    kind = tf.VariableAggregation.NONE if is_eager else tf.VariableAggregation.MEAN
    total = tf.Variable(0.0, trainable=False, name=f"{name}_total")
    rows = tf.Variable(0, trainable=False, name=f"{name}_rows", aggregation=kind)

    def count(x):
        total.assign_add(tf.reduce_sum(x))
        rows.assign_add(tf.shape(x)[0])

    count.__name__ = name
    return count if is_eager else tf.function(count)


error_of = {name: keras.metrics.MeanAbsoluteError(name=name) for name in ("reset_eagerly", "reset_in_graph")}


def resets_eagerly(x):
    error_of["reset_eagerly"].reset_state()
    error_of["reset_eagerly"].update_state(x[:, 0], x[:, 1])


def resets_in_graph(x):
    error_of["reset_in_graph"].reset_state()
    error_of["reset_in_graph"].update_state(x[:, 0], x[:, 1])


words = tf.Variable(tf.ones([5, 2]), name="words")
for_words = keras.optimizers.SGD(0.1)


@tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
def of_several_lengths(tokens):
    """A number of rows, and of words in them, that the graph does not know."""
    strategy.run(looks_up_words, args=(tokens,))


def looks_up_words(tokens):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.gather(words, tokens))
    for_words.apply_gradients([(tape.gradient(loss, words), words)])


def looks_up_eagerly(tokens):
    looks_up_words(tokens)


def main():
    found = {name: told(mistake) for name, mistake in MISTAKES.items()}
    # And after all of them everything works.
    found["mean"] = float(strategy.reduce("mean", strategy.run(loss_of, args=(batch,))))
    named = strategy.distribute_dataset(tf.data.Dataset.from_tensors(Pair(batch, batch)))
    results = [strategy.run(lambda pair: (loss_of(pair.x), None), args=(pair,), options=None) for pair in named]
    found["named"] = [strategy.reduce("mean", result)[1] for result in results]
    found["mean of named"] = float(strategy.reduce("mean", results[0])[0])
    found["expected"] = float(loss_of(batch))
    steps = [make_step(looks) for looks in (True, False)]
    found["of one text"] = [told(lambda step=step: strategy.run(step, args=(batch,))) for step in steps]
    for step in (noisy_in_eager, tf.function(noisy_in_graph)):
        strategy.run(step, args=(batch,))
    for step in (make_counter("counts_eagerly", True), make_counter("counts_in_graph", False)):
        for _ in range(2):
            strategy.run(step, args=(batch,))
    for step in (resets_eagerly, tf.function(resets_in_graph)):
        strategy.run(step, args=(batch,))
    for length in (2, 3):
        of_several_lengths(tf.ones([4, length], tf.int32))
        strategy.run(looks_up_eagerly, args=(tf.ones([4, length], tf.int32),))
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
