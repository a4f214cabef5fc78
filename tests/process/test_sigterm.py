"""SIGTERM, as managers of jobs send it: to the run, to a worker, or to every process; also in long steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import Run
from tests.process.scripts import start as start_script
from tests.process.test_checkpoints_torch import LEAVES, hash_of, newest, start

pytestmark = [pytest.mark.torch]


def signal_all(run: Run, *, supervisor_first: bool) -> int:
    """Give how many processes got it."""
    found = sorted(run.alive(), reverse=not supervisor_first)  # whoever was started first has the lowest number
    for pid in found:
        os.kill(pid, signal.SIGTERM)
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("loaders", "supervisor_first"), [(2, False), (2, True), (0, False)])
def test_a_signal_to_every_process_of_a_run_lets_it_save_and_it_goes_on_to_the_bits_of_a_calm_one(
    loaders, supervisor_first, tmp_path
):
    given = {"workers": 2, "loaders": loaders}
    run = start(tmp_path, directory="../saved", every_steps=1000, seconds=0.1, **given)
    run.wait_for("did 9 ", timeout_s=START_S)
    assert signal_all(run, supervisor_first=supervisor_first) >= 3 + 2 * loaders
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    assert f"SIGTERM: step {int(newest(tmp_path).name[5:])} is saved in" in ended.err, ended.err
    resumed = start(tmp_path, directory="../saved", **given).finish(START_S, LEAVES)
    assert "did 9 " not in resumed.out
    assert hash_of(resumed) == hash_of(start(tmp_path / "calm", **given).finish(START_S, LEAVES))


def test_a_second_signal_to_the_same_worker_ends_the_run_at_once(tmp_path):
    run = start(tmp_path, workers=2, directory="../saved", seconds=20)
    run.wait_for("did ", timeout_s=START_S)
    worker = run.workers()[1]
    os.kill(worker, signal.SIGTERM)
    run.wait_for("once more ends it at once")
    time.sleep(0.5)
    assert run.process.poll() is None, "what was passed on to the others is no second one"
    os.kill(worker, signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err


@pytest.mark.slow
def test_steps_that_take_longer_than_the_deadline_are_waited_for_and_saved(tmp_path):
    run = start(tmp_path, workers=2, directory="../saved", every_steps=1000, seconds=1.5, deadline_s=1)
    run.wait_for("did 2 ", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and "without saving" not in ended.err, ended.err
    assert is_saved(tmp_path)


STUCK = """
import time
import duoka

strategy = duoka.Mirrored(devices=2, deadline_s=2)
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 2)
loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 2)), batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
strategy.checkpoint("../saved")
for _ in strategy.epochs(1):
    for x, y in loader:
        strategy.print("asleep", flush=True)
        time.sleep(100)
"""


@pytest.mark.slow
def test_a_run_in_which_nothing_moves_is_ended_and_says_that_it_is_not_saved(tmp_path):
    run = start_script(tmp_path, STUCK)
    run.wait_for("asleep", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143 and "SIGTERM: nothing has moved for 4 s; the run ends without saving." in ended.err
    assert not is_saved(tmp_path)


def is_saved(place: Path) -> bool:
    return any((place / "saved").glob("step-*"))
