"""What comparing replicas costs: weights and optimizer state, every 100 steps, two workers with one thread each.

    python benchmarks/equality_check.py [--turns 1.0]

Two strategies train the same model in the same processes, in turns of a few steps: one that checks, and one that does
not. So that there are checks enough to measure, one comes every 5 steps. What a check takes is the median of the steps
that have one, less that of the steps that have none; a hundredth of it belongs to each step of a run that checks every
100 steps. The number that counts is (a step of the one that checks, without a check, + check / 100) / (a step of the
other); steps without a check do nothing more than those of the other strategy, so that their ratio is mostly noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__)
OFTEN, USUAL = 5, 100  # steps from one check to the next: here, and in a run
TURN = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=float, default=1.0, help="how many times the usual number of turns")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]), options.turns)
        return
    numbers: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / kind
            words = [sys.executable, "-m", "duoka", "run", "--devices", "2", "--threads", "1"]
            environ = os.environ | {"KERAS_BACKEND": "tensorflow"}
            words += [str(HERE.resolve()), "--turns", str(options.turns), "--serve", kind, str(path)]
            subprocess.run(words, cwd=folder, env=environ, check=True)
            numbers |= json.loads(path.read_text())
    for case, row in numbers.items():
        print(
            f"{case}: a step {row['off_ms']:.2f} ms without checks, {row['on_ms']:.2f} ms between two;"
            f" a check {row['check_ms']:.2f} ms: {row['percent']:.2f} % of {USUAL} steps, {row['ratio']:.4f}x in all"
        )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"equality_check": numbers}))


def serve(kind: str, path: Path, turns: float) -> None:
    """On two workers: measure the cases of one framework."""
    import duoka

    on, off = duoka.Mirrored(check_every=OFTEN), duoka.Mirrored(check_every=None)
    found = {}
    for case, (make, num_turns) in KINDS[kind].items():
        found[case] = measure(make(on), make(off), max(1, round(num_turns * turns)))
    if on.is_main:
        path.write_text(json.dumps(found))


def measure(on: Callable[[], list[float]], off: Callable[[], list[float]], num_turns: int) -> dict[str, float]:
    """Each call runs one turn and gives the seconds of its steps. The first two of all are not counted."""
    between, checked, without = [], [], []
    for turn in range(num_turns + 2):
        order = (on, off) if turn % 2 else (off, on)
        times = {run: run() for run in order}
        if turn >= 2:
            # Checks come before steps 0, 5, 10, ...; the first step of a turn has the end of the turn before in it.
            checked += times[on][OFTEN::OFTEN]
            between += [t for step, t in enumerate(times[on]) if step % OFTEN > 1]
            without += [t for step, t in enumerate(times[off]) if step % OFTEN > 1]
    on_ms, check_ms, off_ms = (statistics.median(times) * 1e3 for times in (between, checked, without))
    check_ms = max(0.0, check_ms - on_ms)
    ratio = (on_ms + check_ms / USUAL) / off_ms
    return {
        "off_ms": off_ms,
        "on_ms": on_ms,
        "check_ms": check_ms,
        "percent": 100 * check_ms / USUAL / off_ms,
        "ratio": ratio,
    }


def mlp_of_ten_million(strategy: Any) -> Callable[[], list[float]]:
    """With Adam: 120 MB to compare."""
    import torch
    import torch.nn.functional as F
    from models import make_mlp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x, y = torch.randn(128, 784), torch.randint(0, 10, (128,))
    model, optimizer = strategy.prepare(model, optimizer)

    def loss_of(own_x: Any, own_y: Any) -> Any:
        return F.cross_entropy(model(own_x), own_y)

    def run() -> list[float]:
        times, begin = [], time.perf_counter()
        for _ in range(TURN):
            optimizer.zero_grad()
            strategy.backward(loss_of, x, y)
            optimizer.step()
            end = time.perf_counter()
            times.append(end - begin)
            begin = end
        return times

    return run


def reuters_loop(strategy: Any) -> Callable[[], list[float]]:
    """`strategy.run` in a tf.function: a step of few milliseconds."""
    import keras
    import keras_models
    import tensorflow as tf

    with strategy.scope():
        model = keras_models.make_reuters()
        optimizer = model.optimizer
        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        optimizer.build(model.trainable_variables)
    x, y = (tf.constant(rows) for rows in keras_models.reuters_rows(32))

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = strategy.average_loss(loss_of_rows(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.run(train_step, args=(x, y))

    def run() -> list[float]:
        times = []
        for _ in range(TURN):
            begin = time.perf_counter()
            step(x, y)
            times.append(time.perf_counter() - begin)
        return times

    return run


def reuters_fit(strategy: Any) -> Callable[[], list[float]]:
    """`fit`: the model is called batch by batch, as Keras does, without the callbacks around."""
    import keras_models
    import tensorflow as tf

    with strategy.scope():
        model = keras_models.make_reuters()
    rows = keras_models.reuters_rows(32 * TURN)
    model.fit(*rows, batch_size=32, epochs=1, verbose=0, shuffle=False)
    train = model.make_train_function()
    batch = tuple(tf.constant(part[:32]) for part in rows)

    def run() -> list[float]:
        times = []
        for _ in range(TURN):
            begin = time.perf_counter()
            train(iter([batch]))
            times.append(time.perf_counter() - begin)
        return times

    return run


KINDS: dict[str, dict[str, tuple[Callable[[Any], Callable[[], list[float]]], int]]] = {
    "torch": {"MLP of 10M parameters with Adam, global batch 128": (mlp_of_ten_million, 12)},
    "tensorflow": {
        "a loop, Reuters CNN with Nadam, global batch 32": (reuters_loop, 40),
        "fit on TensorFlow, Reuters CNN with Nadam, global batch 32": (reuters_fit, 40),
    },
}


if __name__ == "__main__":
    main()
