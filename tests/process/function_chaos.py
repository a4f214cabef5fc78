"""One function-style training whose workers are killed in chosen phases of chosen steps, and replaced.

`python -m tests.process.soak --kills 200` runs it until so many kills have happened.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from duoka.runtime.launch import launch
from duoka.runtime.worker import attachment
from duoka.session import _join
from duoka.strategies.mirrored import Mirrored
from tests.conftest import check_remains, plan_for, remains
from tests.limits import START_S
from tests.process.torch_contract import sha

WORKERS = REPLICAS = 4
KILLS, FIRST, APART = 8, 12, 45  # of one run; the step of the first, and steps between two
EPOCHS, BATCHES = 10, 40
# Within a call, between two calls, and while a state is handed over.
MOMENTS = {
    "load": None,
    "fn": None,
    "backward": None,
    "deposit": "depositing",
    "between the meetings": "arrived",
    "after the commit": "completed",
    "optimizer.step": None,
    "hand-over": ("giving", "given", "taking"),
}
PHASES = tuple(MOMENTS)


@dataclass(frozen=True)
class Strike:
    number: int
    step: int
    phase: str
    rank: int  # of the victim among the members of then


def write_story(seed: int) -> tuple[Strike, ...]:
    chance = random.Random(seed)
    steps = [FIRST + APART * number + chance.randrange(APART // 2) for number in range(KILLS)]
    # Drawn without replacement, so that all phases come equally often. A hand-over needs a loss before it.
    phases = chance.sample(PHASES, KILLS)
    if phases[0] == "hand-over":
        phases.reverse()
    return tuple(
        Strike(number, step, phase, chance.randrange(WORKERS))
        for number, (step, phase) in enumerate(zip(steps, phases, strict=True))
    )


class Fate:
    """Ends this worker where a strike says so, once for all workers: whoever comes first claims it."""

    def __init__(self, story: tuple[Strike, ...], directory: Path, collective: Any) -> None:
        self._story, self._directory, self._collective = story, directory, collective
        self._armed: Strike | None = None
        collective.moment = self._come_by

    def begin_call(self, step: int) -> None:
        self._armed = None
        due = [strike for strike in self._story if strike.step <= step and not self._claim(strike).exists()]
        workers = sorted(self._collective.workers)
        if due and len(workers) > 2:
            strike = due[0]
            if workers[strike.rank % len(workers)] == self._collective.worker and not self._is_last_original():
                self._armed = strike

    def _is_last_original(self) -> bool:
        """Without originals the run ends: juniors have not been compared yet."""
        return set(self._collective.workers) - set(self._collective.juniors) == {self._collective.worker}

    def come_by(self, phase: str) -> None:
        if self._armed is not None and self._armed.phase == phase:
            self._die(self._armed)

    def _come_by(self, moment: str) -> None:
        if self._armed is not None and MOMENTS[self._armed.phase] == moment:
            self._die(self._armed)
        if moment in (MOMENTS["hand-over"] or ()):
            due = [each for each in self._story if each.phase == "hand-over" and not self._claim(each).exists()]
            before = [each for each in self._story if due and each.number < due[0].number]
            is_last = moment != "taking" and self._is_last_original()
            if due and not is_last and all(self._claim(each).exists() for each in before):
                self._die(due[0])

    def _die(self, strike: Strike) -> None:
        try:
            os.close(os.open(self._claim(strike), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _claim(self, strike: Strike) -> Path:
        return self._directory / f"killed-{strike.number}"


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(16 * BATCHES - 7, 6, generator=torch.Generator().manual_seed(1))
        self.fate: Fate | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fate is not None:
            self.fate.come_by("load")
        return self.x[index] + 0.1 * torch.randn(6), (self.x[index].sum() > 0).long()


def train(session: Any, story: tuple[Strike, ...], directory: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, data = Mirrored(check_every=2), Samples()
    fate = data.fate = Fate(story, directory, session.collective)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    ema = copy.deepcopy(model)
    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
    state = strategy.register(count=0, best=0.0, ema=ema)

    def loss_of(x: Any, y: Any) -> Any:
        fate.come_by("fn")
        loss = F.cross_entropy(model(x), y)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: fate.come_by("backward"))
        return loss

    def measure(x: Any, y: Any) -> Any:
        return (model(x).argmax(1) == y).sum(), len(y)

    for _ in strategy.epochs(EPOCHS):
        for batch in strategy.batches(loader):
            if story:
                fate.begin_call(strategy.step)
                time.sleep(0.004)
            optimizer.zero_grad()
            strategy.backward(loss_of, batch)
            fate.come_by("optimizer.step")
            optimizer.step()
            state.count += 1
            with torch.no_grad():
                for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        scheduler.step()
        state.best = max(state.best, strategy.evaluate(measure, loader))
    return {"model": sha(model, optimizer), "ema": sha(ema), "count": state.count, "best": state.best}


def run(story: tuple[Strike, ...], directory: Path) -> tuple[dict[int, Any], list[str]]:
    def in_worker() -> Any:
        attached = attachment()
        assert attached is not None
        with contextlib.redirect_stderr(io.StringIO()):
            return train(_join(attached), story, directory)

    said: list[str] = []
    before = remains()
    # Snapshots cover the story in which the last original worker is killed before another one counts as one.
    plan = replace(plan_for(WORKERS, REPLICAS, START_S), respawn=True, snapshot_s=0.2)
    launched = launch(plan, in_worker, said.append)
    check_remains(before, said)
    assert launched.outcome.exit_code == 0, (launched.outcome, said)
    return launched.results, said


@lru_cache
def reference() -> dict[str, Any]:
    results, _ = run((), Path())
    return results[0]


@dataclass(frozen=True)
class Told:
    hits: Counter[str]
    num_joined: int


def check(seed: int, directory: Path) -> Told:
    """Raises if the run of this seed does not end with the bits of an undisturbed one."""
    story = write_story(seed)
    results, said = run(story, directory)
    for worker, result in results.items():
        assert result == reference(), (worker, said)
    hits = Counter(strike.phase for strike in story if (directory / f"killed-{strike.number}").exists())
    return Told(hits, sum("has rejoined" in line for line in said))
