"""What `make demo` runs: examples/digits as a plain script, and by 4 replicas on 1, 2 and 4 workers.

python examples/demo.py

It checks what it says, and ends with an error if the weights on 1, 2 and 4 workers differ in one bit, or if those of
the plain script are further away than rounding explains.
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
ROUNDING = 1e-5  # how far a weight may be from the plain script's, relative to the largest one of its layer
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
    """Run a script to its end in a directory of its own: on the CPU, one thread per process, whatever there is."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.safetensors"
        words = [*command, "--weights", str(weights), *options]
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, cwd=directory, env=environ)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\nThis has failed: {' '.join(words)}")
        seconds = time.perf_counter() - begin
        loss, accuracy = re.findall(r"[\d.]+", done.stdout)[:2]
        result = Result(float(loss), float(accuracy), seconds, load_file(weights))
        if "weights" in done.stdout and result.sha256 not in done.stdout:
            sys.exit(f"{done.stdout}\nThe weights in the file are not those that were trained.")
        return result


def distance(result: Result, other: Result) -> float:
    """The largest difference between two weights, relative to the largest weight of the layer."""
    return max(float(abs(result.weights[name] - mine).max() / abs(mine).max()) for name, mine in other.weights.items())


def show(name: str, result: Result) -> None:
    accuracy = f"{result.accuracy:.1f} %"
    print(f"{name:26} {result.loss:8.5f} {accuracy:>9} {result.seconds:8.1f}   {result.sha256[:12]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="examples/digits, plain and on 1, 2 and 4 workers")
    parser.add_argument("--epochs", default="10")
    epochs = ["--epochs", parser.parse_args().epochs]
    exactly = ["--epochs", "2", "--in-order", "--dropout", "0"]

    print(f"{'':26} {'loss':>8} {'accuracy':>9} {'seconds':>8}   SHA-256 of the weights")
    plain = run(PLAIN, *epochs)
    show("plain script, no Duoka", plain)
    replicated = []
    for num_workers in (1, 2, 4):
        replicated.append(run(on_workers(num_workers), *epochs))
        show(f"{NUM_REPLICAS} replicas on {num_workers} worker{'s' * (num_workers > 1)}", replicated[-1])
    if len({result.sha256 for result in replicated}) > 1:
        sys.exit("\nThe weights differ between numbers of workers: this is a bug in Duoka, please report it.")
    with ThreadPoolExecutor() as both:  # nobody looks at the clock here
        far = distance(*both.map(lambda command: run(command, *exactly), (on_workers(1), PLAIN)))
    if far > ROUNDING:
        sys.exit(f"\nThe weights are {far:.1e} away from the plain script's: this is a bug in Duoka, please report it.")
    loss, accuracy = abs(replicated[0].loss - plain.loss), abs(replicated[0].accuracy - plain.accuracy)
    print(
        f"\nEqual: every bit of the weights on 1, 2 and 4 workers, with shuffling, dropout and an uneven last batch."
        f"\nNear:  the plain script, by {loss:.3f} in loss and {accuracy:.1f} points in accuracy. It draws other random"
        f"\n       numbers for shuffling and dropout, as another seed would. With both switched off (two more runs,"
        f"\n       2 epochs) no weight differs by more than {far:.1e} of its layer's largest: other roundings of sums."
        f"\nNot:   the seconds, which are whole commands with start-up, one thread per process. {NUM_REPLICAS} virtual"
        f"\n       devices share {os.cpu_count()} cores: they show that it works, not how fast."
    )


main()
