"""The course of a training: examples/reuters_cnn as a plain script, and by two replicas on two workers, side by side.

    python benchmarks/keras_reuters_course.py --data ~/.keras/datasets [--epochs 10] [--backend tensorflow]

Seed and order of rows are the same. What is asked: the loss of the first epoch within 0.5 %, of the last one within
5 %, the best validation accuracy within one point. Not part of `make bench`: the data is not in the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "reuters_cnn"
Course = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser()
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="a directory with reuters.npz or reuters_flat.npz")
    source.add_argument("--synthetic", action="store_true", help="make rows up: shows that the script runs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"), default="tensorflow")
    options = parser.parse_args()
    words = ["--synthetic"] if options.synthetic else ["--data", os.path.abspath(os.path.expanduser(options.data))]
    words += ["--epochs", str(options.epochs)]
    plain = train([], "before.py", words, options.backend)
    ours = train(["-m", "duoka", "run", "--devices", "2", "--replicas", "2"], "after.py", words, options.backend)
    for epoch in range(options.epochs):
        parts = [f"{name} {plain[name][epoch]:.4f} / {ours[name][epoch]:.4f}" for name in plain]
        print(f"epoch {epoch + 1:2}  plain / duoka: " + ", ".join(parts))
    first, last = (abs(ours["loss"][n] / plain["loss"][n] - 1) * 100 for n in (0, -1))
    peak = abs(max(ours["val_accuracy"]) - max(plain["val_accuracy"])) * 100
    print(
        f"loss of epoch 1 differs by {first:.2f} % (asked: 0.5), of epoch {options.epochs} by {last:.2f} % (asked: 5);"
    )
    print(f"best validation accuracy by {peak:.2f} points (asked: 1)")
    if "DUOKA_BENCH_JSON" in os.environ:
        numbers = {"keras_course": {"first_loss_percent": first, "last_loss_percent": last, "peak_points": peak}}
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps(numbers))
    if first > 0.5 or last > 5 or peak > 1:
        raise SystemExit("more than asked")


def train(launcher: list[str], script: str, words: list[str], backend: str) -> Course:
    """What Keras prints after each epoch, as numbers by name."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, *launcher, str(EXAMPLE / script), *words],
            capture_output=True,
            text=True,
            cwd=directory,
            timeout=1800,
            env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = re.findall(r"^\d+/\d+ - .*?/step - (.*)$", done.stdout, re.MULTILINE)
    epochs = [dict(re.findall(r"(\w+): ([\d.e+-]+)", line)) for line in lines]
    return {name: [float(epoch[name]) for epoch in epochs] for name in ("loss", "accuracy", "val_loss", "val_accuracy")}


if __name__ == "__main__":
    main()
