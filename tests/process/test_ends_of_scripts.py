"""The main worker, killed in what follows the last step, when the others are past it: that is said, or made up for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, Run, start, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]
LEAVES = ("torchinductor_",)

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
import duoka

strategy = duoka.Mirrored(devices=2)
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 2)), batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
kind = sys.argv[1]
if "saved" in kind:
    strategy.checkpoint("../saved")

def loss_of(x, y):
    return ((model(x) - y) ** 2).mean()

for epoch in strategy.epochs(3):
    for batch in strategy.batches(loader):
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
print("hash", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
slow = Path("../slow")
if "late" in kind and strategy.worker == 1:
    while slow.exists():
        time.sleep(0.02)
    time.sleep(1)
if strategy.is_main:
    print("writes", flush=True)
    for _ in range(600):
        if not slow.exists():
            break
        time.sleep(0.05)
    torch.save(model.state_dict(), "../model.pt")
if "barrier" in kind:
    strategy.barrier()
if "asleep" in kind:
    while slow.exists():
        time.sleep(0.02)
    time.sleep(1)
print("ends", flush=True)
"""


def strike(place: Path, kind: str, program=DUOKA_RUN) -> Run:
    """Kill the main worker in its last piece of work; the other one has ended, waits, sleeps, or is late."""
    (place / "slow").touch()
    run = start(place, SCRIPT, kind, program=program)
    run.wait_for("writes", timeout_s=START_S)
    workers = run.workers()
    if kind in ("alone", "saved"):
        wait_until(lambda: 1 not in run.workers(), START_S, run)
    else:
        time.sleep(0.5)
    os.kill(workers[0], signal.SIGKILL)
    (place / "slow").unlink()
    return run


def test_the_loss_of_the_main_worker_after_the_others_have_finished_is_told_with_what_may_be_missing(tmp_path):
    ended = strike(tmp_path, "alone").finish(START_S, LEAVES)
    assert ended.code == 0 and not (tmp_path / "model.pt").exists()
    *_, last = ended.said()
    assert last.startswith("worker 0 (cpu:0/v0) was ended by SIGKILL; the others have finished. It was the main worker")
    assert "hash" in ended.log(1)


def test_one_that_asks_after_the_loss_is_the_main_one_and_nothing_is_missing(tmp_path):
    ended = strike(tmp_path, "late").finish(START_S, LEAVES)
    assert ended.code == 0, ended.err
    assert (tmp_path / "model.pt").exists() and "may be missing" not in ended.err


def test_one_that_is_lost_in_an_evaluation_was_past_what_it_had_printed(tmp_path):
    """The next one does all that follows."""
    script = SCRIPT.replace(
        "slow = Path",
        """
def measure(x, y):
    if strategy.worker == 0:
        os.kill(os.getpid(), 9)
    return ((model(x) - y) ** 2).sum(), y.numel()
strategy.print("value", strategy.evaluate(measure, loader))
slow = Path""",
    )
    ended = start(tmp_path, script, "alone", program=DUOKA_RUN).finish(START_S, LEAVES)
    assert ended.code == 0 and "SIGKILL" in ended.err and "may be missing" not in ended.err, ended.err
    assert (tmp_path / "model.pt").exists() and "value" in ended.out


def test_another_one_that_is_lost_at_its_end_leaves_nothing_missing(tmp_path):
    script = SCRIPT.replace('print("hash"', 'if strategy.worker == 1: os.kill(os.getpid(), 9)\nprint("hash"')
    ended = start(tmp_path, script, "alone", program=DUOKA_RUN).finish(START_S, LEAVES)
    assert ended.code == 0 and (tmp_path / "model.pt").exists(), ended.err


INTERRUPTED = SCRIPT.replace(
    "        optimizer.step()\n",
    """        optimizer.step()
        if strategy.step >= 7:
            print("in the loop", flush=True)
            time.sleep(60)
""",
)


def test_ctrl_c_in_the_loop_shows_no_frames_of_ours_and_says_what_is_saved(tmp_path):
    run = start(tmp_path, INTERRUPTED.replace('"../saved"', '"../saved", every_steps=2'), "saved", program=DUOKA_RUN)
    run.wait_for("in the loop", timeout_s=START_S)
    run.signal(signal.SIGINT)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 130 and "Traceback" not in ended.err and "Exception ignored" not in ended.err, ended.err
    assert any(
        line.startswith("the script has not come to its end: step 6 is the last one that is saved in")
        for line in ended.said()
    ), ended.err


KEPT = """
import ctypes, os, sys
import duoka

strategy = duoka.Mirrored(devices=2)
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 2)
loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)
model, loader = strategy.prepare(model, loader)
os.kept = iter(loader)
next(os.kept)
for name in [name for name in sys.modules if name == "os" or name.startswith("duoka")]:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))  # held to the very end: its names become None
"""


def test_a_plain_loop_that_is_left_when_the_interpreter_ends_is_silent(tmp_path):
    ended = start(tmp_path, KEPT, program=DUOKA_RUN).finish(START_S, LEAVES)
    logs = [path.read_text() for path in ended.run_directory.glob("worker-*.log")]
    assert ended.code == 0 and not [text for text in (ended.err, *logs) if "Exception ignored" in text], ended.err
