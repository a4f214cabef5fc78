"""For how long a save holds up the training thread, against one memcpy of the same bytes: Adam, 10M parameters.

    python benchmarks/checkpoint_stall.py               (part of: make bench)

Everything counts from the call for the state (`state_dict`) until training may go on. `memcpy` is libc's, of as many
bytes, into memory that was touched before. The two take turns, each after a real step of training.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch_step import make_mlp, make_resnet

from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter
from duoka.frameworks.saving import list_codecs

CASES = {
    "MLP 784-2048-2048-2048-10, Adam": (make_mlp, (8, 784)),
    "ResNet-18, Adam": (make_resnet, (4, 3, 32, 32)),
}
REPETITIONS = 9
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def main() -> None:
    torch.set_num_threads(1)
    numbers = {}
    for case, (make, shape) in CASES.items():
        row = numbers[case] = measure(make(), shape)
        print(
            f"{case}, {row['megabytes']:.0f} MB: {row['stall']:.1f} ms a save, memcpy {row['memcpy']:.1f} ms:"
            f" {row['stall'] / row['memcpy']:.2f}x;"
            f" the first save {row['first']:.0f} ms, written in {row['write']:.0f} ms",
            flush=True,
        )
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"checkpoint_stall_ms": numbers}))


def measure(model: torch.nn.Module, shape: tuple[int, ...]) -> dict[str, float]:
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
    times: dict[str, list[float]] = {"stall": [], "memcpy": [], "write": []}
    with tempfile.TemporaryDirectory() as folder:
        writer = BackgroundWriter(Store(folder), list_codecs())

        def save(step: int) -> None:
            begin = time.perf_counter()
            writer.submit(step, {"step": step}, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            times["stall"].append(time.perf_counter() - begin)
            writer.wait(60)  # saves are rare: the next one finds the disk idle
            times["write"].append(time.perf_counter() - begin)

        def copy(step: int) -> None:
            begin = time.perf_counter()
            _memcpy(target.ctypes.data, source.ctypes.data, nbytes)
            times["memcpy"].append(time.perf_counter() - begin)

        for step in range(REPETITIONS + 1):
            for action in (save, copy) if step % 2 else (copy, save):
                train()
                action(step)
        writer.close(60)
    first = times["stall"].pop(0)  # its memory is made and touched then
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return medians | {"first": first * 1e3, "megabytes": nbytes / 1e6}


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


if __name__ == "__main__":
    main()
