"""Python calls into Duoka, and its CPU time on the main thread, for one global batch in PyTorch.

    python benchmarks/calls.py [--batches 20] [--rounds 15]

All of it with two replicas on one worker (R=2, W=1), one thread, after a warm-up.

- Calls per global batch: `call` events of sys.setprofile whose code lies in src/duoka, for a model of four parameters.
  They include both replicas, the loader and the update.
- Calls per exchange: the same events from `collective.exchange` to `end_step`, with one buffer of four numbers. The
  two lines that write a replica's numbers belong to this file and are not counted.
- CPU per global batch: time.thread_time of one global batch with Duoka, less that of the same work without Duoka. The
  work without Duoka is two forward and backward passes of half the batch each, fed by a plain DataLoader, with one
  zero_grad and one optimizer step. The rest is Duoka's share. Both take turns, and the median difference of all
  rounds counts. The models have 4, 160 and 1,200 parameters.

- CPU of a call: time.thread_time of one `strategy.backward` on tensors, less that of its functions and backward passes.

A contestant is a function that takes a strategy and a model, and returns a generator of finished global batches.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paired
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka

PACKAGE = os.path.dirname(os.path.abspath(duoka.__file__)) + os.sep
BATCH, WIDTH = 16, 4
WARM_UP = 3  # global batches of each epoch that are not counted
NUM_PARAMETERS = (4, 160, 1200)


def function_style(strategy: Any, model: nn.Module, num_batches: int) -> Callable[[], Iterator[None]]:
    """`strategy.backward`: the loop runs once for a global batch, the function once for each replica."""
    optimizer = _optimizer(model)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(_data(num_batches), batch_size=BATCH))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y) ** 2).mean()

    def run() -> Iterator[None]:
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            strategy.backward(loss_of, batch)
            optimizer.step()
            yield

    return run


CONTESTANTS = {"function style": function_style}  # plain style needs one replica per worker


def without_duoka(model: nn.Module, num_batches: int) -> Callable[[], Iterator[None]]:
    """The work that is not Duoka's: two passes of half the batch, and one update."""
    optimizer = _optimizer(model)
    loader = DataLoader(_data(num_batches), batch_size=BATCH // 2)

    def run() -> Iterator[None]:
        for number, (x, y) in enumerate(loader):
            if number % 2 == 0:
                optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            if number % 2 == 1:
                optimizer.step()
                yield

    return run


class Calls:
    """Count the calls into Duoka in a `with` block, by file."""

    def __enter__(self) -> Calls:
        self.files: collections.Counter[str] = collections.Counter()
        sys.setprofile(self._see)
        return self

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    @property
    def total(self) -> int:
        return sum(self.files.values())


def count_calls_per_batch(run: Callable[[], Iterator[None]], num_batches: int) -> tuple[float, int]:
    """Calls per global batch, and the number of files they go through."""
    batches = run()
    for _ in range(WARM_UP):
        next(batches)
    with Calls() as calls:
        for _ in range(num_batches):
            next(batches)
    for _ in batches:  # an epoch that is left in the middle is reported
        pass
    return calls.total / num_batches, len(calls.files)


def count_calls_per_exchange(collective: Any, num_exchanges: int) -> tuple[float, int]:
    """Calls from opening an exchange to the end of its step, and the number of files they go through."""
    buffer = collective.buffer(4, "f4")

    def exchange_once() -> None:
        exchange = collective.exchange([buffer])

        def place(replica: int) -> bytes:
            exchange.slot(buffer, replica).fill(1)
            return b""

        exchange.carry_out(place)
        assert np.all(exchange.result(buffer) == collective.num_replicas)
        collective.end_step()

    for _ in range(WARM_UP):
        exchange_once()
    with Calls() as calls:
        for _ in range(num_exchanges):
            exchange_once()
    return calls.total / num_exchanges, len(calls.files)


def measure_cpu(
    ours: Callable[[], Iterator[None]], plain: Callable[[], Iterator[None]], num_rounds: int
) -> tuple[float, float, float]:
    """Milliseconds of the main thread per global batch: with Duoka, without it, and the median difference."""
    runs = {"duoka": ours, "plain": plain}
    found = paired.run_rounds(list(runs), lambda name: _thread_times(runs[name]), num_rounds)
    contest = paired.Contest.of(found)
    differences = [a - b for a, b in zip(contest.times["duoka"], contest.times["plain"], strict=True)]
    return contest.typical("duoka"), contest.typical("plain"), statistics.median(differences)


def measure_call(num_parameters: int, num_rounds: int) -> float:
    """Milliseconds of the main thread for one `strategy.backward`, less those of its functions and their backwards."""
    strategy, model = _new_strategy(), make_model(num_parameters)
    model, _ = strategy.prepare(model, _optimizer(model))
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
    halves = list(zip(x.split(BATCH // 2), y.split(BATCH // 2), strict=True))

    def loss_of(own_x: torch.Tensor, own_y: torch.Tensor) -> torch.Tensor:
        return ((model(own_x) - own_y) ** 2).mean()

    def call() -> list[float]:
        model.zero_grad()
        begin = time.thread_time()
        strategy.backward(loss_of, x, y)
        return [time.thread_time() - begin]

    def compute() -> list[float]:
        seconds = 0.0
        for own_x, own_y in halves:
            model.zero_grad()
            begin = time.thread_time()
            loss_of(own_x, own_y).backward()
            seconds += time.thread_time() - begin
        return [seconds]

    runs = {"duoka": call, "plain": compute}
    contest = paired.Contest.of(paired.run_rounds(list(runs), lambda name: runs[name](), num_rounds, num_warm_up=5))
    return statistics.median(a - b for a, b in zip(contest.times["duoka"], contest.times["plain"], strict=True))


def _thread_times(run: Callable[[], Iterator[None]]) -> list[float]:
    ends = [time.thread_time() for _ in run()]
    return [after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]


def make_model(num_parameters: int) -> nn.Module:
    """Linear layers of width 4, each with a weight and a bias."""
    layers: list[nn.Module] = []
    for _ in range(num_parameters // 2 - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _data(num_batches: int) -> TensorDataset:
    return TensorDataset(torch.randn(BATCH * num_batches, WIDTH), torch.randn(BATCH * num_batches, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=20, help="global batches that are counted or timed at a time")
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS, help="of the CPU time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_batches = WARM_UP + options.batches
    numbers: dict[str, dict[str, float]] = {}
    for name, contestant in CONTESTANTS.items():
        row = numbers[name] = {}
        run = contestant(_new_strategy(), make_model(NUM_PARAMETERS[0]), num_batches + 1)
        row["calls per global batch"], row["files"] = count_calls_per_batch(run, options.batches)
        for num_parameters in NUM_PARAMETERS:
            ours = contestant(_new_strategy(), make_model(num_parameters), num_batches)
            plain = without_duoka(make_model(num_parameters), num_batches)
            whole, without, row[f"CPU ms at {num_parameters} parameters"] = measure_cpu(ours, plain, options.rounds)
            row[f"whole CPU ms at {num_parameters} parameters"] = whole
            row[f"plain CPU ms at {num_parameters} parameters"] = without
    row = numbers["function style"]
    for num_parameters in NUM_PARAMETERS:
        row[f"call CPU ms at {num_parameters} parameters"] = measure_call(num_parameters, 6 * options.rounds)
    collective = _new_strategy()._session.collective
    exchange, exchange_files = count_calls_per_exchange(collective, options.batches)
    _print_table(numbers, exchange, exchange_files)
    if "DUOKA_BENCH_JSON" in os.environ:
        found = {"calls": numbers | {"exchange": {"calls": exchange, "files": exchange_files}}}
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps(found))


def _new_strategy() -> Any:
    return duoka.Mirrored(devices=1, replicas=2, threads=1)


def _print_table(numbers: dict[str, dict[str, float]], exchange: float, exchange_files: int) -> None:
    print("| R=2, W=1 | " + " | ".join(numbers) + " |\n|---" + "|---" * len(numbers) + "|")

    def say(what: str, values: list[str]) -> None:
        print(f"| {what} | " + " | ".join(values) + " |")

    rows = numbers.values()
    calls = [f"{row['calls per global batch']:.0f} in {row['files']:.0f} files" for row in rows]
    say("calls per global batch, 4 parameters", calls)
    say("calls per exchange", [f"{exchange:.0f} in {exchange_files} files"] * len(numbers))
    for count in NUM_PARAMETERS:
        name = f"call CPU ms at {count} parameters"
        values = [f"{row[name]:.2f} ms" if name in row else "" for row in rows]
        say(f"main-thread CPU of a call without the function and backward, {count:,} parameters", values)
    for count in NUM_PARAMETERS:
        values = [
            f"{row[f'CPU ms at {count} parameters']:.2f} ms ({row[f'whole CPU ms at {count} parameters']:.2f} less"
            f" {row[f'plain CPU ms at {count} parameters']:.2f})"
            for row in rows
        ]
        say(f"main-thread CPU of Duoka per global batch, {count:,} parameters", values)


if __name__ == "__main__":
    main()
