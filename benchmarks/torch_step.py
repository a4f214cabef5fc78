"""One training step of PyTorch on two workers with one thread each: Duoka against DDP, Accelerate and Fabric.

    python benchmarks/torch_step.py

All contestants run in the same two processes, in turn, on the same data, with the same model and optimizer and the
same allocator settings. "plain half" is the step without any communication, on half of the batch.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import duoka


def make_mlp() -> nn.Module:
    sizes = [784, 2048, 2048, 2048, 10]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_resnet() -> nn.Module:
    """ResNet-18 for 32x32 images, without torchvision."""

    class Block(nn.Module):
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
            )  # fmt: skip
            self.skip = nn.Sequential()
            if stride != 1 or inside != outside:
                self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.main(x) + self.skip(x))

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(inside, outside, stride))
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


CASES = {
    "MLP, 10M parameters, global batch 16": (make_mlp, (784,), 16, 40),
    "MLP, 10M parameters, global batch 128": (make_mlp, (784,), 128, 30),
    "ResNet-18 at 32x32, global batch 64": (make_resnet, (3, 32, 32), 64, 8),
}
BURST = 4


def main() -> None:
    strategy = duoka.Mirrored(devices=2, threads=1)
    torch.set_num_threads(1)
    _join_gloo(strategy)
    numbers = {}
    for case, (make, shape, batch, repetitions) in CASES.items():
        numbers[case] = measure(strategy, make, shape, batch, repetitions)
        if strategy.is_main:
            _print_case(case, numbers[case])
    if strategy.is_main and "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"torch_step_ms": numbers}))


def measure(strategy, make, shape, batch: int, repetitions: int) -> dict[str, float]:
    x, y = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
    half = slice(strategy.worker * batch // 2, (strategy.worker + 1) * batch // 2)
    contestants: dict[str, Callable[[], float]] = {
        "ddp": _ddp(make, x[half], y[half]),
        "accelerate": _accelerate(make, x[half], y[half]),
        "fabric": _fabric(make, x[half], y[half]),
        "plain half": _plain(make, x[half], y[half]),
        "duoka": _duoka(strategy, make, x, y, burst=BURST),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run_burst in contestants.items():
            dist.barrier()
            steps = run_burst()
            if repetition:
                times[name] += steps
    gradient = sum(p.numel() for p in make().parameters())
    source, target = np.ones(gradient, np.float32), np.zeros(gradient, np.float32)
    copies = []
    for _ in range(15):
        dist.barrier()
        begin = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return medians | {"memcpy": statistics.median(copies) * 1e3}


def _loop(model: nn.Module, optimizer, x, y, backward=lambda loss: loss.backward()):
    def run() -> list[float]:
        times = []
        for _ in range(BURST):
            begin = time.perf_counter()
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            times.append(time.perf_counter() - begin)
        return times

    return run


def _new(make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _plain(make, x, y):
    model, optimizer = _new(make)
    return _loop(model, optimizer, x, y)


def _ddp(make, x, y):
    model, _ = _new(make)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9), x, y)


def _accelerate(make, x, y):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_new(make))
    return _loop(model, optimizer, x, y, accelerator.backward)


def _fabric(make, x, y):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    fabric.launch()
    model, optimizer = fabric.setup(*_new(make))
    return _loop(model, optimizer, x, y, fabric.backward)


def _duoka(strategy, make, x, y, burst: int):
    """The loader yields the same batch again and again: loading is not what is compared."""
    from duoka.frameworks.torch.adapter import make_adapter

    model, optimizer = _new(make)
    adapter = make_adapter(strategy._session.collective, 0, strategy.device)
    model, optimizer = adapter.prepare([model, optimizer])
    (replica,) = strategy.local_replicas
    rows = len(x) // 2

    def run() -> list[float]:
        times = []
        for _ in range(burst):
            begin = time.perf_counter()
            adapter.begin_batch()
            with adapter.loop.run_body(replica, rows, len(x)) as body:
                optimizer.zero_grad()
                F.cross_entropy(
                    model(x[replica * rows : (replica + 1) * rows]), y[replica * rows : (replica + 1) * rows]
                ).backward()
                optimizer.step()
                adapter.end_body(body)
            adapter.end_batch()
            times.append(time.perf_counter() - begin)
        return times

    return run


def _join_gloo(strategy) -> None:
    collective = strategy._session.collective
    name = collective.broadcast(np.frombuffer(tempfile.mkdtemp().encode(), np.uint8)).tobytes().decode()
    os.environ |= {
        "RANK": str(strategy.worker),
        "LOCAL_RANK": str(strategy.worker),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{name}/store", 2), rank=strategy.worker, world_size=2)


def _print_case(case: str, row: dict[str, float]) -> None:
    print(f"{case}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in row.items()))
    cost = row["duoka"] - row["plain half"]
    peers = [name for name in ("ddp", "accelerate", "fabric") if name in row]
    print("   duoka is " + ", ".join(f"{row[name] / row['duoka']:.2f}x {name}" for name in peers), end="; ")
    print(
        f"exchange {cost:.1f} ms = {cost / row['memcpy']:.1f} memcpys",
        flush=True,
    )


main()
