"""One step of a TensorFlow loop: two workers with one thread each, against the plain loop and MirroredStrategy.

    python benchmarks/tensorflow_step.py [--rounds 15] [--steps 1.0] [--case "..."]

Contestants, rounds and the choice of threads are those of keras_step.py. All have the same model, data, optimizer and
allocator settings, and a tf.function around the step. "floor" is the plain loop on half of each batch in Duoka's two
workers, with one barrier per step and no exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paired
from keras_step import CASES, hold

LOOPS = {title: case for title, case in CASES.items() if case.style == "loop"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--steps", type=float, default=1.0, help="how many times the usual number of steps")
    parser.add_argument("--case", action="append", choices=list(LOOPS), help="only these")
    options = parser.parse_args()
    chosen = {title: case for title, case in LOOPS.items() if not options.case or title in options.case}
    found = hold(chosen, "tensorflow", options.rounds, options.steps)
    if "DUOKA_BENCH_JSON" in os.environ:
        numbers = {title.removeprefix("a loop, "): contest.write() for title, contest in found.items()}
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"tensorflow_step_ms": numbers}))


def make_loop(
    strategy: Any, model_name: str, batch_size: int, num_steps: int, barrier: Callable[[], None] | None
) -> Callable[[], list[float]]:
    """The loop of TensorFlow's pages, as a function that runs one epoch and returns the seconds of its steps.

    On CPUs a tf.function returns when it has been executed, so no line has to wait for a loss.
    """
    import keras
    import keras_models
    import tensorflow as tf

    make, rows = keras_models.MODELS[model_name]
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
        optimizer = model.optimizer
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        optimizer.build(model.trainable_variables)
    arrays = rows(num_steps * batch_size)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size).cache().prefetch(tf.data.AUTOTUNE)
    if strategy is not None:
        dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of_rows(y, outputs), global_batch_size=batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, outputs)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        if strategy is None:
            return train_step(x, y)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(x, y)), axis=None)

    def run_epoch() -> list[float]:
        ends = []
        for x, y in dataset:
            step(x, y)
            if barrier is not None:
                barrier()
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends)]

    return run_epoch


if __name__ == "__main__":
    main()
