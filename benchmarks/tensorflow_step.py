"""One step of a TensorFlow loop: two workers with one thread each, against the plain loop and MirroredStrategy.

    python benchmarks/tensorflow_step.py [--rounds 4] [--steps 1.0]

Contestants live in processes of their own, and take turns with one epoch each; the first round is not counted. What
counts is the median of all single steps, as in keras_step.py; the mean is printed beside. Peers run with one and with
two threads, and are judged by the better of the two. All have the same model, data, optimizer and
allocator settings, and a tf.function around the step. "mirrored" is tf.distribute.MirroredStrategy on two logical CPUs
with its default collective, "hierarchical" with HierarchicalCopyAllReduce.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from keras_contest import Contest, serve
from keras_step import CASES, FEW, make_strategy, measure, print_case

HERE = Path(__file__)
PEERS = ("plain", "mirrored", "hierarchical")
TITLES = ("Reuters CNN, global batch 32", "MobileNetV2 at 32x32, global batch 64")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=float, default=1.0, help="how many times the usual number of steps")
    parser.add_argument("--case", action="append", choices=TITLES, help="only these")
    parser.add_argument("--serve", metavar="KIND", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        Contestant(options.serve)
        return
    numbers, means = {}, {}
    with Contest() as contest:
        names = _start(contest)
        for title in options.case or TITLES:
            num_steps = max(1, round(CASES[title].num_steps * options.steps))
            numbers[title], means[title] = measure(contest, names, title, options.rounds, num_steps)
            print_case(f"{title}, a loop", numbers[title], means[title])
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(
            json.dumps({"tensorflow_step_ms": numbers, "tensorflow_step_mean_ms": means})
        )


def _start(contest: Contest) -> list[str]:
    names = ["duoka"]
    words = ["-m", "duoka", "run", "--devices", "2", "--threads", "1", str(HERE), "--serve", "duoka"]
    contest.start("duoka", words, {"KERAS_BACKEND": "tensorflow"}, num_workers=2)
    for kind in PEERS:
        for threads in FEW:
            names.append(f"{kind} {threads}")
            environ = {"KERAS_BACKEND": "tensorflow", "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
            environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), str(threads))
            contest.start(names[-1], [str(HERE), "--serve", kind], environ)
    contest.wait_until_ready()
    return names


class Contestant:
    """One process: makes a model and its loop when it is asked for them the first time, and times epochs."""

    def __init__(self, kind: str) -> None:
        from duoka.devices.heap import keep_freed_memory

        keep_freed_memory()  # as Duoka does in its workers
        self._strategy = make_strategy(kind)
        self._loops: dict[str, Any] = {}
        serve(self.time_epoch)

    def time_epoch(self, title: str, num_steps: int) -> dict[str, Any]:
        if title not in self._loops:
            self._loops.clear()  # one at a time
            self._loops[title] = make_loop(self._strategy, CASES[title], num_steps)
        begin = time.perf_counter()
        steps = self._loops[title]()
        return {"steps": steps, "mean": (time.perf_counter() - begin) / num_steps}


def make_loop(strategy: Any, case: Any, num_steps: int) -> Any:
    """The loop of TensorFlow's pages, as a function that gives the seconds of its steps.

    On CPUs a tf.function returns when it has been executed: nobody has to wait for a loss.
    """
    import contextlib

    import keras
    import keras_models
    import tensorflow as tf

    make, rows = {
        "reuters": (keras_models.make_reuters, keras_models.reuters_rows),
        "mobilenet": (keras_models.make_mobilenet, keras_models.picture_rows),
    }[case.model]
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make()
        optimizer = model.optimizer
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        optimizer.build(model.trainable_variables)
    arrays = rows(num_steps * case.batch_size)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(case.batch_size).cache().prefetch(tf.data.AUTOTUNE)
    if strategy:
        dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of_rows(y, outputs), global_batch_size=case.batch_size)
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
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends)]

    return run_epoch


if __name__ == "__main__":
    main()
