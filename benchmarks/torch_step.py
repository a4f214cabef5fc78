"""One training step of PyTorch on two workers with one thread each: Duoka against DDP, Accelerate and Fabric.

    python benchmarks/torch_step.py

All contestants run in the same two processes, in turn, on the same data, with the same model and optimizer and the
same allocator settings. "half" is the step without any communication, on half of the batch: what Duoka's step takes
longer than that is the cost of the exchange. "alone" is the plain step on the whole batch, on one worker with one
thread, while the other one waits.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

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
    "MLP 784-2048-2048-2048-10, global batch 16": (make_mlp, (784,), 16, 4, 30),
    "the same MLP, global batch 128": (make_mlp, (784,), 128, 4, 20),
    "ResNet-18 at 32x32, global batch 64": (make_resnet, (3, 32, 32), 64, 2, 4),
}
PEERS = ("ddp", "accelerate", "fabric")


def main() -> None:
    strategy = duoka.Mirrored(devices=2, threads=1)
    torch.set_num_threads(1)
    _join_gloo(strategy)
    numbers = {}
    for case, parameters in CASES.items():
        numbers[case] = measure(strategy, *parameters)
        if strategy.is_main:
            _print_case(case, numbers[case])
    if strategy.is_main and "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"torch_step_ms": numbers}))


def measure(strategy, make, shape, batch: int, burst: int, repetitions: int) -> dict[str, float]:
    """Medians in milliseconds. Contestants take turns with a burst of steps, of which the first finds cold caches."""
    x, y = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
    half = slice(strategy.worker * batch // 2, (strategy.worker + 1) * batch // 2)
    mine = [(x[half], y[half])] * burst
    contestants = {
        "ddp": _ddp(make, mine),
        "duoka": _duoka(make, x, y, burst),
        "accelerate": _accelerate(make, mine),
        "half": _plain(make, mine),
        "fabric": _fabric(make, mine),
        "alone": _plain(make, [(x, y)] * burst if strategy.worker == 0 else []),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run_burst in contestants.items():
            dist.barrier()
            steps = run_burst()
            if repetition:
                times[name] += steps[1:]
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items() if values}
    return medians | {"memcpy": _memcpy_ms(sum(p.numel() for p in make().parameters()))}


def _memcpy_ms(count: int) -> float:
    """A copy of the gradient, both workers at once."""
    source, target = np.ones(count, np.float32), np.zeros(count, np.float32)
    copies = []
    for _ in range(25):
        dist.barrier()
        begin = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - begin)
    return statistics.median(copies) * 1e3


def _loop(model: nn.Module, optimizer, batches, backward=lambda loss: loss.backward()):
    """The user's loop; the time from one step's end to the next one's."""

    def run() -> list[float]:
        times = []
        begin = time.perf_counter()
        for x, y in batches:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            end = time.perf_counter()
            times.append(end - begin)
            begin = end
        return times

    return run


def _new(make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _plain(make, batches):
    return _loop(*_new(make), batches)


def _ddp(make, batches):
    model, _ = _new(make)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9), batches)


def _accelerate(make, batches):
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    model, optimizer = accelerator.prepare(*_new(make))
    return _loop(model, optimizer, batches, accelerator.backward)


def _fabric(make, batches):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(*_new(make))
    return _loop(model, optimizer, batches, fabric.backward)


def _duoka(make, x, y, burst):
    """A strategy of its own for each model; the loader gives whole batches, of which a worker keeps its share."""
    strategy = duoka.Mirrored(devices=2, threads=1)
    loader = DataLoader([(x, y)] * burst, batch_size=None)
    return _loop(*strategy.prepare(*_new(make), loader))


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
    cost = row["duoka"] - row["half"]
    print("   duoka is " + ", ".join(f"{row[name] / row['duoka']:.2f}x {name}" for name in PEERS), end="; ")
    print(f"{row['alone'] / row['duoka']:.2f}x one worker", end="; ")
    print(f"the exchange takes {cost:.1f} ms = {cost / row['memcpy']:.1f} memcpys", flush=True)


if __name__ == "__main__":
    main()
