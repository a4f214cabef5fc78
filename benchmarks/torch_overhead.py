"""The time Duoka adds to a loop on one worker with one replica, against the plain loop: ResNet-18 at 32x32, batch 64.

    python benchmarks/torch_overhead.py [--rounds 15]

One step per contestant and round, in paired rounds; the plain loop runs twice in each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import paired
import torch
import torch.nn.functional as F
from models import make_resnet
from torch.utils.data import DataLoader, TensorDataset

import duoka

BATCH, WARM_UP = 64, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_batches = options.rounds + WARM_UP
    data = TensorDataset(torch.randn(BATCH * num_batches, 3, 32, 32), torch.randint(0, 10, (BATCH * num_batches,)))
    # The plain loop takes two steps in each round, so its data has to last twice as long.
    twice = torch.utils.data.ConcatDataset([data, data])
    steps = {"plain": plain_steps(twice), "duoka": function_steps(data, duoka.Mirrored(devices=1))}

    def run_step(name: str) -> list[float]:
        begin = time.perf_counter()
        next(steps[name])
        return [time.perf_counter() - begin]

    contest = paired.Contest.of(
        paired.run_rounds(paired.arrange(["plain"], []), run_step, options.rounds, num_warm_up=WARM_UP)
    )
    print(
        f"one worker, one replica: {contest.typical('duoka'):.1f} ms, plain {contest.typical('plain'):.1f} ms;"
        f" duoka/plain {contest.in_times_of('plain')}, A/A {contest.control('plain')}"
    )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"torch_overhead_ms": contest.write()}))


def new_run(data):
    torch.manual_seed(0)
    model = make_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, DataLoader(data, batch_size=BATCH)


def plain_steps(data):
    model, optimizer, loader = new_run(data)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def function_steps(data, strategy):
    model, optimizer, loader = strategy.prepare(*new_run(data))

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    for batch in strategy.batches(loader):
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
        yield


if __name__ == "__main__":
    main()
