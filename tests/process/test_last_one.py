"""The last worker that is left hangs, or is stopped, while another one comes back: nobody is left to wait for it."""

from __future__ import annotations

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, run

pytestmark = [pytest.mark.torch, pytest.mark.slow]
LEAVES = ("torchinductor_",)

SCRIPT = """
import hashlib, os, signal, sys, time
from pathlib import Path
import duoka

strategy = duoka.Mirrored(devices=2, deadline_s=2)
import torch
from torch.utils.data import DataLoader, Dataset

kind = sys.argv[1]

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if kind == "hangs" and index == 20:
            time.sleep(1000)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(2, generator=generator)

def once(worker, step, number):
    mark = Path(f"../struck-{worker}")
    if kind == "stopped" and (strategy.worker, strategy.step) == (worker, step) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), number)

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
loader = DataLoader(Rows(), batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
strategy.checkpoint(f"../saved-{kind}", every_steps=2)

def loss_of(x, y):
    return ((model(x) - y) ** 2).mean()

for epoch in strategy.epochs(2):
    for batch in strategy.batches(loader):
        once(1, 5, signal.SIGKILL)
        once(0, 6, signal.SIGSTOP)
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
        if kind == "sleeps" and strategy.step == 6:
            break
    if kind == "sleeps":
        break
if kind == "sleeps":
    if strategy.worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(9)
strategy.print("hash", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_a_row_that_hangs_whoever_reads_it_ends_the_run_although_nobody_is_left_to_wait(tmp_path):
    ended = run(tmp_path, SCRIPT, "hangs", program=DUOKA_RUN, timeout_s=START_S, leaves=LEAVES)
    assert ended.code == 75, ended.err
    assert "were stuck in the same place, at replica" in ended.err and "time.sleep" not in ended.out


def test_the_last_one_is_stopped_before_another_has_come_back_and_the_run_goes_back_to_its_checkpoint(tmp_path):
    calm = run(tmp_path, SCRIPT, "calm", program=DUOKA_RUN, timeout_s=START_S, leaves=LEAVES)
    ended = run(tmp_path, SCRIPT, "stopped", program=DUOKA_RUN, timeout_s=START_S, leaves=LEAVES)
    assert (tmp_path / "struck-0").exists() and (tmp_path / "struck-1").exists()
    assert ended.code == 0 and ended.out == calm.out and "hash" in calm.out, ended.err
    assert "worker 0 (cpu:0/v0) was stopped (SIGSTOP) for" in ended.err and "all workers start anew" in ended.err


def test_the_last_one_may_sleep_after_its_loop_as_long_as_it_likes(tmp_path):
    """A newcomer waits for it meanwhile, and nobody computes."""
    ended = run(tmp_path, SCRIPT, "sleeps", program=DUOKA_RUN, timeout_s=START_S, leaves=LEAVES)
    assert ended.code == 0 and "hash" in ended.out, ended.err
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL; 1 worker goes on" in ended.err
