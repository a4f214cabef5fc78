"""What Duoka adds on one worker: two replicas against two plain steps of half the batch. Reuters CNN, one thread.

    python benchmarks/keras_overhead.py [--rounds 7] [--steps 60]

For each backend, one process holds both models, and they take turns with one epoch each; two rounds are not counted.
It is bound to one core: XLA has threads of its own beside the one that it is asked to use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH = 32
BACKENDS = ("tensorflow", "jax", "torch")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="of an epoch")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only these")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        Path(options.measure).write_text(json.dumps(measure(options.rounds, options.steps)))
        return
    numbers = {}
    for backend in options.backend or BACKENDS:
        numbers[backend] = _run(backend, options.rounds, options.steps)
        ours, plain = numbers[backend]["duoka"], numbers[backend]["plain"]
        print(f"one worker, two replicas, {backend}: {ours:.2f} ms, two plain steps {plain:.2f} ms", end=": ")
        print(f"{ours / plain:.3f}x their time", flush=True)
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"keras_overhead_ms": numbers}))


def _run(backend: str, rounds: int, steps: int) -> dict[str, float]:
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
            timeout=200,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return json.loads(Path(path).read_text())


def measure(num_rounds: int, num_steps: int) -> dict[str, float]:
    """Milliseconds of a global batch: medians of the mean over an epoch."""
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
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(num_rounds + 2):
        for name in sorted(runs, reverse=bool(number % 2)):
            seconds = keras_models.time_epoch(*runs[name]).seconds
            if number >= 2:
                times[name].append(seconds / num_steps * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
