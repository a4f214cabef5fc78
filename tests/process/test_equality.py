"""Replicas stay equal: a bit that flips on one worker is found and named, and the worker is replaced. PyTorch loops."""

from __future__ import annotations

import hashlib
import json
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from duoka.collectives.solo import solo
from duoka.events import Checked, Drifted, listen
from duoka.frameworks.torch.adapter import TorchAdapter
from duoka.strategies.strategy import Options
from tests.conftest import die_at, run_workers
from tests.limits import START_S
from tests.process.scripts import DUOKA_RUN, PYTHON, Run, run

pytestmark = [pytest.mark.torch]
EVERY, FLIPPED_AT = 3, 4  # the flip is found before step 6
FOUND_AT = 6
LEAVES = ("torchinductor_",)  # PyTorch's own


def flip_one_bit(tensor: torch.Tensor) -> None:
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[-1] ^= 1 << 22  # the highest bit of the fraction


def flip(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if what == "weight":
        flip_one_bit(model[0].weight)
    elif what == "buffer":
        flip_one_bit(model.table)
    elif what == "optimizer":
        flip_one_bit(optimizer.state[model[2].bias]["exp_avg_sq"])


def train(collective, what: str = "", victim: int = -1, dying: int = -1, moment: int = -1, *, second: int = -1) -> dict:
    """Nine steps; `victim` flips a bit in the middle, and `dying` is killed at a moment of the check that finds it.

    With a `second` victim there are three more steps, in which it flips the same bit.
    """
    events: list = []
    stop = listen(events.append)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    adapter = TorchAdapter(collective, torch.device("cpu"), Options(check_every=EVERY))
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 5))
    model.register_buffer("table", torch.arange(4.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    num_rows = 108 if second < 0 else 144
    data = TensorDataset(torch.randn(num_rows, 20, generator=generator), torch.randn(num_rows, 5, generator=generator))
    model, optimizer, loader = adapter.prepare([model, optimizer, DataLoader(data, batch_size=12)])

    def loss_of(x, y):
        return ((model(x) - y) ** 2).mean()

    for batch in adapter.batches(loader):
        optimizer.zero_grad()
        adapter.backward(loss_of, [batch], None, True)
        optimizer.step()
        if adapter.step == FLIPPED_AT and collective.worker == victim:
            flip(what, model, optimizer)
        if adapter.step == FOUND_AT + 1 and collective.worker == second:
            flip(what, model, optimizer)
        if adapter.step == FOUND_AT and collective.worker == dying:
            die_at(collective, moment)
    stop()
    return {
        "weights": digest(model.state_dict().values()),
        "optimizer": digest(value for state in optimizer.state.values() for value in state.values()),
        "digests": {str(event.step): event.digest for event in events if isinstance(event, Checked)},
        "drifted": [[e.step, *e.drifted, e.first, e.num_tensors] for e in events if isinstance(e, Drifted)],
    }


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def calm() -> dict:
    return train(solo(4, available_bytes=lambda: 2**40))


@pytest.mark.parametrize(
    ("what", "first"),
    [("weight", "0.weight"), ("buffer", "table"), ("optimizer", "exp_avg_sq of 2.bias in optimizer 1")],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_with_a_flipped_bit_is_removed_with_a_line_that_names_the_tensor(what, first, victim, capfd):
    launched = run_workers(3, 4, train, what, victim)
    assert launched.outcome.exit_code == 0, launched.outcome
    assert launched.outcome.lost == [(victim, signal.SIGKILL)]
    right = [worker for worker in range(3) if worker != victim]
    assert sorted(launched.results) == right
    reference = calm()
    for result in launched.results.values():
        (drifted,) = result["drifted"]
        # A wrong second moment has made its weight wrong in the step after it, too.
        assert drifted[:3] == [FOUND_AT, victim, first if what != "optimizer" else "2.bias"]
        assert result == launched.results[right[0]]  # weights, optimizer state and digests
        assert result["digests"]["3"] == reference["digests"]["3"]
        # Gradients from wrong weights were computed before the check: that is not undone, and said.
        is_undone = what == "buffer"
        assert (result["digests"]["6"] == reference["digests"]["6"]) == is_undone
        assert (result["weights"] == reference["weights"]) == is_undone
    said = capfd.readouterr().err
    start = f"worker {victim} (cpu:0/v{victim}) was removed: it had other values than workers {right[0]}, {right[1]}"
    (line,) = launched.said
    assert line.startswith(f"{start} before step 6, first in {first if what != 'optimizer' else '2.bias'} ("), line
    assert said.count("The last check that agreed: at step 3. Gradients computed from wrong values since then") == 1


def test_a_tensor_that_differs_a_second_time_ends_the_run():
    def twice(collective):
        return train(collective, "weight", 3, second=2)

    launched = run_workers(4, 4, twice)
    assert launched.outcome.exit_code == 76
    text = launched.outcome.failure["traceback"]
    assert "Before step 9 the replicas are no longer equal: 0.weight is not the same on workers" in text
    assert "0.weight has differed before. The last check that agreed: at step 6." in text


def test_calm_runs_have_the_same_digests_on_any_number_of_workers():
    reference = calm()
    assert list(reference["digests"]) == ["0", "3", "6"]
    assert len(set(reference["digests"].values())) == 3
    for num_workers in (2, 3):
        launched = run_workers(num_workers, 4, train)
        assert len(launched.results) == num_workers
        assert all(result == reference for result in launched.results.values())


def test_two_workers_that_differ_stop_with_an_exit_code_of_their_own():
    launched = run_workers(2, 4, train, "weight", 1)
    assert launched.outcome.exit_code == 76
    text = launched.outcome.failure["traceback"]
    assert "Before step 6 the replicas are no longer equal: 0.weight is not the same on workers 0 and 1." in text
    assert "(equal are: worker 0; worker 1). The last check that agreed: at step 3." in text


def test_half_of_the_workers_is_no_majority():
    def two_of_four(collective):
        return train(collective, "weight", collective.worker if collective.worker in (1, 3) else -1)

    launched = run_workers(4, 4, two_of_four)
    assert launched.outcome.exit_code == 76
    assert "(equal are: workers 0, 2; workers 1, 3)" in launched.outcome.failure["traceback"]


@pytest.mark.parametrize("dying", [0, 1, 3])
def test_a_worker_that_is_lost_while_a_drifted_one_is_removed_changes_nothing_of_that(dying):
    """Worker 1 has drifted, and worker 0, 1 or another one is killed on the way."""
    drifted = 0
    for moment in range(0, 12, 3):
        launched = run_workers(4, 4, train, "weight", 1, dying, moment)
        lost = sorted(launched.outcome.lost)
        # When the one that has drifted dies before it is compared, nobody is removed.
        assert lost == [(worker, signal.SIGKILL) for worker in sorted({dying, 1})], (moment, launched.outcome)
        assert launched.outcome.exit_code == 0, (moment, launched.outcome)
        first, *others = launched.results.values()
        assert len(others) == len({0, 2, 3} - {dying}) - 1
        for other in others:
            assert other["weights"] == first["weights"] and other["optimizer"] == first["optimizer"], moment
        drifted += bool(first["drifted"])
    assert drifted == 4 if dying != 1 else drifted >= 1


SCRIPT = """
    import os, signal, sys
    import torch, duoka
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    rate, kill_at = float(sys.argv[1]), int(sys.argv[2])
    strategy = duoka.Mirrored(check_every=4)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(90, 6), torch.randn(90, 2)), batch_size=6)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    def loss_of(x, y):
        return ((model(x) - y) ** 2).mean()

    for batch in strategy.batches(loader):
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
        if strategy.step == 7:
            optimizer.param_groups[0]["lr"] = rate
        if strategy.step == kill_at + 1 and strategy.is_main and strategy.num_workers == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def on_workers(num_workers: int) -> list[str]:
    return [*DUOKA_RUN, "--devices", str(num_workers), "--replicas", "3", "--no-respawn"]


def journal_of(ended) -> list[dict]:
    return [json.loads(line) for line in (ended.run_directory / "journal.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_verify_compares_runs_that_lost_their_main_worker_and_runs_that_part(tmp_path):
    calm_run = run(tmp_path / "calm", SCRIPT, "0.01", "-1", program=on_workers(1), timeout_s=START_S, leaves=LEAVES)
    struck = run(tmp_path / "struck", SCRIPT, "0.01", "9", program=on_workers(2), timeout_s=START_S, leaves=LEAVES)
    other = run(tmp_path / "other", SCRIPT, "0.02", "-1", program=on_workers(1), timeout_s=START_S, leaves=LEAVES)
    assert [ended.code for ended in (calm_run, struck, other)] == [0, 0, 0], struck.err
    assert "worker 0 (cpu:0/v0) was ended by SIGKILL" in struck.err

    first, *checks = journal_of(struck)
    assert (first["kind"], first["replicas"], first["seed"]) == ("run", 3, 0)
    assert [check["step"] for check in checks] == [0, 4, 8, 12]
    assert [check["workers"] for check in checks] == [[0, 1], [0, 1], [0, 1], [1]]
    assert [check["generation"] for check in checks] == [0, 0, 0, 1]
    assert all(check["seconds"] > 0 and check["share"] > 0 for check in checks)

    assert verify(tmp_path / "equal", calm_run, struck) == (0, "equal: 4 steps checked in both, from 0 to 12")
    code, text = verify(tmp_path / "parted", calm_run, other)
    assert code == 1
    assert text == "different: they part at step 8 (equal until step 4; 4 steps checked in both)"


def verify(directory, a, b) -> tuple[int, str]:
    ended = Run(directory, [*PYTHON, "-m", "duoka", "verify", str(a.run_directory), str(b.run_directory)]).finish()
    return ended.code, ended.out.splitlines()[0]


@pytest.mark.slow
def test_without_checks_there_is_no_journal(tmp_path):
    source = SCRIPT.replace("check_every=4", "check_every=None")
    ended = run(tmp_path, source, "0.01", "-1", program=on_workers(1), timeout_s=START_S, leaves=LEAVES)
    assert ended.code == 0, ended.err
    assert not (ended.run_directory / "journal.jsonl").exists()
