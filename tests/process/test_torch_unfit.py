"""PyTorch scripts that keep something by themselves: one that comes back stumbles over it, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.scripts import Ended, start

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
    import hashlib, os, signal, sys, time
    from pathlib import Path
    import duoka

    how, directory = sys.argv[1], Path(sys.argv[2])
    strategy = duoka.Mirrored(devices=3, replicas=4)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    lives = directory / f"lives-{strategy.worker}"
    with lives.open("a") as file:
        file.write("x")
    life = lives.stat().st_size
    torch.manual_seed(0)
    rows = torch.randn(160, 6)
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(data, 16, shuffle=True))

    def count_correct(batch):
        x, y = batch
        return (model(x).argmax(1) == y).sum(), len(y)

    averaged = torch.zeros(16, 6)  # of the first layer's weights, and never in the loss

    def measure_average(batch):
        return (batch[0] @ averaged.T).sum(), len(batch[0])

    best, updates = None, 0
    for epoch in strategy.epochs(4):
        if life > 1:
            (directory / "ready").touch()
        for index, (x, y) in strategy.enumerate(loader):
            if not how.startswith("calm") and life == 1 and (strategy.worker, epoch, index) == (1, 1, 4):
                os.kill(os.getpid(), signal.SIGKILL)
            if not how.startswith("calm") and life == 1 and (epoch, index) == (2, 3):
                while not (directory / "ready").exists():
                    time.sleep(0.02)
                time.sleep(0.3)
            if (epoch, index) == (3, 5) and how == "a row":
                int("no row")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * (1 + 0.01 * (updates if how == "annealing" else strategy.step))).backward()
            optimizer.step()
            if strategy.stepped:
                averaged = 0.9 * averaged + 0.1 * model[0].weight.detach()
                updates = updates + 1 if how in ("warm-up", "annealing") else strategy.step + 1
                rate = updates if how == "warm-up" else strategy.step + 1
                optimizer.param_groups[0]["lr"] = 1e-2 * min(1, 0.1 + 0.01 * rate)
        accuracy = float(strategy.evaluate(count_correct, loader))
        if how.endswith("averaged"):
            strategy.print("average", float(strategy.evaluate(measure_average, loader)).hex())
        if how == "best" and epoch == 0:
            best = accuracy
        elif how == "best" and accuracy > best:
            best = accuracy
    if strategy.is_main:
        state = [*model.state_dict().values()]
        state += [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
        print("weights", hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest())
    """


def train(directory: Path, how: str) -> Ended:
    lives = directory / "lives"
    lives.mkdir(parents=True)
    return start(directory, SCRIPT, how, str(lives)).finish(150, leaves=["torch"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Ended:
    ended = train(tmp_path_factory.mktemp("calm"), "calm")
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.parametrize(
    "how, why",
    [
        ("annealing", "computed other gradients than worker 0 from the same rows and weights (replica 3): they"),
        pytest.param(
            "best",
            "failed with TypeError ('>' not supported between instances of 'float' and 'NoneType')",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "warm-up",
            "did otherwise in its loop body than the others: 'learning rates 0.00",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_script_keeps_by_itself_ends_the_one_that_has_come_back_alone(how, why, calm, tmp_path):
    ended = train(tmp_path, how)
    assert ended.code == 0, ended.err
    _, _, joined, unfit = ended.said()
    assert "has rejoined at step " in joined
    assert unfit.startswith(f"worker 1 (cpu:0/v1) had come back, and {why}"), unfit
    assert unfit.endswith("; it is not started again; 2 workers go on (generation 3).")
    assert ended.out == calm.out and "weights" in calm.out
    found = {"annealing": "computed other gradients", "best": "TypeError", "warm-up": "theirs: "}
    assert found[how] in ended.log(1)


def test_evaluations_that_depend_on_what_the_script_keeps_end_the_one_that_has_come_back_alone(tmp_path):
    calm, ended = train(tmp_path / "calm", "calm averaged"), train(tmp_path / "struck", "averaged")
    assert ended.code == 0, ended.err
    *_, unfit = ended.said()
    words = "worker 1 (cpu:0/v1) had come back, and came to other numbers in strategy.evaluate than worker 0 from the"
    assert unfit.startswith(words), unfit
    assert ended.out == calm.out and calm.out.count("average") == 4


def test_an_error_that_all_come_by_is_still_the_users_own(tmp_path):
    ended = train(tmp_path, "a row")
    assert ended.code == 1, ended.err
    assert "ValueError: invalid literal for int() with base 10: 'no row'" in ended.err
