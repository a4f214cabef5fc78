"""Two workers started, PyTorch imported, first barrier passed: Duoka against torchrun with Gloo.

    python benchmarks/startup.py               (part of: make bench)

Timed from the start of the launcher until worker 0 says that it has passed its first barrier.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPETITIONS = 5

OURS = """
import torch
import duoka
strategy = duoka.Mirrored(devices=2)
strategy.barrier()
print("passed", flush=True)
"""

THEIRS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("passed", flush=True)
"""


def time_until_passed(command: list[str], directory: Path) -> float:
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=directory)
    assert process.stdout is not None
    for line in process.stdout:
        if b"passed" in line:
            elapsed = time.perf_counter() - begin
            break
    else:
        raise SystemExit(f"{command} ended without passing its barrier")
    process.communicate()
    return elapsed


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "ours.py").write_text(OURS)
        (directory / "theirs.py").write_text(THEIRS)
        python = [sys.executable]
        contestants = {
            "torchrun": [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "theirs.py"],
            "duoka run": [*python, "-m", "duoka", "run", "--devices", "2", "ours.py"],
            "python": [*python, "ours.py"],
        }
        times: dict[str, list[float]] = {who: [] for who in contestants}
        for repetition in range(REPETITIONS + 1):
            for who, command in contestants.items():
                elapsed = time_until_passed(command, directory)
                if repetition > 0:  # the first round fills the page cache for all
                    times[who].append(elapsed)
    medians = {who: statistics.median(values) for who, values in times.items()}
    for who, seconds in medians.items():
        print(f"{who:>10}: {seconds:.2f} s, {seconds / medians['torchrun']:.2f} x torchrun")
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"startup_s": medians}))


main()
