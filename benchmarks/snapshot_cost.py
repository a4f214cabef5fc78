"""What snapshots in memory cost: a training in function style, two workers with one thread each.

    python benchmarks/snapshot_cost.py [--seconds 60]

Each case trains for so long under the usual rules: a snapshot every 10 s at most, and at most 1 % of the time. All the
time that training stands still for them is counted on the main worker, which writes them: looking at the clock at each
boundary, estimating what the first one will cost, and writing. The number that counts is its part of the whole time.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="of each case")
    parser.add_argument("--serve", nargs=2, metavar=("CASE", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]), options.seconds)
        return
    numbers: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = Path(folder) / "numbers"
            words = [sys.executable, "-m", "duoka", "run", "--devices", "2", "--threads", "1", str(HERE.resolve())]
            words += ["--seconds", str(options.seconds), "--serve", case, str(path)]
            subprocess.run(words, cwd=folder, check=True)
            row = numbers[case] = json.loads(path.read_text())
            print(
                f"{case}: {row['megabytes']:.1f} MB, {row['snapshots']:.0f} snapshots of {row['typical_ms']:.1f} ms"
                f" (at most {row['longest_ms']:.1f} ms) in {row['seconds']:.0f} s and {row['steps']:.0f} steps:"
                f" {row['percent']:.3f} % of the time",
                flush=True,
            )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"snapshot_cost": numbers}))


def serve(case: str, path: Path, seconds: float) -> None:
    """On two workers: train, and measure."""
    import duoka
    from duoka.strategies.snapshots import Snapshots

    stood_still, writing = Stopwatch(), Stopwatch()
    Snapshots.at_border = stood_still.around(Snapshots.at_border)  # type: ignore[method-assign]
    Snapshots._keep = writing.around(Snapshots._keep)  # type: ignore[method-assign]
    strategy = duoka.Mirrored()
    num_bytes = CASES[case](strategy, seconds)
    if strategy.is_main:
        whole_s = stood_still.last - stood_still.first
        row = {
            "megabytes": num_bytes / 1e6,
            "snapshots": len(writing.times),
            "typical_ms": 1e3 * statistics.median(writing.times or [0.0]),
            "longest_ms": 1e3 * max(writing.times, default=0.0),
            "seconds": whole_s,
            "steps": strategy.step,
            "percent": 100 * sum(stood_still.times) / whole_s,
        }
        path.write_text(json.dumps(row))


class Stopwatch:
    """How long each call of a function takes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first = self.last = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.last = time.perf_counter()
                self.first = self.first or begin
                self.times.append(self.last - begin)

        return call


def train(strategy: Any, seconds: float, model: Any, batch: tuple[Any, ...], loss_of: Any) -> int:
    """Until the time is up. Returns the bytes of weights and optimizer state."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model, optimizer = strategy.prepare(model, optimizer)
    begin = time.perf_counter()

    def train_one(*rows: Any) -> Any:
        return loss_of(*rows), {"is_over": float(time.perf_counter() - begin > seconds)}

    for _ in strategy.steps(10**9):
        optimizer.zero_grad()
        _, metrics = strategy.backward(train_one, *batch)
        optimizer.step()
        if float(metrics["is_over"]):  # the same on all workers
            break
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def mlp_of_ten_million(strategy: Any, seconds: float) -> int:
    import torch
    import torch.nn.functional as F
    from models import make_mlp

    torch.manual_seed(0)
    model = make_mlp()
    batch = torch.randn(128, 784), torch.randint(0, 10, (128,))
    return train(strategy, seconds, model, batch, lambda x, y: F.cross_entropy(model(x), y))


def transformer(strategy: Any, seconds: float) -> int:
    import torch
    from models import make_transformer

    torch.manual_seed(0)
    model = make_transformer()
    batch = (torch.randn(32, 16, 16),)
    return train(strategy, seconds, model, batch, lambda x: model(x).square().mean())


CASES: dict[str, Callable[[Any, float], int]] = {
    "MLP of 10M parameters with Adam, global batch 128": mlp_of_ten_million,
    "Transformer of 163 tensors with Adam, global batch 32": transformer,
}


if __name__ == "__main__":
    main()
