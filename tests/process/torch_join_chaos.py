"""A function-style script with everything as it is by default: workers are killed from outside, and replaced.

`python -m tests.process.soak --replay torch-join SEED` tells the story of one seed again: the same victims at the same
seconds of the training.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, Ended, Run, start

WORKERS = 4
SCRIPT = """
    import hashlib, json, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import duoka

    how, directory = set(sys.argv[1].split(",")), Path(sys.argv[2])
    strategy = duoka.Mirrored()
    torch.manual_seed(0)
    rows = torch.randn(154, 6)
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    loader = DataLoader(data, 16, shuffle=True)  # nine batches of 16 and one of 10
    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
    if "saves" in how:
        strategy.checkpoint(directory / "saved", every_steps=5)

    def loss_of(x, y):
        return nn.functional.cross_entropy(model(x), y)

    def count_correct(x, y):
        return (model(x).argmax(1) == y).sum(), len(y)

    strategy.print("trains", flush=True)
    for epoch in strategy.epochs(16):
        for batch in strategy.batches(loader):
            if (directory / "slowly").exists():  # until all that is to happen has happened
                time.sleep(0.3 / len(strategy.local_replicas))
            if "accumulates" not in how or batch.index % 2 == 0:
                optimizer.zero_grad()
            mean = strategy.backward(loss_of, batch)
            if "accumulates" not in how or batch.index % 2:
                optimizer.step()
                scheduler.step()
        accuracy = float(strategy.evaluate(count_correct, DataLoader(data, 20)))
    state = [*model.state_dict().values()]
    state += [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest()
    facts = {"sha256": digest, "step": strategy.step, "accuracy": accuracy, "mean": float(mean)}
    print(json.dumps(facts | {"draw": torch.rand(1).item()}))
    """


@dataclass(frozen=True)
class Strike:
    """Kill this worker, or a newcomer in its place, so many seconds after the training has begun or the last strike."""

    worker: int
    after_s: float


@dataclass(frozen=True)
class Story:
    how: str
    strikes: tuple[Strike, ...]


def write_story(seed: int) -> Story:
    """Up to three deaths, of any worker: also two of the same place, and before it has joined."""
    chance = random.Random(f"torch-join {seed}")
    how = ["epochs"]
    how += [word for word in ("saves", "accumulates") if chance.random() < 0.5]
    strikes = [Strike(chance.randrange(WORKERS), chance.uniform(0, 6)) for _ in range(chance.choice([1, 2, 2, 3]))]
    return Story(",".join(how), tuple(strikes))


def begin(how: str, num_workers: int, directory: Path) -> Run:
    (directory / "kept").mkdir(parents=True)
    program = (*DUOKA_RUN, "--devices", str(num_workers), "--replicas", "4")
    one_thread = {"OMP_NUM_THREADS": "1"}
    return start(directory, SCRIPT, how, str(directory / "kept"), program=program, env=one_thread)


def finish(run: Run) -> Ended:
    return run.finish(START_S, leaves=["torchinductor_"])


@lru_cache
def reference(accumulates: bool) -> dict:
    """One worker, undisturbed. Checkpoints make no difference."""
    with tempfile.TemporaryDirectory() as directory:
        ended = finish(begin("epochs" + ",accumulates" * accumulates, 1, Path(directory)))
        assert ended.code == 0, ended.err
        return ended.facts()[0]


def check(story: Story) -> list[str]:
    """All deaths happened, whoever was to come back has joined, and all end with the bits of the reference."""
    expected = reference("accumulates" in story.how)
    with tempfile.TemporaryDirectory() as directory:
        slowly = Path(directory) / "kept" / "slowly"
        run = begin(story.how, WORKERS, Path(directory))
        slowly.touch()
        run.wait_for("trains", timeout_s=START_S)
        for strike in story.strikes:
            time.sleep(strike.after_s)
            kill(run, strike.worker)
        wait_for_all_to_be_back(run, len(story.strikes))
        slowly.unlink()
        ended = finish(run)
        told = f"{story}\n{ended.err[-4000:]}"
        assert ended.code == 0, told
        assert count_deaths(ended.err) == len(story.strikes), told
        assert ended.err.count(" has rejoined at step ") >= 1, told
        facts = ended.facts()
        assert sorted(facts) == list(range(WORKERS)), told
        for worker, found in facts.items():
            assert found == expected, f"worker {worker}: {found}, and not {expected}\n{told}"
        return ended.said()


def kill(run: Run, worker: int) -> None:
    """Whoever is in this place; if nobody is just now, the next one who is."""
    end = time.monotonic() + 60
    while worker not in (workers := run.workers()):
        assert time.monotonic() < end and run.process.poll() is None, f"no worker {worker}:\n{run.err}"
        time.sleep(0.05)
    os.kill(workers[worker], signal.SIGKILL)


def wait_for_all_to_be_back(run: Run, num_deaths: int) -> None:
    """Every death has been noticed, and in the place of each that is lost another one has joined."""

    def is_so() -> bool:
        err = run.err
        num_back = err.count(" has rejoined at step ") + err.count(" before it had joined;")
        return count_deaths(err) == num_deaths == err.count(" is started again, ") == num_back

    end = time.monotonic() + 110
    while not is_so():
        if time.monotonic() > end or run.process.poll() is not None:
            shown = run.err
            run.end()
            raise AssertionError(f"not all have come back:\n{shown}")
        time.sleep(0.05)


def count_deaths(err: str) -> int:
    return err.count(" was ended by SIGKILL")
