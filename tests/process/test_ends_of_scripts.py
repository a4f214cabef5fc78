"""The main worker, killed in what follows the last step, when the others are past it: that is said, or made up for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.scripts import DUOKA_RUN, Run, start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
LEAVES = ("torchinductor_",)

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import duoka

strategy = duoka.Mirrored(devices=2)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 2)), batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
if sys.argv[1] == "saved":
    strategy.checkpoint("../saved")
for epoch in strategy.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
print("hash", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
slow = Path("../slow")
if strategy.is_main:
    print("writes", flush=True)
    for _ in range(600):
        if not slow.exists():
            break
        time.sleep(0.05)
    torch.save(model.state_dict(), "../model.pt")
print("ends", flush=True)
"""


def strike(place: Path, kind: str, program=DUOKA_RUN) -> Run:
    """Kill the main worker in its last piece of work, when the other one has ended."""
    (place / "slow").touch()
    run = start(place, SCRIPT, kind, program=program)
    run.wait_for("writes", timeout_s=60)
    workers = run.workers()
    other = workers.get(1)
    while other is not None and other in run.alive():
        os.sched_yield()
    (place / "slow").unlink()
    os.kill(workers[0], signal.SIGKILL)
    return run


def test_what_only_the_main_one_writes_is_said_to_be_missing_and_the_exit_code_tells(tmp_path):
    ended = strike(tmp_path, "alone").finish(60, LEAVES)
    assert ended.code == 137 and not (tmp_path / "model.pt").exists()
    *_, last = ended.said()
    assert last.startswith("worker 0 (cpu:0/v0) was ended by SIGKILL, and was the main one: what it alone prints and")
    assert "hash" in ended.log(1)


def test_with_checkpoints_the_run_ends_once_more_by_itself(tmp_path):
    ended = strike(tmp_path, "saved").finish(60, LEAVES)
    assert ended.code == 0, ended.err
    assert "may be missing; all workers start anew, and go back to the checkpoint of step 12" in ended.err
    assert (tmp_path / "model.pt").exists()
    assert len({line for line in ended.out.splitlines() if line.startswith("hash")}) == 1


@pytest.mark.slow
def test_another_one_that_is_lost_at_its_end_leaves_nothing_missing(tmp_path):
    script = SCRIPT.replace('print("hash"', 'if strategy.worker == 1: os.kill(os.getpid(), 9)\nprint("hash"')
    ended = start(tmp_path, script, "alone", program=DUOKA_RUN).finish(60, LEAVES)
    assert ended.code == 0 and (tmp_path / "model.pt").exists(), ended.err
