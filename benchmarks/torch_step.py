"""One training step of PyTorch on two workers with one thread each: Duoka against DDP, Accelerate and Fabric.

    python benchmarks/torch_step.py [--quick] [--rounds 15] [--case "..."]

All contestants run in the same two processes, in paired rounds (paired.py), on the same data, with the same model,
optimizer and allocator settings. DDP runs twice in each round. "floor" is the plain step on half of the batch with
one barrier in place of the exchange (Duoka's own barrier in shared memory, the fastest here): the time a perfect
exchange would leave. "alone" is the plain step on the whole batch on one worker while the other worker waits.
`--quick` runs only DDP as a peer, and ResNet-18 with a smaller batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import duoka


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    num_steps: int  # of a burst; the first of several is not counted


CASES = {
    "MLP 784-2048-2048-2048-10, global batch 16": Case(models.make_mlp, (784,), 16, 4),
    "the same MLP, global batch 128": Case(models.make_mlp, (784,), 128, 3),
    "ResNet-18 at 32x32, global batch 64": Case(models.make_resnet, (3, 32, 32), 64, 1),
    "MobileNetV2 at 32x32, PyTorch, global batch 64": Case(models.make_mobilenet, (3, 32, 32), 64, 2),
    "transformer, 163 tensors, 1.75 MB, global batch 8": Case(models.make_transformer, (16, 16), 8, 8),
}
RESNET_QUICK = "ResNet-18 at 32x32, global batch 8"
QUICK_CASES = {
    (RESNET_QUICK if case.make is models.make_resnet else title): (
        Case(case.make, case.shape, 8, 1) if case.make is models.make_resnet else case
    )
    for title, case in CASES.items()
}
BURST_S = 0.2  # of --quick
PEERS = ("ddp", "accelerate", "fabric")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only DDP and the floor, smaller cases")
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--case", action="append", choices=[*CASES, RESNET_QUICK], help="only these")
    options = parser.parse_args()
    strategy = duoka.Mirrored(devices=2, threads=1)
    torch.set_num_threads(1)
    _join_gloo(strategy)
    numbers = {}
    for title, case in (QUICK_CASES if options.quick else CASES).items():
        if options.case and title not in options.case:
            continue
        contest = measure(strategy, case, options.rounds, is_quick=options.quick)
        numbers[title] = contest.write()
        if strategy.is_main:
            _print_case(title, contest)
    if strategy.is_main and "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"torch_step_ms": numbers}))


def measure(strategy: Any, case: Case, num_rounds: int, *, is_quick: bool) -> paired.Contest:
    """Run the rounds of one case. A round takes worker 0's median step of a burst."""
    make, batch = case.make, case.batch_size
    if is_quick:
        case = dataclasses.replace(case, num_steps=_count_steps(case))
    x, y = torch.randn(batch, *case.shape), torch.randint(0, 10, (batch,))
    half = slice(strategy.worker * batch // 2, (strategy.worker + 1) * batch // 2)
    mine = [(x[half], y[half])] * case.num_steps
    run = {
        "ddp": _ddp(make, mine),
        "duoka": _duoka(make, x, y, case.num_steps),
        "floor": _floor(make, mine, strategy._session.collective.barrier),
    }
    names = paired.arrange(["ddp"])
    if not is_quick:
        run |= {"accelerate": _accelerate(make, mine), "fabric": _fabric(make, mine)}
        run["alone"] = _plain(make, [(x, y)] * case.num_steps if strategy.worker == 0 else [])
        names += ["accelerate", "fabric", "alone"]

    def run_burst(name: str) -> list[float]:
        dist.barrier()
        return run[name]() or [0.0]  # worker 1 has no steps of its own in "alone"

    contest = paired.Contest.of(paired.run_rounds(names, run_burst, num_rounds))
    if is_quick:
        return contest
    return paired.Contest({**contest.times, "memcpy": [_memcpy_ms(sum(p.numel() for p in make().parameters()))]})


def _count_steps(case: Case) -> int:
    """So many that a burst takes a fifth of a second, on a slow machine too; the same on both workers."""
    batches = [(torch.randn(case.batch_size // 2, *case.shape), torch.zeros(case.batch_size // 2).long())] * 3
    wanted = torch.tensor([BURST_S / min(_plain(case.make, batches)())])
    dist.broadcast(wanted, 0)
    return max(1, min(case.num_steps, round(wanted.item())))


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


def _floor(make, batches, barrier):
    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        barrier()

    return _loop(*_new(make), batches, backward)


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
    """Function style, on the tensors of the global batch. A strategy of its own for each model."""
    strategy = duoka.Mirrored(devices=2, threads=1)
    model, optimizer = strategy.prepare(*_new(make))

    def loss_of(own_x: torch.Tensor, own_y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(own_x), own_y)

    def run() -> list[float]:
        times = []
        begin = time.perf_counter()
        for _ in range(burst):
            optimizer.zero_grad()
            strategy.backward(loss_of, x, y)
            optimizer.step()
            end = time.perf_counter()
            times.append(end - begin)
            begin = end
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


def _print_case(title: str, contest: paired.Contest) -> None:
    print(f"{title}: " + ", ".join(f"{name} {contest.typical(name):.1f} ms" for name in contest.times))
    for peer in PEERS:
        if peer in contest.times:
            print(f"   {peer}/duoka {contest.against(peer)}", end=";")
    cost = contest.typical("duoka") - contest.typical("floor")
    print(
        f"   A/A {contest.control('ddp')}; duoka/floor {contest.in_times_of('floor')}, {cost:.1f} ms above", flush=True
    )


if __name__ == "__main__":
    main()
