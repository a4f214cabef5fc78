"""Replacement workers in PyTorch scripts of the function style: what they do otherwise removes them, and only them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.scripts import Ended, start

pytestmark = [pytest.mark.torch]

SCRIPT = """
    import hashlib, os, signal, sys, time
    from pathlib import Path
    import duoka

    how, directory, num_workers, check_every = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    # Without snapshots: a test says when the run ends with its last original worker.
    strategy = duoka.Mirrored(devices=num_workers, replicas=4, check_every=check_every, snapshot=False)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    VICTIM, STEPS = 0, 110
    torch.set_num_threads(1)
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
    state = strategy.register(updates=0)
    updates, best = 0, None  # not registered

    def kill(worker, step):
        if how != "calm" and life == 1 and (strategy.worker, state.updates) == (worker, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(worker, wanted):
        end = time.monotonic() + 60
        while not (directory / f"ready-{worker}-{wanted}").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.5)

    def loss_of(x, y):
        if how == "an error" and life > 1:
            raise LookupError("nothing here")
        if how == "a row" and state.updates == 70:
            raise ValueError("no row")
        scale = updates if how == "a counter" else state.updates
        return nn.functional.cross_entropy(model(x), y) * (1 + 0.01 * scale)

    if life > 1:
        (directory / f"ready-{strategy.worker}-{life}").touch()
    for epoch in strategy.epochs(STEPS // 10):
        for batch in strategy.batches(loader):
            if how != "drift":
                kill(VICTIM, 14)
            if how == "the last original":
                kill(1, 80)
            if how != "calm" and life == 1 and state.updates == 34:
                wait_for(2 if how == "drift" else VICTIM, 2)
            if how in ("a counter", "an error", "a learning rate", "a best value") and life == 1:
                if state.updates == 64:
                    wait_for(VICTIM, 3)
            if life > 1 and strategy.is_main:
                print("the replacement is main at", state.updates)
            time.sleep(0.02)
            optimizer.zero_grad()
            strategy.backward(loss_of, batch)
            optimizer.step()
            updates, state.updates = updates + 1, state.updates + 1
            rate_at = updates if how == "a learning rate" else state.updates
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + 0.01 * rate_at)
            if how == "a best value":
                best = 0.0 if updates == 1 and life == 1 else best + 1
            if how == "drift" and life == 1 and strategy.worker == 2 and state.updates == 20:
                with torch.no_grad():
                    model[0].bias.view(torch.int32)[3] ^= 1 << 22
    if strategy.is_main:
        kept = [*model.state_dict().values()]
        kept += [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
        print("weights", hashlib.sha256(b"".join(v.numpy().tobytes() for v in kept)).hexdigest())
    """


def train(directory: Path, how: str, num_workers: int = 3, check_every: int = 5) -> Ended:
    lives = directory / "lives"
    lives.mkdir(parents=True)
    return start(directory, SCRIPT, how, str(lives), str(num_workers), str(check_every)).finish(200, leaves=["torch"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    ended = train(tmp_path_factory.mktemp("calm"), "calm", num_workers=1)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("weights ")
    return ended.out


def test_a_replacement_that_stays_for_fifty_steps_keeps_every_bit_and_is_never_main(calm, tmp_path):
    ended = train(tmp_path, "a loss")
    assert ended.code == 0, ended.err
    assert "worker 0 (cpu:0/v0) was ended by SIGKILL; 2 workers go on (generation 1)." in ended.err
    (joined,) = [line for line in ended.said() if "has rejoined at step " in line]
    assert int(joined.partition(" at step ")[2].partition(";")[0]) <= 50, "fifty steps follow"
    assert "was removed" not in ended.err
    assert ended.out == calm and "the replacement is main" not in ended.log(0)


@pytest.mark.parametrize(
    "how, why, in_log",
    [
        ("a counter", "computed other gradients than worker 1 from the same samples and weights", "computed other"),
        ("an error", "failed with LookupError: nothing here in replica 0", "nothing here"),
        pytest.param("a learning rate", "called 'exchange strategy.backward(", "theirs: ", marks=pytest.mark.slow),
        pytest.param("a best value", "failed with TypeError (unsupported operand", "TypeError", marks=pytest.mark.slow),
    ],
)
def test_what_a_script_has_not_registered_removes_the_replacement_and_changes_no_bit(how, why, in_log, calm, tmp_path):
    ended = train(tmp_path, how)
    assert ended.code == 0, ended.err
    removed = [line for line in ended.said() if " was removed: " in line]
    assert len(removed) == 2, ended.err
    for line in removed:
        assert line.startswith(f"worker 0 (cpu:0/v0) was removed: it {why}"), line
        assert "strategy.register" in line
    assert "worker 0 (cpu:0/v0) was removed 2 times for the same reason, and is not started again." in ended.err
    assert ended.out == calm and in_log in ended.log(0)


def test_an_error_that_original_workers_raise_too_ends_the_run(tmp_path):
    ended = train(tmp_path, "a row")
    assert ended.code == 1, ended.err
    assert "ValueError: no row" in ended.err and "has rejoined at step " in ended.err


def test_a_promoted_replacement_goes_on_when_the_last_original_is_lost(calm, tmp_path):
    ended = train(tmp_path, "the last original", num_workers=2)
    assert ended.code == 0, ended.err
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL; 1 worker goes on (generation 3)." in ended.err
    assert ended.out.splitlines()[-1] == calm.strip() and "the replacement is main at 81" in ended.out


def test_without_a_comparison_a_run_ends_with_its_last_original(tmp_path):
    ended = train(tmp_path, "the last original", num_workers=2, check_every=0)
    assert ended.code == 137, ended.err
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL; no worker is left that others could join." in ended.err
    assert "the replacement is main" not in ended.out and "weights" not in ended.out


def test_an_original_worker_that_drifts_is_removed_and_replaced(calm, tmp_path):
    ended = train(tmp_path, "drift")
    assert ended.code == 0, ended.err
    what = "it had other values than workers 0, 1 before step 20, first in 0.bias (1 of "
    assert f"worker 2 (cpu:0/v2) was removed: {what}" in ended.err
    assert "worker 2 (cpu:0/v2) has rejoined at step " in ended.err
    assert ended.out == calm, "it was found before a gradient was computed from it"
