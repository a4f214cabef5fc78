"""A script of the function style that is stopped at any boundary and resumed ends with the bits of an undisturbed one.

The state goes through a file, as in a checkpoint. All scripts run one after the other in one launch.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from functools import lru_cache
from typing import Any

import pytest
import torch

from duoka.checkpoint.files import load_state, save_state
from duoka.frameworks.saving import list_codecs
from tests.conftest import run_workers
from tests.process import torch_contract
from tests.process.test_contract_torch import REPLICAS, strategy_of
from tests.process.torch_contract import SCENARIOS

pytestmark = [pytest.mark.torch]
NOT_RESUMABLE = ("changing_parts", "kept_gradients")  # they make optimizers in their loop, or keep gradients
RESUMED = [name for name in SCENARIOS if name not in NOT_RESUMABLE]
MOST_STOPS = 4


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


class Stopped(Exception):
    pass


class Stops:
    """Ends the script at one of its boundaries, and keeps what a checkpoint would hold."""

    def __init__(self, collective: Any, at: int = -1, state: Any = None) -> None:
        self.num_boundaries, self.saved = 0, None
        self.positions: list[str] = []
        self._at, self._state = at, state
        self.strategy = strategy = strategy_of(collective)
        strategy._session.borders.add(start=lambda training: None, border=self._come_by)
        self._loops = strategy.epochs, strategy.steps
        strategy.epochs, strategy.steps = self._begin_epochs, self._begin_steps

    def _begin_epochs(self, count: int) -> Any:
        self._restore()
        return self._loops[0](count)

    def _begin_steps(self, count: int) -> Any:
        self._restore()
        return self._loops[1](count)

    def _restore(self) -> None:
        """As strategy.checkpoint does, which a script calls before its loop."""
        if self._state is not None:
            self.strategy._adapter.restore(self._state)

    def _come_by(self, training: Any) -> None:
        self.positions.append(training.boundary.place)
        if self.num_boundaries == self._at:
            with tempfile.TemporaryDirectory() as folder:
                save_state(f"{folder}/state", training.capture(), list_codecs())
                self.saved = load_state(f"{folder}/state", list_codecs())
            raise Stopped
        self.num_boundaries += 1


def stop_and_resume(collective: Any, name: str) -> dict[str, Any]:
    """Results by the boundary at which the script was stopped."""
    calm = Stops(collective)
    found = {"calm": torch_contract.run(name, calm.strategy, collective)}
    number = calm.num_boundaries
    step = max(1, number // MOST_STOPS)
    for at in sorted({0, number - 1, *range(1 + len(name) % step, number, step)}):
        stopped = Stops(collective, at)
        with contextlib.suppress(Stopped):
            torch_contract.run(name, stopped.strategy, collective)
        assert stopped.saved is not None, "the script was stopped"
        found[str(at)] = torch_contract.run(name, Stops(collective, state=stopped.saved).strategy, collective)
    return found | {"positions": sorted(set(calm.positions))}


def run_all(collective: Any, names: list[str]) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        return {name: stop_and_resume(collective, name) for name in names}


@lru_cache
def results(num_workers: int) -> dict[str, Any]:
    launched = run_workers(num_workers, REPLICAS, run_all, RESUMED)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    first, *others = [launched.results[worker] for worker in range(num_workers)]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_script_that_is_stopped_and_resumed_gives_the_same_bits(name, num_workers):
    found = dict(results(num_workers)[name])
    positions, calm = found.pop("positions"), found.pop("calm")
    calm.pop("calls")
    assert "between epochs" in positions
    assert len(found) > 1
    for at, result in found.items():
        result.pop("calls")
        assert result == calm, f"stopped at boundary {at}"
