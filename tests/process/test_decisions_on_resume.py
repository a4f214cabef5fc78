"""A script that is resumed decides on its way what it decided before: by its own counters, and by evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.scripts import PYTHON, Ended, Run, write

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
LEAVES = ("torchinductor_",)

SCRIPT = """
import hashlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
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
    ended = Run(place, command).finish(90, LEAVES)
    assert ended.code == (9 if stop_at else 0), ended.err
    return ended


def lines(ended: Ended, word: str) -> list[str]:
    return [line for line in ended.out.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(
    ("kind", "stops", "workers"),
    [("range", (21,), 1), pytest.param("range", (14, 21), 2, marks=pytest.mark.slow)]
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
