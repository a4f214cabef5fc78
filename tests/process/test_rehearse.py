"""`duoka rehearse` on real scripts: what is equal, what differs, and what cannot be rehearsed.

A full rehearsal takes nine starts of PyTorch. Only the first test does one; others run the ways they are about.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from duoka.cli.rehearse import render
from duoka.runtime.command import Command
from duoka.runtime.rehearsal.rehearsing import (
    KILLED,
    ONE_REPLICA,
    ONE_WORKER,
    RESUMED,
    Rehearsing,
    Report,
    Row,
)
from duoka.runtime.rehearsal.runs import Runs
from tests.conftest import plan_for
from tests.limits import START_S
from tests.process.scripts import Ended, run, write

REHEARSE = (sys.executable, "-m", "duoka", "rehearse")

DATA = """
    import time
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import duoka

    strategy = duoka.Mirrored()
    torch.manual_seed(3)
    x = torch.randn(48, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
"""

# Without an optimizer of PyTorch, whose first one imports for two seconds.
UPDATE = """
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
"""

CORRECT = f"""{DATA}
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
    model, loader = strategy.prepare(model, loader)

    def loss_of(x, y):
        out = model(x)
        return F.cross_entropy(out, y), {{"correct": ((out.argmax(1) == y).sum(), len(y))}}

    print("workers:", strategy.num_workers)
    for epoch in strategy.epochs(100):
        for batch in strategy.batches(loader):
            model.zero_grad()
            loss, metrics = strategy.backward(loss_of, batch)
            {UPDATE}
            print(f"loss {{loss.item():.4f}}, correct {{metrics['correct']:.3f}}")
            print(f"at {{time.perf_counter():.9f}} s")
"""

BY_HAND = f"""{DATA}
    model, loader = strategy.prepare(MODEL, loader)
    runs_of_function = 0

    def loss_of(x, y):
        global runs_of_function
        runs_of_function += 1
        return F.cross_entropy(model(x), y, reduction=REDUCTION)

    for epoch in strategy.epochs(100):
        for batch in strategy.batches(loader):
            model.zero_grad()
            loss = strategy.backward(loss_of, batch, check=False)
            {UPDATE}
            print(f"loss {{loss.item():.3f}}")
            COUNT
"""
MISTAKEN = BY_HAND.replace("MODEL", "nn.Linear(8, 2)").replace("REDUCTION", "'sum'")
MISTAKEN = MISTAKEN.replace("COUNT", "print('runs', runs_of_function)  # MISTAKE")
NORMALISED = BY_HAND.replace("MODEL", "nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))")
NORMALISED = NORMALISED.replace("REDUCTION", "'mean'").replace("COUNT", "")


def rehearse(directory: Path, source: str, *words: str, timeout_s: float = START_S) -> Ended:
    return run(directory, source, program=(*REHEARSE, *words), timeout_s=timeout_s, leaves=["torchinductor"])


def rehearse_some(directory: Path, source: str, *kinds: str, num_steps: int = 4) -> tuple[Report, dict[str, Row]]:
    """Run some ways only, on two workers."""
    script = write(directory, source)
    records = directory / "records"
    records.mkdir()
    command = Command((sys.executable,), None, str(script), (), str(script.parent))
    runs = Runs(command, "rehearsal", records, num_steps, START_S)
    report = Rehearsing(plan_for(2, 2), runs, num_steps, seed=4, tell=print).carry_out(kinds)
    return report, {row.kind: row for row in report.rows}


@pytest.mark.torch
def test_a_correct_script_passes_and_its_times_are_left_out(tmp_path):
    ended = rehearse(tmp_path, CORRECT, "--steps", "5", "--seed", "11", timeout_s=4 * START_S)
    assert ended.code == 0, ended.out + ended.err
    clock = next(place for place, line in enumerate(CORRECT.splitlines(), 1) if 'print(f"at' in line)
    table = [line.split() for line in ended.out.splitlines() if "equal" in line]
    assert [row[-3:] for row in table] == [["equal"] * 3] * 5
    assert f"left out 5 printed lines that differ between two undisturbed runs (script.py:{clock})" in ended.out
    assert "the rehearsal uses --devices 2" in ended.err
    assert "worker 1 was killed in step " in ended.err and "--seed 11 repeats this" in ended.err
    logs = ended.run_directory / "undisturbed" / "worker-0.log"
    assert "workers: 2" in logs.read_text()
    assert logs.read_text().count("loss ") == 5, "the run ends after its steps"


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory) -> tuple[Report, dict[str, Row]]:
    return rehearse_some(tmp_path_factory.mktemp("mistaken"), MISTAKEN, KILLED, RESUMED, ONE_WORKER, ONE_REPLICA)


def mistake() -> str:
    number = next(place for place, line in enumerate(MISTAKEN.splitlines(), 1) if "MISTAKE" in line)
    return f"script.py:{number}"


@pytest.mark.torch
def test_a_counter_in_the_function_shows_when_a_worker_is_killed(mistaken):
    comparison = mistaken[1][KILLED].comparison
    assert comparison.found["weights"] is None and comparison.found["metrics"] is None
    found = comparison.found["printed lines"]
    assert found.what.endswith(mistake())
    assert found.left.startswith("runs ") and found.right.startswith("runs ") and found.left != found.right


@pytest.mark.torch
def test_a_variable_that_is_not_registered_shows_when_the_script_is_resumed(mistaken):
    report, rows = mistaken
    comparison = rows[RESUMED].comparison
    assert comparison.found["weights"] is None and comparison.found["metrics"] is None
    found = comparison.found["printed lines"]
    assert found.what.endswith(mistake())
    assert int(found.left.removeprefix("runs ")) > int(found.right.removeprefix("runs "))
    assert "state = strategy.register(name=value)" in render(replace(report, rows=(rows[RESUMED],)))


@pytest.mark.torch
def test_a_counter_in_the_function_shows_on_one_worker(mistaken):
    found = mistaken[1][ONE_WORKER].comparison.found["printed lines"]
    assert (found.what, found.left, found.right) == (f"line 2, printed by {mistake()}", "runs 1", "runs 2")
    assert "2 workers: runs 1\n  1 worker:  runs 2" in render(mistaken[0])


@pytest.mark.torch
def test_a_sum_that_is_taken_for_a_mean_differs_from_one_replica(mistaken):
    report, rows = mistaken
    assert rows[ONE_REPLICA].comparison.found["weights"] is not None
    assert rows[ONE_REPLICA].comparison.found["metrics"].what == "loss of call 1 of strategy.backward"
    assert rows[ONE_REPLICA].is_finding and not rows[ONE_REPLICA].is_batchnorm
    assert report.has_findings
    alone = replace(report, rows=(rows[ONE_REPLICA],))
    assert "strategy.weigh(loss)" in render(alone) and "correct the differences above first" in render(report)


@pytest.mark.torch
def test_batchnorm_is_named_as_the_reason_and_is_not_a_finding(tmp_path):
    report, rows = rehearse_some(tmp_path, NORMALISED, ONE_REPLICA)
    row = rows[ONE_REPLICA]
    assert row.comparison.found["weights"] is not None, "without a difference there is nothing to explain"
    assert row.is_batchnorm and not report.has_findings
    assert "sync_batchnorm=True" in render(report)


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("import duoka\nduoka.Mirrored()\nraise ValueError('broken data')", 3, "ValueError: broken data"),
        ("raise ValueError('broken import')", 3, "ValueError: broken import"),
        ("print('no strategy')", 2, "ended without making a strategy"),
        ("import duoka\nduoka.Mirrored()", 2, "ended without training"),
    ],
)
def test_a_script_that_cannot_be_rehearsed_is_refused(tmp_path, source, code, told):
    ended = rehearse(tmp_path, source)
    assert ended.code == code, ended.err
    assert told in ended.err
    assert ("Traceback" in ended.err) is (code == 3)


def test_a_run_past_its_timeout_is_killed_with_its_workers(tmp_path):
    source = "import duoka, time\nduoka.Mirrored()\nprint('asleep', flush=True)\ntime.sleep(600)"
    ended = rehearse(tmp_path, source, "--timeout", "6")
    assert ended.code == 75, ended.err
    assert "asleep" in (ended.run_directory / "undisturbed" / "worker-0.log").read_text()
    assert "has not trained 20 steps within" in ended.err
