"""A small training whose workers all die where a test says so, with snapshots in memory."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from duoka.checkpoint import memory_snapshot
from duoka.runtime.launch import launch
from duoka.runtime.worker import attachment
from duoka.session import _join
from duoka.strategies.mirrored import Mirrored
from duoka.strategies.snapshots import Snapshots
from tests.conftest import Told, check_remains, plan_for, remains
from tests.limits import START_S
from tests.process.torch_contract import sha

EPOCHS, BATCHES = 6, 10
Dies = Callable[["Notes", int], bool]  # whether a worker dies in its function of this step


class Notes:
    """What workers have noted in a folder, over all starts."""

    def __init__(self, directory: Path, worker: int = 0) -> None:
        self._directory, self.worker = directory, worker

    def add(self, name: str, step: int) -> None:
        with (self._directory / name).open("a") as file:
            file.write(f"{step}\n")

    @property
    def is_first_life(self) -> bool:
        return len(self.read(f"life-{self.worker}")) == 1

    def read(self, name: str) -> list[int]:
        path = self._directory / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@dataclass(frozen=True)
class Story:
    directory: Path
    dies: Dies = lambda notes, step: False
    torn: int = -1  # the snapshot of this number is begun, and its writer dies
    checkpoint: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.005  # of a step, in the first start
    keeps: tuple[int, ...] | None = tuple(range(6, 60, 6))  # a snapshot is named at these steps; None: when it is due


def train(session: Any, story: Story) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, notes = Mirrored(), Notes(story.directory, session.worker)
    notes.add(f"life-{session.worker}", 0)
    _watch_snapshots(notes, story.torn)
    keep_at(story.keeps)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    state = strategy.register(count=0)
    if story.checkpoint:
        strategy.checkpoint(story.directory / "saved", **story.checkpoint)

    def loss_of(x: Any, y: Any) -> Any:
        if story.dies(notes, strategy.step):
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(model(x), y)

    was_resumed = strategy.resumed
    for epoch in strategy.epochs(EPOCHS):
        strategy.save(story.directory / f"epoch-{epoch}", {"model": model.state_dict()})
        for batch in strategy.batches(loader):
            time.sleep(story.seconds if notes.is_first_life else 0)
            optimizer.zero_grad()
            strategy.backward(loss_of, batch)
            optimizer.step()
            state.count += 1
    digest, saved = sha(model, optimizer), strategy.load(story.directory / f"epoch-{EPOCHS - 1}")
    first = [float(strategy.load(story.directory / f"epoch-{n}")["model"]["0.weight"].sum()) for n in range(EPOCHS)]
    assert saved
    return {"sha": digest, "count": state.count, "saved": first, "resumed": was_resumed}


def keep_at(steps: tuple[int, ...] | None) -> None:
    """In this fork, snapshots are named at these steps, and are taken at the next ones, however busy the machine is."""
    if steps is not None:
        Snapshots._is_due = lambda self, training: training.step in steps  # type: ignore[method-assign]


def train_plain(session: Any, story: Story) -> dict[str, Any]:
    """A plain loop: each worker counts what it sees of its own samples."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, notes = Mirrored(), Notes(story.directory, session.worker)
    notes.add(f"life-{session.worker}", 0)
    keep_at(story.keeps)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    state = strategy.register(seen=0.0)
    for _ in strategy.epochs(EPOCHS):
        for rows, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            if story.dies(notes, strategy.step):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.seen += float(rows.sum())
    return {"sha": sha(model, optimizer), "seen": state.seen}


def train_plain_richly(session: Any, story: Story, phase: str = "") -> dict[str, Any]:
    """All at once: an EMA, a scheduler, SAM, a second model with its own optimizer, a state carried over batches,
    accumulation under `no_sync`, and an evaluation. `phase`: where a worker dies, in the step that the story says.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, notes = Mirrored(), Notes(story.directory, session.worker)
    notes.add(f"life-{session.worker}", 0)
    keep_at(story.keeps)

    def come_by(name: str) -> None:
        if name == phase and story.dies(notes, strategy.step):
            os.kill(os.getpid(), signal.SIGKILL)

    cell, judge = nn.GRUCell(6, 5), nn.Linear(5, 2)
    optimizer = torch.optim.AdamW(cell.parameters(), lr=0.02)
    other = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    prepared = strategy.prepare(cell, judge, optimizer, other, schedule, loader)
    cell, judge, optimizer, other, schedule, loader = prepared
    state = strategy.register(hidden=torch.zeros(4, 5), ema=torch.zeros(2), history=[], best=9.0)

    def loss_of(rows: Any, labels: Any) -> Any:
        hidden = cell(rows, state.hidden)
        come_by("forward")
        return F.cross_entropy(judge(F.dropout(hidden, 0.1)), labels), hidden

    for _ in strategy.epochs(EPOCHS):
        for rows, labels in loader:
            with strategy.no_sync():
                loss_of(rows, labels)[0].backward()
            come_by("backward")
            loss, hidden = loss_of(rows, labels)
            loss.backward()
            with torch.no_grad():
                moved = [0.05 * p.grad for p in cell.parameters()]
                for p, step in zip(cell.parameters(), moved, strict=True):
                    p.add_(step)
            cell.zero_grad()
            loss_of(rows, labels)[0].backward()
            come_by("exchanged")
            with torch.no_grad():
                for p, step in zip(cell.parameters(), moved, strict=True):
                    p.sub_(step)
            optimizer.step()
            other.step()
            schedule.step()
            optimizer.zero_grad()
            other.zero_grad()
            state.hidden = hidden.detach()
            state.ema = 0.9 * state.ema + 0.1 * judge.bias.detach()
            state.history.append(float(loss))

        def wrong(rows: Any, labels: Any) -> Any:
            come_by("evaluation")
            return (judge(cell(rows)).argmax(1) != labels).sum(), len(labels)

        state.best = min(state.best, strategy.evaluate(wrong, loader))
    kept = {"history": state.history, "best": state.best, "rate": optimizer.param_groups[0]["lr"]}
    return kept | {"sha": sha(cell, judge, optimizer, other), "own": sha([state.hidden]), "ema": sha([state.ema])}


def train_plain_steps(session: Any, story: Story) -> dict[str, Any]:
    """No epochs: an iterator over a loader with persistent processes is kept over steps, and the script draws."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, notes = Mirrored(), Notes(story.directory, session.worker)
    notes.add(f"life-{session.worker}", 0)
    keep_at(story.keeps)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    batches = iter(loader)
    for _ in strategy.steps(EPOCHS * BATCHES):
        noise = 0.1 * torch.rand(6)
        if (batch := next(batches, None)) is None:
            batches = iter(loader)
            batch = next(batches)
        rows, labels = batch
        optimizer.zero_grad()
        F.cross_entropy(model(rows + noise), labels).backward()
        if story.dies(notes, strategy.step):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    return {"sha": sha(model, optimizer)}


def _watch_snapshots(notes: Notes, torn: int) -> None:
    """Note what is begun and what is complete, and die in the middle of one."""
    write, list_parts = memory_snapshot.SnapshotFiles.write, memory_snapshot.list_parts

    def watched_write(self: Any, part: int, entry: Any, tree: Any, tensors: Any) -> None:
        notes.add("begun", entry.step)
        write(self, part, entry, tree, tensors)
        notes.add("complete", entry.step)

    def watched_parts(*given: Any) -> Any:
        for number, piece in enumerate(list_parts(*given)):
            if number == 4 and len(notes.read("begun")) == torn:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    memory_snapshot.SnapshotFiles.write, memory_snapshot.list_parts = watched_write, watched_parts  # type: ignore


def run(story: Story, **given: Any) -> Told:
    return run_body(lambda session: train(session, story), **given)


def run_body(body: Callable[[Any], Any], *, snapshot_s: float | None = 0.0, respawn: bool = True) -> Told:
    def in_worker() -> Any:
        attached = attachment()
        assert attached is not None
        with contextlib.redirect_stderr(io.StringIO()):
            return body(_join(attached))

    said: list[str] = []
    before = remains()
    plan = replace(plan_for(2, 2, START_S), respawn=respawn, snapshot_s=snapshot_s)
    launched = launch(plan, in_worker, said.append)
    check_remains(before, said)
    return Told(launched.outcome, launched.results, said)


@lru_cache
def reference(directory: Path) -> dict[str, Any]:
    """What an undisturbed run without snapshots ends with."""
    told = run(Story(directory, seconds=0), snapshot_s=None)
    assert told.outcome.exit_code == 0, told.said
    assert told.results[0]["count"] == EPOCHS * BATCHES
    return told.results[0]
