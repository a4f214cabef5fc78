"""What Duoka adds to a loop on one worker with one replica, against the plain loop: ResNet-18 at 32x32, batch 64.

python benchmarks/torch_overhead.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_step import make_resnet

import duoka

BATCH, BATCHES = 64, 14


def main() -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(BATCH * BATCHES, 3, 32, 32), torch.randint(0, 10, (BATCH * BATCHES,)))
    runs = {"plain": new_run(data), "duoka": new_run(data, duoka.Mirrored(devices=1))}
    times: dict[str, list[float]] = {name: [] for name in runs}
    loops = {name: iter(loader) for name, (_, _, loader) in runs.items()}
    for batch in range(BATCHES):
        # One step each, in turn and in changing order: what else the machine does comes by both alike.
        for name in sorted(runs, reverse=bool(batch % 2)):
            model, optimizer, _ = runs[name]
            begin = time.perf_counter()
            x, y = next(loops[name])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if batch >= 2:
                times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    ratio = medians["duoka"] / medians["plain"]
    print(f"one worker, one replica: {medians['duoka']:.1f} ms, plain {medians['plain']:.1f} ms: {ratio:.3f}x its time")
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"torch_overhead_ms": medians}))


def new_run(data, strategy=None):
    torch.manual_seed(0)
    model = make_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(data, batch_size=BATCH)
    return (model, optimizer, loader) if strategy is None else strategy.prepare(model, optimizer, loader)


if __name__ == "__main__":
    main()
