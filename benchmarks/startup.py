"""Two workers started, PyTorch imported, first barrier passed: Duoka against torchrun with Gloo.

    python benchmarks/startup.py [--rounds 15]               (part of: make bench)

Timed from the start of the launcher until worker 0 prints that it has passed its first barrier, in paired rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paired

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
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=paired.MIN_ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "ours.py").write_text(OURS)
        (directory / "theirs.py").write_text(THEIRS)
        python = [sys.executable]
        commands = {
            "torchrun": [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "theirs.py"],
            "duoka": [*python, "-m", "duoka", "run", "--devices", "2", "ours.py"],
            "python": [*python, "ours.py"],
        }
        # The first round fills the page cache for all.
        rounds = paired.run_rounds(
            paired.arrange(["torchrun"], ["python"]),
            lambda who: [time_until_passed(commands[who], directory)],
            options.rounds,
        )
    contest = paired.Contest.of(rounds, scale=1)
    for who in commands:
        print(f"{who:>10}: {contest.typical(who):.2f} s")
    print(f"torchrun/duoka {contest.against('torchrun')}, A/A {contest.control('torchrun')}")
    if "DUOKA_BENCH_JSON" in os.environ:
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"startup_s": contest.write()}))


if __name__ == "__main__":
    main()
