"""A worker with one replica adds up its own slice in the gradients themselves: same bits, nothing else changes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from duoka.frameworks.torch.function.gradient_buffers import GradientBuffers
from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import run_workers
from tests.process import torch_contract
from tests.process.torch_contract import PHASES, Death, make, sha

pytestmark = [pytest.mark.torch]
STEPS, WIDTH = 4, 6000


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def x_of(step: int) -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss_of_mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), (x.sum(1) > 0).long())


def train(strategy: Mirrored, model: nn.Module, loss_of: Any) -> dict[str, Any]:
    """Clips gradients in place, and accumulates over two calls into gradients that the script keeps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = strategy.prepare(model, optimizer)
    held, before = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch_contract.backward(loss_of, x_of(2 * step))
        if step % 2:
            torch_contract.backward(loss_of, x_of(2 * step + 1))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        held.append([p.grad for p in model.parameters()])
        before.append([norm, sha(held[-1])])
        optimizer.step()
    assert [digest for _, digest in before] == [sha(gradients) for gradients in held], "none was overwritten"
    return {"model": sha(model, optimizer), "steps": [[norm.item(), digest] for norm, digest in before]}


def means(strategy: Mirrored) -> dict[str, Any]:
    model = make(width=WIDTH)
    return train(strategy, model, lambda x: loss_of_mean(model, x))


def counts(strategy: Mirrored) -> dict[str, Any]:
    """The sum is divided by a count that is known at the end."""
    model = make(width=WIDTH)

    def loss_of(x: torch.Tensor) -> Any:
        chosen = x[:, 0] > -1
        losses = F.cross_entropy(model(x), (x.sum(1) > 0).long(), reduction="none")
        return strategy.weigh((losses * chosen).sum() / chosen.sum(), chosen.sum())

    return train(strategy, model, loss_of)


def no_small_parameter(strategy: Mirrored) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False))
    return train(strategy, model, lambda x: loss_of_mean(model, x))


class OneGradient(nn.Module):
    """Autograd hands the same memory to both of its large parameters, and to a hook of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.ones(8, WIDTH))
        self.right = nn.Parameter(torch.ones(WIDTH, 8))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(x @ (self.left.view(-1) + self.right.view(-1)).view(8, WIDTH)))


def one_gradient_for_two(strategy: Mirrored) -> dict[str, Any]:
    model = OneGradient()
    return train(strategy, model, lambda x: loss_of_mean(model, x))


def errors(strategy: Mirrored) -> dict[str, Any]:
    """What raises on one replica leaves the gradients on all workers, also where its slice has been kept."""
    model = make(width=WIDTH)
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        if (x[:, 0] == 7).any():
            raise ValueError("seven")
        return loss_of_mean(model, x)

    torch_contract.backward(loss_of, x_of(0))
    before = sha([p.grad for p in model.parameters()])
    x = x_of(1)
    x[6, 0] = 7  # of replica 1
    with pytest.raises(Exception, match="seven"):
        torch_contract.backward(loss_of, x)
    assert before == sha([p.grad for p in model.parameters()])
    torch_contract.backward(loss_of, x_of(2))
    return {"gradients": sha([p.grad for p in model.parameters()])}


CASES = {case.__name__: case for case in (means, counts, no_small_parameter, one_gradient_for_two, errors)}


def run(collective: Any, name: str, death: Death | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    take, taken = GradientBuffers._take_kept, []
    GradientBuffers._take_kept = lambda *args: (taken.append(1), take(*args))[1]
    torch_contract.SCENARIOS[name] = lambda: CASES[name](torch_contract.strategy)
    return torch_contract.run(name, Mirrored(respawn=False), collective, death) | {"kept": len(taken)}


@lru_cache
def calm(num_workers: int, num_replicas: int, name: str) -> list[dict[str, Any]]:
    launched = run_workers(num_workers, num_replicas, run, name, None)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(num_workers)]


def without_kept(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "kept"}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_kept_have_the_bits_of_one_worker(name, num_replicas):
    (alone,) = calm(1, num_replicas, name)
    assert alone["kept"] == 0
    results = [*calm(num_replicas, num_replicas, name), calm(2, num_replicas, name)[1]]
    for result in results:
        assert without_kept(result) == without_kept(alone)
        assert bool(result["kept"]) == (name != "one_gradient_for_two")


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_killed_in_any_phase_changes_no_bit_of_gradients_that_are_kept(phase, worker):
    name = "counts" if phase in ("arriving", "completed") else "means"
    death = Death(worker, 4, phase)
    launched = run_workers(2, 2, run, name, death)
    assert worker not in launched.results, f"{death} never happened"
    (alone,) = calm(1, 2, name)
    found = launched.results[1 - worker]
    assert without_kept(found) == without_kept(alone)
    assert found["kept"] > 0
