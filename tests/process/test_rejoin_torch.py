"""A worker of the function style that is killed is replaced in the run, and changes no bit.

The replacement runs the script from its top, takes the state of a living worker, and joins at a step boundary.
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from duoka.runtime.launch import launch
from duoka.runtime.worker import attachment
from duoka.session import _join
from duoka.strategies.mirrored import Mirrored
from tests.conftest import check_remains, plan_for, remains
from tests.limits import START_S
from tests.process import torch_contract
from tests.process.test_contract_torch import REPLICAS
from tests.process.test_resume_torch import RESUMED
from tests.process.torch_contract import Death

pytestmark = [pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


class Lives:
    """Which life of a worker this is; and members wait for a replacement, so that it joins before the script ends."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._ready = directory / "ready"
        self._has_waited = False
        path = directory / f"lives-{worker}"
        with path.open("a") as file:
            file.write("x")
        self.number = path.stat().st_size
        if self.number > 1:
            self._ready.touch()

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while not self._ready.exists():
            assert time.monotonic() < end, "no replacement was started"
            time.sleep(0.01)
        time.sleep(0.1 if self._has_waited else 1.5)  # its script comes to its loop
        self._has_waited = True


def run_one(session: Any, name: str, death: Death | None, directory: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    Mirrored.connect = staticmethod(lambda request: session)  # in this fork
    strategy, collective = Mirrored(), session.collective
    if death is None:
        return torch_contract.run(name, strategy, collective)
    lives, backward = Lives(directory, strategy.worker), strategy.backward
    calls = 0

    def wait_and_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if lives.number == 1 and calls >= death.call + 2:  # it hears of the loss in the call before
            lives.wait()
        return backward(function, *args, **kwargs)

    strategy.backward = wait_and_call
    found = torch_contract.run(name, strategy, collective, death if lives.number == 1 else None)
    return found | {"life": lives.number}


def run(name: str, death: Death | None, directory: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    def in_worker() -> Any:
        attached = attachment()
        assert attached is not None
        with contextlib.redirect_stderr(io.StringIO()):
            return run_one(_join(attached), name, death, directory)

    said: list[str] = []
    before = remains()
    plan = replace(plan_for(2, REPLICAS, START_S), respawn=True)
    launched = launch(plan, in_worker, said.append)
    check_remains(before, said)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return launched.results, said


@lru_cache
def calm(name: str) -> dict[str, Any]:
    return run(name, None, Path())[0][0]


def check(name: str, death: Death, directory: Path) -> None:
    expected = dict(calm(name))
    num_calls = expected.pop("calls")
    results, said = run(name, replace(death, call=min(death.call, num_calls - 4)), directory)
    assert any(f"worker {death.worker} (cpu:0/v{death.worker}) has rejoined" in line for line in said), said
    assert results[death.worker].pop("life") > 1 and results[1 - death.worker].pop("life") == 1
    for result in results.values():
        result.pop("calls")
        assert result == expected


@pytest.mark.parametrize(("number", "name"), list(enumerate(RESUMED)))
def test_a_replacement_joins_in_the_run_and_changes_no_bit(tmp_path, number, name):
    phase = ("forward", "backward", "arrived", "completed")[number % 4]
    check(name, Death(number % 2, 3, phase), tmp_path)
