"""The time Duoka adds on one worker: two replicas against two plain steps of half the batch. Reuters CNN, one thread.

    python benchmarks/keras_overhead.py [--rounds 15] [--steps 30]

For each backend, one process holds both models. They take turns with one epoch each, in paired rounds; the plain one
runs twice in each. The process is bound to one core: XLA starts more threads than it is asked to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import paired

BATCH = 32
BACKENDS = ("tensorflow", "jax", "torch")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--steps", type=int, default=30, help="of an epoch")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only these")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        Path(options.measure).write_text(json.dumps(measure(options.rounds, options.steps)))
        return
    numbers = {}
    for backend in options.backend or BACKENDS:
        numbers[backend] = _run(backend, options.rounds, options.steps)
        contest = paired.Contest.read(numbers[backend])
        ours, plain = contest.typical("duoka"), contest.typical("plain")
        print(f"one worker, two replicas, {backend}: {ours:.2f} ms, two plain steps {plain:.2f} ms", end="; ")
        print(f"duoka/plain {contest.in_times_of('plain')}, A/A {contest.control('plain')}", flush=True)
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"keras_overhead_ms": numbers}))


def _run(backend: str, rounds: int, steps: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/numbers.json"
        ours = ("-m", "duoka", "run", "--devices", "1", "--replicas", "2", "--threads", "1")
        words = (os.path.abspath(__file__), "--measure", path, "--rounds", str(rounds), "--steps", str(steps))
        environ = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            [sys.executable, *ours, *words],
            env=environ,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return json.loads(Path(path).read_text())


def measure(num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of a global batch, by contestant and round: the mean over an epoch."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import keras_models

    import duoka

    strategy = duoka.Mirrored(devices=1, replicas=2, threads=1)
    rows = keras_models.reuters_rows(BATCH * num_steps)
    with strategy.scope():
        ours = keras_models.make_reuters()
    runs = {
        "plain": (keras_models.make_reuters(), keras_models.batches_of(rows, BATCH // 2)),
        "duoka": (ours, keras_models.batches_of(rows, BATCH)),
    }
    rounds = paired.run_rounds(
        paired.arrange(["plain"], []),
        lambda name: [keras_models.time_epoch(*runs[name]).seconds / num_steps],
        num_rounds,
        num_warm_up=2,
    )
    return paired.Contest.of(rounds).write()


if __name__ == "__main__":
    main()
