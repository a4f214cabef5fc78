"""PyTorch scripts whose workers are killed from outside and come back, with everything as it is by default.

`python -m tests.process.soak --replay torch-join SEED` tells the story of one seed again.
"""

from __future__ import annotations

import time

import pytest

from tests.limits import START_S
from tests.process.scripts import start
from tests.process.torch_join_chaos import begin, check, finish, kill, reference, write_story

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(5))
def test_workers_killed_from_outside_come_back_and_change_no_bit(seed):
    check(write_story(seed))


def test_a_run_whose_last_worker_is_lost_while_others_start_goes_back_to_its_checkpoint(tmp_path):
    run = begin("epochs,saves", 2, tmp_path)
    kept = tmp_path / "kept"
    (kept / "slowly").touch()
    run.wait_for("trains", timeout_s=START_S)
    end = time.monotonic() + START_S
    while not list(kept.glob("saved/step-*")):
        assert time.monotonic() < end, run.err
        time.sleep(0.05)
    kill(run, 1)
    run.wait_for("worker 1 (cpu:0/v1) is started again", timeout_s=START_S)
    kill(run, 0)
    (kept / "slowly").unlink()
    ended = finish(run)
    assert ended.code == 0, ended.err
    (back,) = [line for line in ended.said() if "all workers start anew" in line]
    assert "no worker is left that others could join; all workers start anew, and go back to the checkpoint" in back
    assert ended.facts() == dict.fromkeys(range(2), reference(False))


EVALUATING = """
    import hashlib, os, signal, sys, time
    from pathlib import Path
    import duoka

    directory = Path(sys.argv[1])
    strategy = duoka.Mirrored(devices=2)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    struck, ready = directory / "struck", directory / "ready"
    is_newcomer = struck.exists()
    torch.manual_seed(0)
    rows = torch.randn(64, 6)
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    model = nn.Linear(6, 2)
    model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 8))

    def measure(batch):
        end = time.monotonic() + 120
        while epoch == 3 and not ready.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    for epoch in strategy.epochs(6):
        if is_newcomer:
            ready.touch()
        for x, y in loader:
            if strategy.worker == 1 and not is_newcomer and strategy.step == 20:
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.05)
        found = strategy.evaluate(measure, DataLoader(data, 8))
    print("ends", float(found).hex(), hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
    """


def test_a_worker_that_comes_back_while_the_others_evaluate_joins(tmp_path):
    ended = start(tmp_path, EVALUATING, str(tmp_path)).finish(START_S, leaves=["torchinductor_"])
    assert ended.code == 0, ended.err
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL" in ended.err
    assert "worker 1 (cpu:0/v1) has rejoined at step " in ended.err, ended.err
    assert ended.log(0).splitlines()[-1] == ended.log(1).splitlines()[-1] and "ends" in ended.out
