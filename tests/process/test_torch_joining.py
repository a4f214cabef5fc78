"""A PyTorch worker killed in a real run comes back: it runs the script from its top, and joins mid-epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.process.scripts import Ended, Run, start

pytestmark = pytest.mark.torch

BATCHES, EPOCHS, STRUCK, JOINED = 24, 4, (1, 5), (2, 3)  # (epoch, batch): when it dies, and when the others wait for it

SCRIPT = f"""
    import hashlib, json, os, random, signal, sys, time
    from pathlib import Path
    import duoka

    victim, how, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    saves = how.endswith("saved")
    BATCHES, EPOCHS, STRUCK, JOINED = {(BATCHES, EPOCHS, STRUCK, JOINED)}
    strategy = duoka.Mirrored(devices=3, replicas=4, check_every=1 if saves else 100)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    lives = directory / f"lives-{{strategy.worker}}"
    with lives.open("a") as file:
        file.write("x")
    life = lives.stat().st_size
    print("life", life, "main" if strategy.is_main else "not main")
    torch.manual_seed(0)
    rows = torch.randn(16 * BATCHES, 6)
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    loader, testing = DataLoader(data, 16, shuffle=True), DataLoader(data, 20)
    total = strategy.sum(1.0)  # a call before the loop
    with strategy.main_first():
        pass
    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)

    class Record:  # of the user's own
        counts = torch.zeros(2)

        def state_dict(self):
            return {{"counts": self.counts}}

        def load_state_dict(self, state):
            self.counts = state["counts"]

    record = Record()
    strategy.also(record=record)
    if saves:  # at every border something is compared, saved, and once handed over
        strategy.checkpoint(directory / "saved", every_steps=1)

    def count_correct(batch):
        x, y = batch
        return (model(x).argmax(1) == y).sum(), len(y)

    def wait_for_newcomer():
        end = time.monotonic() + 120
        while victim >= 0 and not (directory / "ready").exists():
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.02)

    metrics = []
    for epoch in strategy.epochs(EPOCHS) if how.startswith("epochs") else range(EPOCHS):
        if life > 1:
            (directory / "ready").touch()
        strength = 1 + random.random() + float(torch.rand(1))  # drawn between loops
        for index, (x, y) in strategy.enumerate(loader):
            if strategy.worker == victim and life == 1 and (epoch, index) == STRUCK:
                os.kill(os.getpid(), signal.SIGKILL)
            if (epoch, index) == JOINED:
                wait_for_newcomer()
            if victim >= 0:
                time.sleep(0.01)
            optimizer.zero_grad()
            loss = (strength + record.counts[0]) * nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean = strategy.mean(loss)
            if strategy.stepped:
                record.counts[1] += float(model[0].weight.detach()[0, 0])
        accuracy = float(strategy.evaluate(count_correct, testing))
        model.eval()
        predicted = []
        with torch.no_grad():
            for x, y in strategy.prepare(DataLoader(data, 20)):
                predicted.append(model(x).argmax(1))
        model.train()
        ones = float(strategy.sum(float(torch.cat(predicted).sum())))
        record.counts[0] += 1
        metrics.append([epoch, accuracy, ones, strategy.step])
        strategy.print(json.dumps(metrics[-1]))

    state = [*model.state_dict().values()]
    state += [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest()
    facts = {{"sha256": digest, "metrics": metrics, "life": life, "step": strategy.step, "main": strategy.is_main}}
    facts["record"] = record.counts.tolist()
    print(json.dumps(facts | {{"draw": torch.rand(1).item()}}))
    """


def begin(directory: Path, victim: int, how: str) -> Run:
    lives = directory / "lives"
    lives.mkdir(parents=True)
    return start(directory, SCRIPT, str(victim), how, str(lives))


def end(run: Run) -> Ended:
    return run.finish(200, leaves=["torch"])


@pytest.fixture(scope="module")
def calm_run(tmp_path_factory) -> Run:
    """Beside the first one that is struck."""
    return begin(tmp_path_factory.mktemp("calm"), -1, "range")


@pytest.fixture(scope="module")
def calm(calm_run) -> Callable[[], Ended]:
    @cache
    def finish() -> Ended:
        ended = end(calm_run)
        assert ended.code == 0, ended.err
        return ended

    return finish


CASES = [
    (0, "epochs, saved"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, "range"), (1, "range, saved"), (2, "epochs")]),
]


@pytest.mark.slow
@pytest.mark.parametrize("victim, how", CASES)
def test_a_worker_that_comes_back_joins_mid_epoch_and_the_bits_are_those_of_a_calm_run(victim, how, calm, tmp_path):
    ended = end(begin(tmp_path, victim, how))
    assert ended.code == 0, ended.err
    who = f"worker {victim} (cpu:0/v{victim})"
    killed, started, joined = (line for line in ended.said() if "checkpoint" not in line)
    if "saved" in how:
        (newest,) = sorted((tmp_path / "lives" / "saved").iterdir())[-1:]
        assert json.loads((newest / "facts.json").read_text())["agreed_step"] >= BATCHES * EPOCHS - 1
    assert killed == f"{who} was ended by SIGKILL; 2 workers go on (generation 1)."
    assert started == f"{who} is started again, and joins when it is ready."
    step = int(joined.removeprefix(f"{who} has rejoined at step ").partition(";")[0])
    epoch, batch = divmod(step, BATCHES)
    assert epoch == JOINED[0] and JOINED[1] < batch < BATCHES, joined
    expected, facts = calm().facts()[0], ended.facts()
    for worker in range(3):
        assert facts[worker]["life"] == 1 + (worker == victim)
        for name in ("sha256", "step", "draw", "record"):
            assert facts[worker][name] == expected[name], (worker, name)
    newcomer = facts[victim]
    assert newcomer["metrics"] == expected["metrics"][0 if how.startswith("range") else JOINED[0] :]
    assert not newcomer["main"], "what it has not run it cannot know"
    assert "life 2 not main" in ended.log(victim) and "life 2" not in ended.out
    assert _printed(ended) == _printed(calm()) != []


def _printed(ended: Ended) -> list[str]:
    """What the main worker said after each epoch."""
    return [line for line in ended.out.splitlines() if line.startswith(tuple(f"[{epoch}," for epoch in range(EPOCHS)))]
