"""All-reduce of two workers with one thread each: Duoka, Gloo and a plain copy, interleaved in one run.

    python benchmarks/all_reduce.py [--rounds 15] [--size "4 MB"]            (part of: make bench)

Both workers are the same two processes for all contestants, in paired rounds; Gloo runs twice in each. Before each
timed call the worker writes its input, as a backward pass would. "shared": on a buffer of the collective, the result
stays there. "private": the same, and every worker copies the result out. "array": any NumPy array, copied in and out.
Both workers make the copies at once: `memcpy` is libc's (np.copyto), `copy_` is PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import numpy as np
import paired
import torch
import torch.distributed as dist

import duoka

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
BURSTS = {"4 KB": 40, "64 KB": 20, "1 MB": 16, "4 MB": 8, "25 MB": 4, "100 MB": 3}  # calls in a round


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only these")
    options = parser.parse_args()
    strategy = duoka.Mirrored(devices=2, threads=1)
    torch.set_num_threads(1)
    collective = strategy._session.collective
    _join_gloo(strategy)
    rows = {}
    for name in options.size or SIZES:
        contest = measure(collective, SIZES[name] // 4, BURSTS[name], options.rounds)
        rows[name] = contest.write()
        strategy.barrier()
        if strategy.is_main:
            _print_row(name, contest)
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


def measure(collective, count: int, num_calls: int, num_rounds: int) -> paired.Contest:
    """Microseconds of each contestant by round: the median call of a burst, as the slower worker sees it."""
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

    def run_burst(name: str) -> list[float]:
        prepare, line_up, call = contestants[name]
        times = []
        for _ in range(num_calls):
            line_up()
            prepare()
            line_up()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return times

    names = ["gloo", "shared", "gloo again", "private", "array", "memcpy", "copy_"]
    rounds = paired.run_rounds(names, run_burst, num_rounds)
    open_and_fill()
    collective.all_reduce([source], out=target)
    assert np.all(target == 2) and np.all(shared() == 2), "the contestants must add up, too"
    slower = {name: np.max(collective.all_gather([np.array(found)]), axis=0) for name, found in rounds.items()}
    return paired.Contest.of({name: found.tolist() for name, found in slower.items()}, scale=1e6)


def measure_barrier(collective) -> dict[str, float]:
    times: dict[str, list[float]] = {"duoka": [], "gloo": []}
    for _ in range(1000):
        for name, call in (("duoka", collective.barrier), ("gloo", dist.barrier)):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def _print_row(name: str, contest: paired.Contest) -> None:
    print(f"{name:>7}: " + "  ".join(f"{who} {contest.typical(who):,.0f} us" for who in contest.times))
    kinds = ("shared", "private", "array")
    print(f"{'':9}" + ", ".join(f"gloo/{kind} {contest.in_times_of(kind, 'gloo')}" for kind in kinds), end="; ")
    print(f"A/A {contest.control('gloo')}")
    copies = [f"{kind}/{copy} {contest.in_times_of(copy, kind)}" for kind in kinds[:2] for copy in ("memcpy", "copy_")]
    print(f"{'':9}" + ", ".join(copies), flush=True)


if __name__ == "__main__":
    main()
