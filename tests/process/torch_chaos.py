"""A PyTorch training that is struck: BatchNorm, dropout, Adam, a schedule, a short last batch, evaluations."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from duoka.runtime.launch import Launched, launch
from duoka.runtime.worker import attachment
from duoka.session import _join
from duoka.strategies.mirrored import Mirrored
from tests.conftest import check_remains, plan_for, remains
from tests.process.strikes import Calm, Strike, Victim, choose_strikes

EPOCHS, ROWS, BATCH = 3, 58, 12  # four batches of 12 and one of 10: shares of 3, 3, 2 and 2
STEPS = EPOCHS * 5
WIDTHS = {"small": 16, "large": 2500}  # what travels in one meeting, and in two


@dataclass(frozen=True)
class Story:
    strikes: tuple[Strike, ...] = ()
    size: str = "small"
    num_workers: int = 4
    num_replicas: int = 4


def write_story(seed: int) -> Story:
    chance = random.Random(f"torch {seed}")
    size = chance.choice(["small", "small", "large"])
    return Story(choose_strikes(chance, 4), size)


def train(strategy: Mirrored, victim: Victim, size: str) -> dict:
    torch.manual_seed(3)
    width = WIDTHS[size]
    model = nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    x, y = torch.randn(ROWS + 37, 12), torch.randint(0, 4, (ROWS + 37,))
    loader = DataLoader(TensorDataset(x[:ROWS], y[:ROWS]), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[ROWS:], y[ROWS:]), batch_size=8)
    victim.pass_by("before prepare")
    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
    optimizer.register_step_pre_hook(lambda *_: victim.pass_by("update"))
    numbers = []

    class Places:  # the check of functions does not look into classes
        pass_by = staticmethod(victim.pass_by)

    def measure(inputs, labels):
        Places.pass_by("evaluation")
        return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def loss_of(inputs, labels):
        Places.pass_by("function")
        loss = F.cross_entropy(model(inputs), labels)
        return loss, {"square": loss.detach() ** 2}

    for _ in strategy.epochs(EPOCHS):
        for batch in strategy.batches(loader):
            victim.pass_by("batch")
            optimizer.zero_grad()
            loss, metrics = strategy.backward(loss_of, batch)
            optimizer.step()
            scheduler.step()
            numbers += [loss, metrics["square"]]
        numbers.append(strategy.evaluate(measure, test_loader))
    victim.pass_by("end")
    calls = victim.calls
    victim.await_death()
    return {
        "sha256": digest(model, optimizer),
        "steps": strategy.step,
        "updates": sorted({int(state["step"]) for state in optimizer.state.values()}),
        "numbers": [float(value) for value in numbers],
        "calls": calls,
    }


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of the weights, the buffers, and the optimizer's state."""
    total = hashlib.sha256()
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(state[name] for _, state in sorted(states.items()) for name in state)]
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run(story: Story, calm: Calm | None = None) -> tuple[Launched, list[str]]:
    """The training on forked workers; and what was said."""

    def in_worker() -> dict:
        torch.set_num_threads(1)
        attached = attachment()
        assert attached is not None
        victim = Victim(attached.worker, story.strikes, calm)
        victim.pass_by("start")
        session = _join(attached)
        session.collective.moment = victim.pass_by
        Mirrored.connect = staticmethod(lambda request: session)
        return train(Mirrored(), victim, story.size)

    said: list[str] = []
    plan = replace(plan_for(story.num_workers, story.num_replicas), respawn=False)
    return launch(plan, in_worker, said.append), said


@lru_cache
def reference(size: str) -> dict:
    """One worker, undisturbed."""
    launched, _ = run(Story(size=size, num_workers=1))
    assert launched.outcome.exit_code == 0, launched.outcome
    return launched.results[0]


@lru_cache
def calm_run(size: str, num_workers: int) -> Calm:
    """As many workers as are going to be struck, undisturbed; the bits are those of one worker."""
    begin = time.monotonic()
    launched, _ = run(Story(size=size, num_workers=num_workers))
    seconds = time.monotonic() - begin
    assert launched.outcome.exit_code == 0, launched.outcome
    for result in launched.results.values():
        compare(result, size, "calm")
    return Calm({worker: result["calls"] for worker, result in launched.results.items()}, seconds)


def compare(result: dict, size: str, told: str) -> None:
    expected = reference(size)
    assert result["updates"] == [STEPS] and result["steps"] == STEPS, told
    assert result["sha256"] == expected["sha256"], told
    assert result["numbers"] == expected["numbers"], told


def check(story: Story) -> list[str]:
    """Every planned death happened, the survivors end with the reference, and nothing is left behind."""
    calm = calm_run(story.size, story.num_workers)
    before = remains()
    launched, said = run(story, calm)
    told = f"{story}\n{launched.outcome}\n{said}"
    assert launched.outcome.exit_code == 0, told
    assert sorted(launched.outcome.lost) == sorted((strike.worker, signal.SIGKILL) for strike in story.strikes), told
    assert len(launched.results) == story.num_workers - len(story.strikes), told
    for worker, result in launched.results.items():
        compare(result, story.size, f"worker {worker}: {told}")
    check_remains(before, told)
    return said
