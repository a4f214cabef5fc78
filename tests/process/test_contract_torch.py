"""The contract of the function style: calm, killed in any phase and on one worker, a script gives the same bits."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache
from typing import Any

import pytest
import torch

from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import run_workers
from tests.process import torch_contract
from tests.process.torch_contract import PHASES, SCENARIOS, SMALL, Death

pytestmark = [pytest.mark.torch]
REPLICAS = 3
DEATHS = [(name, phase) for name in SCENARIOS for phase in PHASES if not (name in SMALL and phase == "reducing")]


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def strategy_of(collective: Any) -> Mirrored:
    """A strategy on the collective of this worker, which is a fork: no other test sees the change."""
    torch.set_num_threads(1)
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    return Mirrored(respawn=False)


def run_calmly(collective: Any) -> dict[str, Any]:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        found = {name: torch_contract.run(name, strategy_of(collective), collective) for name in SCENARIOS}
    lines = {line for line in told.getvalue().splitlines() if "function style" not in line}
    lines = {line for line in lines if "BatchNorm" not in line and "replica 0's count: center" not in line}
    assert not lines, "the first-call check must find nothing else here"
    wrong = [(name, key) for name, kept in found.items() for key, value in kept.items() if value is False]
    assert not wrong, "what a script finds out by itself must be true"
    return found


def run_one(collective: Any, name: str, death: Death) -> dict[str, Any]:
    return torch_contract.run(name, strategy_of(collective), collective, death)


@lru_cache
def calm(num_workers: int) -> dict[str, Any]:
    launched = run_workers(num_workers, REPLICAS, run_calmly)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    first, *others = [launched.results[worker] for worker in range(num_workers)]
    assert all(other == first for other in others), "all workers must end alike"
    return first


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_gives_the_same_bits_on_one_and_two_workers(name):
    assert calm(2)[name] == calm(1)[name]


def check_death(name: str, worker: int, phase: str) -> None:
    expected = calm(2)[name]
    # Not call 4: in one script it has a single sample, in another one its function raises.
    death = Death(worker, expected["calls"] // 2 + 1, phase)
    launched = run_workers(2, REPLICAS, run_one, name, death)
    assert worker not in launched.results, f"{death} never happened"
    assert launched.results[1 - worker] == expected


# Every script with a death in another phase here, every phase of every script in the full matrix.
@pytest.mark.parametrize(("number", "name"), list(enumerate(SCENARIOS)))
def test_a_script_that_loses_a_worker_gives_the_same_bits(number, name):
    phases = [phase for which, phase in DEATHS if which == name]
    check_death(name, number % 2, phases[number % len(phases)])


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(("name", "phase"), DEATHS)
def test_a_script_that_loses_a_worker_in_any_phase_gives_the_same_bits(name, phase, worker):
    check_death(name, worker, phase)
