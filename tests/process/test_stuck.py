"""Stuck is not dead: workers that are late are named and watched, and lost only when nothing of them moves."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from duoka.runtime.crew import Crew, Ready
from tests.conftest import run_workers
from tests.limits import START_S
from tests.process.scripts import run, start

DEADLINE_S = 0.6
LINE = "line 18"  # of the script below, in which it happens


def steps(happens: str, *, deadline_s: float = DEADLINE_S, workers: int = 3) -> str:
    """A script of 8 steps over 4 replicas that prints the bits of its weights; worker 1 does this at step 4."""
    return f"""
import ctypes, hashlib, os, signal, sys, time
import duoka
import numpy
strategy = duoka.Mirrored(devices={workers}, replicas=4, deadline_s={deadline_s})
weights = numpy.zeros(1000)

def compute(replica):
    return numpy.random.default_rng([strategy.step, replica]).normal(size=weights.shape)

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

for step in range(8):
    if step == 4 and len(sys.argv) > 1 and strategy.worker == 1:
        {happens}
    weights -= 0.01 * strategy.sum_over_replicas(compute) * (1 + abs(weights))
if strategy.is_main:
    print("weights", hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    """What an undisturbed run prints."""
    ended = run(tmp_path_factory.mktemp("calm"), steps("pass", deadline_s=20))
    assert (ended.code, ended.said()) == (0, [])
    return ended.out


def told_of(ended) -> list[str]:
    """What was said of the worker that is struck; on a busy machine others may be late at their start."""
    of_it = [line for line in ended.said() if line.startswith("worker 1 ") and "at step 0" not in line]
    return [line for line in of_it if "is not started again" not in line]


def test_a_stopped_worker_is_killed_after_two_deadlines_and_no_bit_changes(tmp_path, reference):
    ended = run(tmp_path, steps("os.kill(os.getpid(), signal.SIGSTOP)"), "strike")
    assert (ended.code, ended.out) == (0, reference), ended.err
    warning, loss = told_of(ended)
    assert warning.startswith("worker 1 (cpu:0/v1) has not arrived at step 4 for ")
    assert "2 others wait for it" in warning and "is stopped (SIGSTOP)" in warning
    assert loss.startswith("worker 1 (cpu:0/v1) was stopped (SIGSTOP) for ")
    assert loss.endswith("and was killed; 2 workers go on (generation 1).")


def test_a_long_computation_on_one_worker_is_waited_for_with_one_warning_that_shows_where_it_is(tmp_path, reference):
    ended = run(tmp_path, steps(f"spin({3.3 * DEADLINE_S})"), "strike")
    assert (ended.code, ended.out) == (0, reference), ended.err
    (warning,) = told_of(ended)
    assert warning.startswith("worker 1 (cpu:0/v1) has not arrived at step 4 for ")
    assert "and computes: nobody is lost" in warning
    shown = ended.err[ended.err.rindex("Its stack, innermost call first:") :].splitlines()
    assert shown[1].endswith("in spin") and shown[2].endswith(f'script.py", {LINE} in <module>') and len(shown) == 3
    assert "in spin" in ended.log(1)


@pytest.mark.slow
def test_a_worker_that_sleeps_for_ever_is_lost_and_its_stack_is_shown(tmp_path, reference):
    ended = run(tmp_path, steps("time.sleep(1000)"), "strike")
    assert (ended.code, ended.out) == (0, reference), ended.err
    warning, loss = told_of(ended)
    assert "sleeps. If neither its CPU time nor its stack moves for 0.6 s, it counts as lost" in warning
    assert "raise deadline_s" in warning
    assert f'script.py", {LINE} in <module>' in ended.err
    assert loss.startswith("worker 1 (cpu:0/v1) was stuck (no CPU time used, same stack for 0.6")
    assert loss.endswith("and was killed; 2 workers go on (generation 1).")


@pytest.mark.slow
def test_native_code_that_sleeps_with_the_interpreter_locked_is_seen_and_lost(tmp_path, reference):
    """No Python code can run in that worker: its stack is written by C code in a signal handler."""
    ended = run(tmp_path, steps("ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"), "strike")
    assert (ended.code, ended.out) == (0, reference), ended.err
    assert f'script.py", {LINE} in <module>' in ended.err
    assert len(told_of(ended)) == 2 and "was stuck" in told_of(ended)[-1]


@pytest.mark.slow
def test_work_of_the_main_worker_alone_that_only_sleeps_is_named_with_what_to_do(tmp_path):
    source = """
        import time
        import duoka
        strategy = duoka.Mirrored(devices=2, deadline_s=1)
        if strategy.is_main:
            time.sleep(1.6)
        strategy.barrier()
        print("together", flush=True)
        """
    ended = run(tmp_path, source)
    assert ended.code == 0 and "together" in ended.out, ended.err
    (warning,) = ended.said()
    assert warning.startswith("worker 0 (cpu:0/v0) has not arrived at step 0 for 1")
    assert "raise deadline_s if it may sleep that long" in warning
    assert 'script.py", line 6 in <module>' in ended.err


@pytest.mark.slow
def test_a_wait_costs_no_signal_before_its_deadline(tmp_path):
    """Native calls that a signal interrupts are left alone while nobody is late."""
    source = """
        import ctypes
        import duoka
        strategy = duoka.Mirrored(devices=2, deadline_s=20)
        left = ctypes.CDLL(None).sleep(1) if strategy.worker == 1 else 0
        assert left == 0, left
        strategy.barrier()
        """
    ended = run(tmp_path, source)
    assert (ended.code, ended.said()) == (0, []), ended.err


TORCH = """
import hashlib, os, signal, sys
import duoka
import torch
strategy = duoka.Mirrored(devices=3, replicas=4, deadline_s=4)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)

def loss_of(x, y):
    return torch.nn.functional.mse_loss(model(x), y)

for epoch in strategy.epochs(2):
    for batch in strategy.batches(loader):
        if (epoch, batch.index, strategy.worker) == (0, 5, 1) and len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "x").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        strategy.backward(loss_of, batch)
        optimizer.step()
if strategy.is_main:
    state = [*model.parameters(), *(part for each in optimizer.state.values() for part in each.values())]
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in state)
    print("weights and moments", hashlib.sha256(data).hexdigest(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_worker_of_a_pytorch_run_that_is_stopped_is_killed_and_no_bit_of_weights_and_optimizer_changes(tmp_path):
    calm = start(tmp_path / "calm", TORCH).finish(START_S, leaves=["torchinductor_"])
    struck = start(tmp_path / "struck", TORCH, str(tmp_path / "is stopped")).finish(START_S, leaves=["torchinductor_"])
    assert (calm.code, struck.code) == (0, 0), struck.err
    assert (tmp_path / "is stopped").exists()
    (loss,) = [line for line in struck.said() if "was stopped (SIGSTOP) for " in line]
    assert loss.startswith("worker 1 ") and loss.endswith("2 workers go on (generation 1).")
    assert struck.out == calm.out and "weights and moments" in calm.out


# The same among forks, which start faster.


def train(collective, strike: Callable[[Any, int], None]) -> str:
    """Eight steps over all replicas, in which this happens before the exchange; gives the bits of the weights."""
    weights = np.zeros(1000)
    for step in range(8):
        strike(collective, step)
        buffer = collective.scratch(len(weights), weights.dtype)
        exchange = collective.exchange([buffer], f"step {step}")

        def place(replica: int, step: int = step, buffer: Any = buffer, exchange: Any = exchange) -> bytes:
            exchange.slot(buffer, replica)[:] = np.random.default_rng([step, replica]).normal(size=buffer.count)
            return b""

        exchange.carry_out(place)
        weights -= 0.01 * exchange.result(buffer) * (1 + abs(weights))
        collective.end_step()
    return hashlib.sha256(weights.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def calm() -> str:
    (bits,) = set(run_workers(3, 4, train, lambda collective, step: None).results.values())
    return bits


def strike(calm: str, lost: list[int], *, deadline_s: float = DEADLINE_S, **deeds: Callable[[], Any]) -> list[str]:
    """Let workers do this at step 4; only these are lost, and the rest has the bits of a calm run. What was said."""

    def happen(collective, step: int) -> None:
        if step == 4 and f"worker_{collective.worker}" in deeds:
            deeds[f"worker_{collective.worker}"]()

    told = run_workers(3, 4, train, happen, deadline_s=deadline_s)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert sorted(worker for worker, _ in told.outcome.lost) == lost, told.said
    assert told.results == {worker: calm for worker in range(3) if worker not in lost}
    return told.said


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def walk() -> None:
    """Sleep nearly all the time, and never for long in the same line."""
    for _ in range(4):
        time.sleep(DEADLINE_S / 3)
        time.sleep(DEADLINE_S / 3)
        time.sleep(DEADLINE_S / 3)


def let_a_child_compute() -> None:
    """A data loader's process fills the first batch, and its parent does nothing but wait for it."""
    child = os.fork()
    if child == 0:
        spin(4 * DEADLINE_S)
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "live", [lambda: spin(3 * DEADLINE_S), walk, let_a_child_compute], ids=["spin", "walk", "child"]
)
def test_signs_of_life_keep_a_worker_from_being_lost(calm, live):
    said = strike(calm, lost=[], worker_1=live)
    assert said and all(line.startswith("worker 1 (cpu:0/v1) has not arrived at step 4 for ") for line in said)


@pytest.mark.slow
def test_a_stopped_worker_that_goes_on_in_time_is_not_lost(calm):
    def stop_for_a_while() -> None:
        me = os.getpid()
        if os.fork() == 0:
            time.sleep(2.5)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        stop()

    (warning,) = strike(calm, lost=[], deadline_s=2, worker_1=stop_for_a_while)
    assert "is stopped (SIGSTOP)" in warning


def test_two_workers_that_are_stopped_at_once_are_both_killed(calm):
    said = strike(calm, lost=[0, 1], worker_0=stop, worker_1=stop)
    assert sum("was stopped (SIGSTOP)" in line for line in said) == 2


@pytest.mark.slow
def test_a_stopped_worker_that_is_reaped_late_is_not_told_as_stuck(calm, monkeypatch):
    """On a busy machine it is looked at again before its death is seen, and does not look stopped any more."""
    wait, seen = Crew.wait, {}

    def notice_deaths_late(crew: Crew, timeout_s: float | None) -> list[Ready]:
        ready, now = wait(crew, 0.05), time.monotonic()
        time.sleep(0.02)
        return [each for each in ready if each.kind != "death" or now > DEADLINE_S + seen.setdefault(each.fd, now)]

    monkeypatch.setattr(Crew, "wait", notice_deaths_late)
    said = strike(calm, lost=[1], worker_1=stop)
    assert sum("worker 1 (cpu:0/v1) was stopped (SIGSTOP)" in line for line in said) == 1, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deadline_s", "busy_s"), [(1.5, 3.0), pytest.param(DEADLINE_S, 3 * DEADLINE_S, marks=pytest.mark.slow)]
)
def test_a_survivor_that_is_busy_when_another_is_lost_is_waited_for(calm, deadline_s, busy_s):
    """The vote after a loss has to wait for it, longer than the deadline: a long save, an evaluation.

    With the short deadline somebody else may be late on a busy machine, and a line would say so.
    """
    said = strike(calm, lost=[1], deadline_s=deadline_s, worker_1=die, worker_2=lambda: spin(busy_s))
    assert len(said) == 2, said
    loss, warning = said
    assert loss == "worker 1 (cpu:0/v1) was ended by SIGKILL; 2 workers go on (generation 1)."
    assert warning.startswith("worker 2 (cpu:0/v2) has not come to the end of what it was doing when a worker was lost")


def test_a_survivor_that_hangs_when_another_is_lost_is_lost_too(calm):
    said = strike(calm, lost=[1, 2], worker_1=die, worker_2=lambda: time.sleep(1000))
    assert said[0].endswith("2 workers go on (generation 1).") and said[-1].endswith("1 worker goes on (generation 2).")


@pytest.mark.slow
def test_two_workers_that_sleep_in_the_same_place_one_after_the_other_end_the_run():
    """The main worker's part goes to the next one when it is lost, and would end one worker after the other."""

    def lose_the_main_one(collective) -> None:
        for number in range(12):
            collective.barrier()
            if number >= 4 and collective.worker == min(collective.workers):
                time.sleep(1000)

    told = run_workers(3, 3, lose_the_main_one, deadline_s=DEADLINE_S)
    assert told.outcome.exit_code == 75 and told.outcome.failure["error"] == "DeadlineExceeded", told.said
    traceback = told.outcome.failure["traceback"]
    assert "Worker 0 (cpu:0/v0) and then worker 1 (cpu:0/v1) were stuck in the same place" in traceback
    assert "in lose_the_main_one" in traceback and "raise deadline_s" in traceback
