"""A script that is resumed decides on its way what it decided before: by its own counters, and by evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.torch]
LEAVES = ("torchinductor_",)

SCRIPT = """
import hashlib, sys
import duoka

kind, workers, stop_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Stopper:
    best, bad, seen = float("inf"), 0, ()
    def see(self, value):
        self.seen = (*self.seen, value)
        is_best = value < self.best
        self.best, self.bad = min(self.best, value), 0 if is_best else self.bad + 1
        return is_best
    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "seen": list(self.seen)}
    def load_state_dict(self, state):
        self.best, self.bad, self.seen = state["best"], state["bad"], tuple(state["seen"])

strategy = duoka.Mirrored(devices=workers, replicas=2, respawn=False)
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
loader = DataLoader(TensorDataset(torch.randn(30, 8), torch.randn(30, 2)), batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
stopper = Stopper()
checkpoint = strategy.checkpoint("../saved", every_steps=3, also={"stopper": stopper})

def measure(batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), y.numel()

def train(epoch):
    for x, y in loader:
        loss = ((model(x) - y) ** 2).mean() * (1 if epoch < 3 else -1)  # from epoch 3 on it gets worse
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if strategy.stepped and strategy.step % 3 == 0:
            strategy.evaluate(measure, loader)  # in a body: not done again
        if strategy.stepped and 0 < stop_at == strategy.step:
            sys.exit(9)

def decide(epoch):
    value = strategy.evaluate(measure, loader)
    is_best = stopper.see(value)
    strategy.print("decides", epoch, value, is_best, stopper.bad, flush=True)
    if is_best:
        strategy.save("../best.safetensors", model.state_dict())
    return stopper.bad == 3

strategy.evaluate(measure, loader)
if kind == "epochs":
    for _ in strategy.epochs(1):
        train(0)
        decide("first")
    strategy.evaluate(measure, loader)
for epoch in strategy.epochs(20) if kind == "epochs" else range(20):
    train(epoch)
    if decide(epoch):
        break
    if epoch % 2 and stopper.bad:
        checkpoint.save()
digest = hashlib.sha256(model.weight.detach().numpy().tobytes() + open("../best.safetensors", "rb").read())
strategy.print("ends", epoch, stopper.seen, digest.hexdigest(), flush=True)
"""


def run(place: Path, kind: str, workers: int, stop_at: int) -> Ended:
    place.mkdir(exist_ok=True)
    command = [*PYTHON, str(write(place, SCRIPT)), kind, str(workers), str(stop_at)]
    ended = Run(place, command).finish(START_S, LEAVES)
    assert ended.code == (9 if stop_at else 0), ended.err
    return ended


def lines(ended: Ended, word: str) -> list[str]:
    return [line for line in ended.out.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(
    ("kind", "stops", "workers"),
    [pytest.param("range", stops, 2 - (stops == (21,)), marks=pytest.mark.slow) for stops in ((21,), (14, 21))]
    + [pytest.param("epochs", (stop, stop + 5), 2, marks=pytest.mark.slow) for stop in (3, 11, 20)],
)
def test_early_stopping_and_the_best_model_are_those_of_a_calm_run(kind, stops, workers, tmp_path):
    calm = run(tmp_path / "calm", kind, 1, 0)
    decided = lines(calm, "decides")
    assert lines(calm, "ends")[0].startswith("ends 5 "), "it stops early"
    for stop_at in (*stops, 0):
        ended = run(tmp_path / "again", kind, workers, stop_at)
        again = lines(ended, "decides")
        assert set(again) <= set(decided), "it decides as it did"
    assert lines(ended, "ends") == lines(calm, "ends")
    if kind == "range":
        assert again == decided, "all of it, from the top"


LOOPS = """
import hashlib, os, sys, time
import duoka

stop_at, kill_at, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
strategy = duoka.Mirrored(devices=2, replicas=2)
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
rows = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
loader = DataLoader(rows, batch_size=8)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
strategy.checkpoint("../saved", every_steps=3)

def measure(batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), y.numel()

def train(scale, loader=loader):
    for x, y in loader:
        optimizer.zero_grad()
        (scale * (model(x) - y) ** 2).mean().backward()
        optimizer.step()
        if strategy.stepped and strategy.step == stop_at:
            sys.exit(9)
        if strategy.stepped and strategy.step == kill_at and strategy.worker == 1 and not os.path.exists("../struck"):
            open("../struck", "w").close()
            os.kill(os.getpid(), 9)
        if 0 < kill_at < strategy.step:
            time.sleep(0.05)

for _ in strategy.epochs(2):
    train(1 + float(torch.rand(1)))
scale = strategy.evaluate(measure, loader) + float(torch.rand(1))
for _ in strategy.epochs(40) if kind in ("epochs", "own") else range(20):
    train(scale, strategy.prepare(DataLoader(rows, batch_size=8)) if kind == "own" else loader)
strategy.print("hash", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epochs", "range", "own"])
def test_a_worker_that_is_lost_in_a_resumed_run_comes_back_past_a_finished_loop(kind, tmp_path):
    calm = run_loops(tmp_path / "calm", -1, -1, kind, 0).out
    run_loops(tmp_path / "again", 40, -1, kind, 9)
    ended = run_loops(tmp_path / "again", -1, 60, kind, 0)
    assert ended.out == calm and "hash" in calm
    assert "was ended by SIGKILL" in ended.err and "worker 1 (cpu:0/v1) has rejoined at step" in ended.err, ended.err


def run_loops(place: Path, stop_at: int, kill_at: int, kind: str, code: int) -> Ended:
    place.mkdir(exist_ok=True)
    ended = Run(place, [*PYTHON, str(write(place, LOOPS)), str(stop_at), str(kill_at), kind]).finish(START_S, LEAVES)
    assert ended.code == code, ended.err
    return ended
