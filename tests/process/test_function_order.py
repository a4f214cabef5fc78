"""Order and data: a converted script sees the samples of the unconverted one, in its order, whatever its loader."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import run_workers
from tests.process.test_contract_torch import strategy_of
from tests.process.torch_contract import Death, Fate
from tests.process.torch_order import KINDS, train

pytestmark = [pytest.mark.torch]
SHARED = [kind for kind in KINDS if "opened" not in kind]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As workers have; and what the first optimizer of a process imports is imported once, not in every fork."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)
    yield
    torch.set_num_threads(num_threads)


def train_all(collective: Any, settings: list[tuple[Any, ...]]) -> list[Any]:
    return [train(kind, strategy_of(collective), *rest) for kind, *rest in settings]


def run(num_workers: int, num_replicas: int, settings: list[tuple[Any, ...]]) -> list[Any]:
    launched = run_workers(num_workers, num_replicas, train_all, settings)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    first, *others = [launched.results[worker] for worker in range(num_workers)]
    assert all(other == first for other in others)
    return first


@lru_cache
def converted(num_workers: int, num_replicas: int, dtype: torch.dtype, dropout: float, noise: float) -> dict[str, Any]:
    """All kinds of loaders in one launch."""
    return dict(zip(SHARED, run(num_workers, num_replicas, [(k, dtype, dropout, noise) for k in SHARED]), strict=True))


@pytest.mark.parametrize("kind", SHARED)
def test_one_replica_is_bit_for_bit_the_unconverted_script(kind):
    assert converted(1, 1, torch.float32, 0.3, 0.1)[kind] == train(kind, None, torch.float32, 0.3, 0.1)


@pytest.mark.parametrize(("num_workers", "num_replicas"), [(2, 2), (2, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", SHARED)
def test_several_replicas_have_the_numbers_of_the_unconverted_script(kind, dtype, tolerance, num_workers, num_replicas):
    found = converted(num_workers, num_replicas, dtype, 0.0, 0.0)[kind]
    plain = train(kind, None, dtype, 0.0)
    for ours, theirs in zip([*found["weights"], found["numbers"]], [*plain["weights"], plain["numbers"]], strict=True):
        ours, theirs = np.array(ours), np.array(theirs)
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def train_and_die(collective: Any, kind: str, call: int) -> dict[str, Any]:
    """Worker 1 dies at this call; with call 0, nobody."""
    strategy = strategy_of(collective)
    fate = Fate(Death(1, 1, "arriving"))
    backward, count = strategy.backward, 0

    def counted(function: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and strategy.worker == 1:
            collective.moment = lambda name: fate.kill() if name == "arriving" else None
        return backward(function, *args)

    strategy.backward = counted
    return train(kind, strategy, torch.float32, 0.3, 0.1)


@pytest.mark.parametrize("kind", ["plain", "processes", "persistent", "opened in worker_init_fn"])
def test_the_samples_of_a_lost_worker_are_loaded_again_with_the_same_bits(kind):
    calm = run_workers(2, 3, train_and_die, kind, 0)
    assert calm.outcome.exit_code == 0, calm.outcome.failure
    struck = run_workers(2, 3, train_and_die, kind, 9)
    assert 1 not in struck.results
    assert struck.results[0] == calm.results[0]
