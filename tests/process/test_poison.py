"""A batch that kills whoever computes it ends the run at the second death; other deaths are made up for."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time

import numpy as np
import pytest

from tests.conftest import run_workers
from tests.limits import START_S
from tests.process.scripts import start


def sum_up(collective, happen) -> list[float]:
    """Nine steps over four replicas; `happen(worker, step, replica)` comes while a replica is computed."""
    totals = []
    for step in range(9):
        buffer = collective.scratch(10, "f8")
        exchange = collective.exchange([buffer], f"step {step}")

        def place(replica: int, step: int = step, buffer=buffer, exchange=exchange) -> bytes:
            collective.work_on(step, (replica,))
            happen(collective.worker, step, replica)
            exchange.slot(buffer, replica)[:] = np.sin(step + replica)
            return b""

        exchange.carry_out(place)
        totals.append(float(exchange.result(buffer)[0]))
        collective.end_step()
    return totals


CALM = [float(sum(np.sin(step + replica) for replica in range(4))) for step in range(9)]


def crash() -> None:
    faulthandler.disable()  # the stack of the test runner is of no interest
    ctypes.string_at(0)


def abort() -> None:
    faulthandler.disable()
    os.abort()


@pytest.mark.parametrize(
    "how, name, code",
    [(crash, "SIGSEGV", 139), (abort, "SIGABRT", 134)],
    ids=["segmentation fault", "abort"],
)
def test_a_replica_that_crashes_two_workers_in_turn_is_named_and_ends_the_run(how, name, code):
    told = run_workers(4, 4, sum_up, lambda worker, step, replica: how() if (step, replica) == (5, 3) else None)
    assert told.outcome.exit_code == code
    (first, _), (second, _) = told.outcome.lost
    assert first == 3
    assert told.said == [f"worker 3 (cpu:0/v3) was ended by {name}; 3 workers go on (generation 1)."]
    traceback = told.outcome.failure["traceback"]
    assert traceback.startswith(
        f"duoka.errors.WorkerLost: Replica 3 at step 5 has ended two workers in turn: worker 3 (cpu:0/v3) by {name},"
        f" then worker {second} (cpu:0/v{second}) by {name}."
    )


def test_the_last_worker_but_one_that_crashes_is_told_too():
    told = run_workers(2, 4, sum_up, lambda worker, step, replica: crash() if (step, replica) == (5, 3) else None)
    assert told.outcome.exit_code == 139 and "Replica 3 at step 5" in told.outcome.failure["traceback"]


def survive(lost: list[int], happen) -> None:
    told = run_workers(4, 4, sum_up, happen, deadline_s=0.6)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert sorted(worker for worker, _ in told.outcome.lost) == lost, told.said
    assert all(np.allclose(totals, CALM) for totals in told.results.values()) and len(told.results) == 4 - len(lost)


def test_kill_9_of_whoever_computes_a_replica_is_a_loss_each_time():
    """Three workers, one after the other, while they compute the same replica of the same step."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.write(writing, b"...")

    def happen(worker: int, step: int, replica: int) -> None:
        if (step, replica) == (5, 3):
            try:
                os.read(reading, 1)
            except BlockingIOError:
                return  # the last one lives
            os.kill(os.getpid(), signal.SIGKILL)

    told = run_workers(4, 4, sum_up, happen)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert len(told.outcome.lost) == 3 and len(told.results) == 1
    assert all(np.allclose(totals, CALM) for totals in told.results.values())


def test_crashes_in_different_replicas_are_losses():
    deaths = [(5, 3, 3), (5, 1, 1)]
    survive([1, 3], lambda worker, step, replica: crash() if (step, replica, worker) in deaths else None)


def test_crashes_at_different_steps_are_losses():
    """The second one is in the same replica, which somebody else has by then."""

    def happen(worker: int, step: int, replica: int) -> None:
        if (step, replica, worker) == (3, 3, 3) or (step == 5 and worker == 0):
            crash()

    survive([0, 3], happen)


def test_a_replica_in_which_two_workers_hang_in_turn_is_named():
    told = run_workers(
        3,
        3,
        sum_up,
        lambda worker, step, replica: time.sleep(1000) if (step, replica) == (5, 2) else None,
        deadline_s=0.6,
    )
    assert told.outcome.exit_code == 75, told.said
    assert "were stuck in the same place, at replica 2 at step 5" in told.outcome.failure["traceback"]


TORCH = """
import ctypes, faulthandler, sys
import duoka
strategy = duoka.Mirrored(devices=3)
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.arange(60.0).reshape(-1, 1).repeat(1, 2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=6)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for (x,) in loader:
    if float(x[0, 0]) == 34:  # replica 2 of step 5
        faulthandler.disable()
        ctypes.string_at(0)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.torch
def test_rows_that_crash_a_pytorch_body_end_the_run_at_the_second_crash_and_are_named(tmp_path):
    ended = start(tmp_path, TORCH).finish(START_S, leaves=["torchinductor_"])
    assert ended.code == 139, ended.err
    first, *_, last = ended.said()
    assert first == "worker 2 (cpu:0/v2) was ended by SIGSEGV; 2 workers go on (generation 1)."
    assert last.startswith("1 worker stopped because worker ") and last.endswith(" failed:")
    assert "WorkerLost: Replica 2 at step 5 has ended two workers in turn: worker 2 (cpu:0/v2) by SIGSEGV," in ended.err
