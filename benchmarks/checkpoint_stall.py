"""The time a save blocks the training thread, against one memcpy of the same bytes: Adam, 10M parameters.

    python benchmarks/checkpoint_stall.py [--rounds 15]              (part of: make bench)

A save counts from the call of `state_dict` until training continues. `memcpy` is libc's, of the same number of bytes,
into memory that was touched before. They take turns in paired rounds, each after a real training step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import paired
import torch
import torch.nn.functional as F
from models import make_mlp, make_resnet

from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from duoka.frameworks.saving import list_codecs

CASES = {
    "MLP 784-2048-2048-2048-10, Adam": (make_mlp, (8, 784)),
    "ResNet-18, Adam": (make_resnet, (4, 3, 32, 32)),
}
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = {}
    for case, (make, shape) in CASES.items():
        row = numbers[case] = measure(make(), shape, options.rounds)
        contest = paired.Contest.read(row)
        print(
            f"{case}, {row['megabytes']:.0f} MB: {contest.typical('stall'):.1f} ms a save,"
            f" memcpy {contest.typical('memcpy'):.1f} ms; stall/memcpy {contest.in_times_of('memcpy', 'stall')},"
            f" A/A {contest.control('memcpy')}; the first save {row['first']:.0f} ms,"
            f" written in {contest.typical('write'):.0f} ms",
            flush=True,
        )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"checkpoint_stall_ms": numbers}))


def measure(model: torch.nn.Module, shape: tuple[int, ...], num_rounds: int) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    train()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    nbytes = sum(t.nbytes for t in _tensors(state))
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    written: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(Store(folder), list_codecs())

        def save() -> float:
            begin = time.perf_counter()
            step = len(written)
            writer.submit(step, {"step": step}, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            stall = time.perf_counter() - begin
            writer.wait(60)  # saves are rare: the next one finds the disk idle
            written.append(time.perf_counter() - begin)
            return stall

        def copy() -> float:
            begin = time.perf_counter()
            _memcpy(target.ctypes.data, source.ctypes.data, nbytes)
            return time.perf_counter() - begin

        def run_one(name: str) -> list[float]:
            train()
            return [save() if name == "stall" else copy()]

        first = run_one("stall")[0]  # allocates and touches the memory of the copy
        rounds = paired.run_rounds(["memcpy", "stall", "memcpy again"], run_one, num_rounds)
        writer.close(60)
    contest = paired.Contest.of(rounds)
    write = statistics.median(written) * 1e3
    return contest.write() | {"write": write, "first": first * 1e3, "megabytes": nbytes / 1e6}


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


if __name__ == "__main__":
    main()
