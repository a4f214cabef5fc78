"""All-reduce of two workers with one thread each: Duoka, Gloo and a plain copy, interleaved in one run.

    python benchmarks/all_reduce.py            (part of: make bench)

Both workers are the same two processes for all contestants. Before each timed call the worker writes its
input, as a backward pass would. "shared": on a buffer the collective handed out, the result stays there.
"private": the same, and every worker copies the result out. "array": any NumPy array, copied in and out.
The copies are made by both workers at once: `memcpy` is libc's (np.copyto), `copy_` is PyTorch's.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

import duoka

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
BURST = 4
REPETITIONS = {"4 KB": 1000, "64 KB": 500, "1 MB": 300, "4 MB": 120, "25 MB": 40, "100 MB": 20}


def main() -> None:
    strategy = duoka.Mirrored(devices=2, threads=1)
    torch.set_num_threads(1)
    collective = strategy._session.collective
    _join_gloo(strategy)
    rows = {}
    for name, nbytes in SIZES.items():
        rows[name] = measure(collective, nbytes // 4, REPETITIONS[name])
        strategy.barrier()
        if strategy.is_main:
            _print_row(name, rows[name])
    barrier = measure_barrier(collective)
    if strategy.is_main:
        print(f"barrier: duoka {barrier['duoka']:.0f} us, gloo {barrier['gloo']:.0f} us,"
              f" {barrier['gloo'] / barrier['duoka']:.1f}x")  # fmt: skip
        if "DUOKA_BENCH_JSON" in os.environ:
            with open(os.environ["DUOKA_BENCH_JSON"], "w") as file:
                json.dump({"all_reduce_us": rows, "barrier_us": barrier}, file)


def _join_gloo(strategy: duoka.Mirrored) -> None:
    path = tempfile.mkdtemp().encode() if strategy.is_main else b""
    name = strategy._session.collective.broadcast(np.frombuffer(path, np.uint8) if path else None).tobytes()
    store = dist.FileStore(os.path.join(name.decode(), "store"), 2)
    dist.init_process_group("gloo", store=store, rank=strategy.worker, world_size=2)


def measure(collective, count: int, repetitions: int) -> dict[str, float]:
    """Median microseconds of each contestant, one after the other within each repetition."""
    source, target = np.empty(count, np.float32), np.zeros(count, np.float32)
    tensor, tensor_target = torch.zeros(count), torch.zeros(count)
    buffer = collective.buffer(count, "f4")
    (replica,) = collective.replicas

    # The input is written before the clock starts, into the slot of an exchange that is already open.
    opened = []

    def open_and_fill():
        exchange = collective.exchange([buffer])
        exchange.slot(buffer, replica).fill(1)
        opened.append(exchange)

    def shared():
        exchange = opened.pop()
        exchange.deposit(replica)
        exchange.commit()
        return exchange.result(buffer)

    def private():
        np.copyto(target, shared())

    # What to write before, how the workers line up (each library by its own barrier), and what is timed.
    contestants = {
        "gloo": (lambda: tensor.fill_(1), dist.barrier, lambda: dist.all_reduce(tensor)),
        "shared": (open_and_fill, collective.barrier, shared),
        "private": (open_and_fill, collective.barrier, private),
        "array": (lambda: source.fill(1), collective.barrier, lambda: collective.all_reduce([source], out=target)),
        "memcpy": (lambda: source.fill(1), collective.barrier, lambda: np.copyto(target, source)),
        "copy_": (lambda: tensor.fill_(1), collective.barrier, lambda: tensor_target.copy_(tensor)),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions // BURST + 1):
        for name, (prepare, line_up, call) in contestants.items():
            # In bursts: a library that has just been idle pays for waking up, which is not what is compared.
            for _ in range(BURST):
                line_up()
                prepare()
                line_up()
                begin = time.perf_counter()
                call()
                if repetition > 0:
                    times[name].append(time.perf_counter() - begin)
    open_and_fill()
    collective.all_reduce([source], out=target)
    assert np.all(target == 2) and np.all(shared() == 2), "the contestants must add up, too"
    # A call is over when the slower worker has its result.
    slowest = {name: np.max(collective.all_gather([np.array(values)]), axis=0) for name, values in times.items()}
    return {name: float(np.median(values)) * 1e6 for name, values in slowest.items()}


def measure_barrier(collective) -> dict[str, float]:
    times: dict[str, list[float]] = {"duoka": [], "gloo": []}
    for _ in range(1000):
        for name, call in (("duoka", collective.barrier), ("gloo", dist.barrier)):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def _print_row(name: str, row: dict[str, float]) -> None:
    print(f"{name:>7}: " + "  ".join(f"{who} {value:,.0f} us" for who, value in row.items()))
    gloo = ", ".join(f"{kind} {row['gloo'] / row[kind]:.1f}x" for kind in ("shared", "private", "array"))
    copies = ", ".join(
        f"{kind} {row[kind] / row['memcpy']:.2f} memcpy ({row[kind] / row['copy_']:.2f} copy_)"
        for kind in ("shared", "private")
    )
    print(f"{'':9}faster than gloo: {gloo};  in copies: {copies}", flush=True)


main()
