"""Runs of the function style that are ended in every way, and continue from their checkpoints with the same bits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Ended, Run, write

pytestmark = [pytest.mark.torch]
LEAVES = ("torchinductor",)  # an empty folder of PyTorch
EPOCHS, BATCHES = 4, 7

SCRIPT = """
import copy, hashlib, json, os, signal, sys, time
import duoka

given = json.loads(sys.argv[1])
strategy = duoka.Mirrored(devices=given.get("workers", 2), replicas=given.get("replicas", 3), respawn=False)
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(given.get("seed", 0))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
x = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
loader = DataLoader(data, batch_size=12, shuffle=True, num_workers=given.get("loaders", 0))
ema = copy.deepcopy(model)
unprepared = DataLoader(data, batch_size=12)
model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
state = strategy.register(count=0, best=0.0, history=[], ema=ema)
if "directory" in given:
    strategy.checkpoint(given["directory"], every_steps=3)

def loss_of(x, y):
    return F.cross_entropy(model(x), y)

def measure(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)

def end(place, epoch):
    if given.get("ends") == [place, epoch] and strategy.is_main and not strategy.resumed:
        os.kill(os.getpid(), signal.SIGTERM)

if given.get("breaks") == "no loop":
    for batch in strategy.batches(loader):
        strategy.backward(loss_of, batch)
for epoch in strategy.epochs(given.get("epochs", 4)):
    running, draw = 0.0, float(torch.rand(1))  # drawn between epoch and loop
    for batch in strategy.batches(unprepared if given.get("breaks") == "unprepared" else loader):
        optimizer.zero_grad()
        running += strategy.backward(loss_of, batch).item()
        optimizer.step()
        state.count += 1
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters()):
                old.lerp_(new, 0.1 * draw)
        strategy.print(f"did {epoch} {batch.index}", flush=True)
        if batch.index == 3:
            end("in the loop", epoch)
        time.sleep(given.get("seconds", 0))
    end("after the loop", epoch)
    scheduler.step()
    accuracy = strategy.evaluate(measure, loader)
    end("in the validation", epoch)
    if accuracy > state.best:
        state.best = accuracy
        strategy.save(f"../best-{given.get('name', 'calm')}", {"model": model.state_dict()})
    state.history.append(accuracy)
    strategy.print(f"epoch {epoch}: {accuracy:.4f} {scheduler.get_last_lr()}", flush=True)
    if given.get("breaks") == "break" and epoch == 1:
        break
if given.get("breaks") == "second loop":
    for epoch in strategy.epochs(1):
        pass
digest = hashlib.sha256()
for thing in (model, optimizer, ema):
    pending = [thing.state_dict()]
    while pending:
        value = pending.pop()
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if isinstance(value, torch.Tensor):
            digest.update(value.numpy().tobytes())
strategy.print("hash", digest.hexdigest(), state.count, state.best, state.history, strategy.step, flush=True)
"""


def start(place: Path, *launcher: str, **given) -> Run:
    command = [*(launcher or PYTHON), str(write(place, SCRIPT)), json.dumps(given)]
    return Run(place, command)


def hash_of(ended: Ended) -> str:
    assert ended.code == 0, ended.err
    return next(line for line in ended.out.splitlines() if line.startswith("hash"))


def lines(ended: Ended, word: str) -> list[str]:
    return [line for line in ended.out.splitlines() if line.startswith(word)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Ended:
    return start(tmp_path_factory.mktemp("calm")).finish(START_S, LEAVES)


def test_a_run_that_is_killed_and_preempted_ends_with_the_bits_of_an_undisturbed_one(tmp_path, calm):
    given = {"directory": "../saved", "seconds": 0.05}
    run = start(tmp_path, **given)  # all workers are killed
    run.wait_for("did 1 2", timeout_s=START_S)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 137 and "no worker is left" in ended.err, ended.err

    one = ("--devices", "1", "--replicas", "3")  # preempted, on another number of workers
    run = start(tmp_path, *DUOKA_RUN, *one, **given)
    run.wait_for("did 2 1", timeout_s=START_S)
    run.signal(signal.SIGTERM)
    ended = run.finish(START_S, LEAVES)
    assert ended.code == 143, ended.err
    assert "resumed from" in ended.err and "is saved in" in ended.err
    assert "did 0 0" not in ended.out, "finished epochs are skipped"

    ended = start(tmp_path, workers=3, loaders=2, **given).finish(START_S, LEAVES)
    assert hash_of(ended) == hash_of(calm)


@pytest.mark.parametrize(
    ("place", "epoch"),
    [
        pytest.param("in the loop", 1, marks=pytest.mark.slow),
        ("after the loop", 1),
        pytest.param("in the validation", 2, marks=pytest.mark.slow),
        ("in the validation", 3),
    ],
)
def test_a_sigterm_anywhere_counts_nothing_twice(tmp_path, calm, place, epoch):
    given = {"directory": "../saved", "ends": [place, epoch], "name": "ended"}
    first = start(tmp_path, **given).finish(START_S, LEAVES)
    is_last = epoch == EPOCHS - 1
    assert first.code == (0 if is_last and first.out.count("hash") else 143), first.err
    best = tmp_path / "best-ended"
    before = best.stat().st_mtime_ns if best.exists() else 0
    second = start(tmp_path, **given).finish(START_S, LEAVES)
    assert hash_of(second) == hash_of(calm)
    assert "resumed from" in second.err
    told = [line for ended in (first, second) for line in lines(ended, "epoch")]
    assert sorted(set(told)) == lines(calm, "epoch"), "every line of a run appears, and no other"
    if is_last:
        assert not lines(second, "did"), "a finished run trains nothing"
        assert best.stat().st_mtime_ns == before


def test_a_script_that_leaves_its_loop_by_break_is_finished(tmp_path):
    given = {"directory": "../saved", "breaks": "break"}
    first = start(tmp_path, **given).finish(START_S, LEAVES)
    second = start(tmp_path, **given).finish(START_S, LEAVES)
    assert hash_of(second) == hash_of(first)
    assert not lines(second, "did") and "this run is finished" in second.err


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("no loop", r"trains outside of strategy.epochs"),
        pytest.param("second loop", "A second loop over strategy.epochs", marks=pytest.mark.slow),
        ("unprepared", "not prepared"),
    ],
)
def test_what_cannot_be_resumed_is_an_error_at_the_first_batch(tmp_path, breaks, message):
    ended = start(tmp_path, directory="../saved", breaks=breaks, epochs=1).finish(START_S, LEAVES)
    assert ended.code == 1 and message in ended.err and "do   " in ended.err, ended.err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 5}, "has the seed 0, and this script the seed 5"),
        pytest.param({"epochs": 2}, "strategy.epochs is called with 2", marks=pytest.mark.slow),
    ],
)
def test_another_run_in_the_same_directory_is_an_error(tmp_path, other, message):
    start(tmp_path, directory="../saved", epochs=3).finish(START_S, LEAVES)
    ended = start(tmp_path, directory="../saved", **{"epochs": 3, **other}).finish(START_S, LEAVES)
    assert ended.code == 1 and message in ended.err, ended.err
