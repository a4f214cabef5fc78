"""Seconds to the first batch of a loader with as many samples as ImageNet: PyTorch's own, and strategy.batches.

    python benchmarks/first_batch.py [--rounds 15]

Two replicas on one worker, which then loads all samples of the batch, as PyTorch does. A round draws the first batch
of a new loader once from each; the median difference counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import paired
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import duoka

NUM_SAMPLES, BATCH = 1_281_167, 256


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    options = parser.parse_args()
    strategy = duoka.Mirrored(devices=1, replicas=2, threads=1)
    model = nn.Linear(1, 1)
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))

    def draw_plain() -> float:
        begin = time.perf_counter()
        batch = next(iter(DataLoader(Numbers(), BATCH, shuffle=True)))
        assert len(batch) == BATCH
        return time.perf_counter() - begin

    def draw_ours() -> float:
        begin = time.perf_counter()
        batch = next(iter(strategy.batches(DataLoader(Numbers(), BATCH, shuffle=True))))
        assert sum(len(batch.load(replica)[0]) for replica in range(2)) >= 2
        return time.perf_counter() - begin

    draws = {"plain": draw_plain, "duoka": draw_ours}
    rounds = paired.run_rounds(["plain", "duoka"], lambda name: [draws[name]()], options.rounds)
    contest = paired.Contest.of(rounds, scale=1.0)
    differences = [a - b for a, b in zip(contest.times["duoka"], contest.times["plain"], strict=True)]
    print(
        f"first batch of {NUM_SAMPLES:,} samples: PyTorch {contest.typical('plain'):.3f} s, Duoka"
        f" {contest.typical('duoka'):.3f} s, difference {statistics.median(differences):.3f} s"
    )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"first_batch_s": contest.write()}))


if __name__ == "__main__":
    main()
