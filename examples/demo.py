"""Train examples/digits as a plain script, and with 4 replicas on 1, 2 and 4 workers. `make demo` runs this.

python examples/demo.py
python examples/demo.py --epochs 1 --workers 1 2    less work

The demo fails if the weights on 1, 2 and 4 workers are not bitwise identical, with dropout and without. It also fails
if they differ from the plain script's weights by more than rounding explains.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from safetensors.numpy import load_file

DIGITS = Path(__file__).parent / "digits"
NUM_REPLICAS = 4
ROUNDING = 1e-4  # allowed distance from the plain script's weight, relative to the largest weight of the layer
PLAIN = [sys.executable, str(DIGITS / "before.py")]


class Result(NamedTuple):
    loss: float
    accuracy: float  # in percent
    seconds: float
    weights: dict

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(self.weights[name].tobytes())
        return digest.hexdigest()


def on_workers(num_workers: int) -> list[str]:
    run = [sys.executable, "-m", "duoka", "run", "--replicas", str(NUM_REPLICAS), "--devices", str(num_workers)]
    return [*run, str(DIGITS / "after.py")]


def run(command: list[str], *options: str) -> Result:
    """Run a script in a directory of its own, on CPUs, with one thread per process."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.safetensors"
        words = [*command, "--weights", str(weights), *options]
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, cwd=directory, env=environ)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\nThis command failed: {' '.join(words)}")
        seconds = time.perf_counter() - begin
        loss, accuracy = re.search(r"^loss ([\d.]+)  accuracy ([\d.]+)%", done.stdout, re.MULTILINE).groups()
        return Result(float(loss), float(accuracy), seconds, load_file(weights))


def distance(result: Result, other: Result) -> float:
    """Return the largest difference between two weights, relative to the largest weight of the layer."""
    return max(float(abs(result.weights[name] - mine).max() / abs(mine).max()) for name, mine in other.weights.items())


def show(name: str, result: Result) -> None:
    accuracy = f"{result.accuracy:.1f} %"
    print(f"{name:26} {result.loss:8.5f} {accuracy:>9} {result.seconds:8.1f}   {result.sha256[:12]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train examples/digits as a plain script and on several workers.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="(default: 1 2 4)")
    options = parser.parse_args()
    counts = " and ".join(", ".join(map(str, options.workers)).rsplit(", ", 1))  # 1, 2 and 4
    without_dropout = ["--dropout", "0", "--epochs", str(options.epochs)]
    with_dropout = ["--dropout", "0.25", "--epochs", str(min(2, options.epochs))]

    print(f"{'':26} {'loss':>8} {'accuracy':>9} {'seconds':>8}   SHA-256 of the weights")
    plain = run(PLAIN, *without_dropout)
    show("plain script, no Duoka", plain)
    replicated = []
    for num_workers in options.workers:
        replicated.append(run(on_workers(num_workers), *without_dropout))
        show(f"{NUM_REPLICAS} replicas on {num_workers} worker{'s' * (num_workers > 1)}", replicated[-1])
    with ThreadPoolExecutor(2) as both:  # two at a time: these runs are not timed
        dropped = list(both.map(lambda num_workers: run(on_workers(num_workers), *with_dropout), options.workers))
    if len({result.sha256 for result in replicated}) > 1 or len({result.sha256 for result in dropped}) > 1:
        sys.exit("\nThe weights depend on the number of workers. Please report this bug.")
    far = distance(replicated[0], plain)
    if far > ROUNDING:
        sys.exit(f"\nThe weights differ from the plain script's by {far:.1e}. Please report this bug.")
    print(
        f"\nEqual: every bit of the weights on {counts} workers, with shuffling and an uneven last batch. The same"
        f"\n       holds with dropout, in {min(2, options.epochs)} more epochs that the table does not show."
        f"\nClose: the plain script. It sees the same samples in the same order. No weight differs by more than"
        f"\n       {far:.1e} of the largest weight in its layer, because sums are rounded in another order."
        f"\nTimings include start-up and {NUM_REPLICAS} virtual devices share {os.cpu_count()} cores: not a benchmark."
    )


main()
