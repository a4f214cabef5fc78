"""The plain style: a loop over a prepared loader gives the numbers of one device, with one replica per worker."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from duoka.errors import MismatchError
from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import run_workers
from tests.process.torch_plain import SCENARIOS, network, samples, weights
from tests.process.torch_plain_misuse import CASES

pytestmark = [pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """In forks as well. What the first optimizer of a process imports takes seconds: once here."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def strategy_of(collective: Any, **settings: Any) -> Mirrored:
    """A strategy on the collective of this worker, which is a fork: no other test sees the change."""
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    return Mirrored(**settings)


def run_one(name: str, strategy: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        return SCENARIOS[name](strategy)
    finally:
        torch.set_default_dtype(torch.float32)


def run_all(collective: Any) -> dict[str, Any]:
    found = {}
    with contextlib.redirect_stderr(io.StringIO()):
        for name in SCENARIOS:
            strategy = strategy_of(collective, sync_batchnorm=name.startswith("synced"))
            found[name] = run_one(name, strategy)
    return found


@lru_cache
def results(num_workers: int) -> list[dict[str, Any]]:
    launched = run_workers(num_workers, num_workers, run_all)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(num_workers)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plain_loop_gives_the_numbers_of_one_device(name, num_workers):
    expected = run_one(name, None)
    first, *others = [found[name] for found in results(num_workers)]
    assert all(other == first for other in others), "all workers must end alike"
    if num_workers == 1:
        assert first == expected
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


# What each worker is told: an error, or only lines of the main worker.
ERRORS = {
    "outside_of_a_loop": "A backward reached prepared parameters outside of a loop over a prepared loader",
    "after_the_loop": "A backward reached prepared parameters outside of a loop over a prepared loader",
    "only_the_loader": "This SGD steps on parameters that were not prepared, and the loader was",
    "lbfgs": "LBFGS cannot train in a plain loop on several workers",
    "create_graph": "A backward with create_graph=True reached prepared parameters",
    "step_under_no_sync": "optimizer.step\\(\\) was called while gradients of strategy.no_sync\\(\\) wait",
    "post_accumulate_hook": "0.weight has a post-accumulate-grad hook",
    "two_counts": "strategy.weigh was passed two counts, . and ., in one backward",
    "count_under_no_sync": "A loss weighed by a count was backwarded under strategy.no_sync",
    "sum_over_shards": "strategy.weigh was called without a count in a loop over a loader with sharded=True",
    "infinite_count": "strategy.weigh was passed the count inf",
    "unequal_shares": "this worker has different shares of them: 8 samples of batch 0",
    "sum_in_an_evaluation_loop": "strategy.sum was called in an evaluation loop over a prepared loader",
    "small_batches": "A batch of 1 samples cannot be split between 2 replicas",
    "backward_after_a_plain_loop": "strategy.backward or strategy.batches was called after a plain loop",
    "no_sync_in_function_style": "strategy.no_sync was called in a script that trains by strategy.backward",
    "own_iteration": "Loader has an __iter__ of its own",
    "sparse_buffer": "adjacency",
    "batches_of_a_sharded_loader": "a loader that was prepared with sharded=True",
}
LINES = {
    "gradients_by_hand": ["SGD steps after torch.autograd.grad"],
    "optimizer_not_prepared": ["SGD steps on a prepared model and was not prepared"],
    "batchnorm": ["BatchNorm normalises each replica's samples by themselves", "its sums are those of this worker"],
}


def misuse(collective: Any) -> dict[str, list[str]]:
    found = {}
    for name in [*ERRORS, *LINES]:
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            try:
                CASES[name](strategy_of(collective))
                found[name] = ["", told.getvalue()]
            except MismatchError as error:
                found[name] = [str(error), told.getvalue()]
        gc.collect()
    return found


@lru_cache
def told() -> list[dict[str, list[str]]]:
    launched = run_workers(2, 2, misuse)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(2)]


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_right_is_an_error_on_all_workers(name):
    for found in told():
        error, _ = found[name]
        assert re.search(ERRORS[name], error), error
        assert "do " in error


@pytest.mark.parametrize("name", LINES)
def test_what_may_be_meant_is_a_line_of_the_main_worker(name):
    main, other = (found[name] for found in told())
    assert main[0] == other[0] == ""
    assert all(line in main[1] for line in LINES[name])
    assert "normalises" not in other[1] and "not prepared" not in other[1]


def run_case(collective: Any, name: str) -> None:
    CASES[name](strategy_of(collective))


def test_a_backward_in_eval_mode_whose_batch_some_workers_leave_out_is_an_error():
    launched = run_workers(2, 2, run_case, "backward_in_an_evaluation")
    assert "A backward in eval mode, in batch 1 of pass 0 (1 samples)" in str(launched.outcome.failure)


def test_a_worker_with_one_sample_under_batchnorm_is_an_error_that_names_the_layer():
    launched = run_workers(2, 2, run_case, "one_sample_under_batchnorm")
    assert "BatchNorm1d 1 cannot normalise one value per channel: replica 1 has 1 sample" in str(
        launched.outcome.failure
    )


def shared_worker(collective: Any) -> str:
    model, loader = network(), DataLoader(samples(32), 16)
    strategy = strategy_of(collective)
    model, loader = strategy.prepare(model, loader)
    with pytest.raises(MismatchError) as caught:
        next(iter(loader))
    return str(caught.value)


def test_more_replicas_than_workers_are_an_error_at_the_first_batch_that_shows_the_function_style():
    launched = run_workers(2, 4, shared_worker)
    for error in launched.results.values():
        assert "needs one replica per worker, and there are 4 replicas on 2 workers" in error
        assert "strategy.backward(loss_of, batch)" in error


def shard(collective: Any) -> list[float]:
    """Worker 0 reads the first 20 samples, worker 1 the other 12, in as many batches."""
    torch.manual_seed(7)
    strategy, model = strategy_of(collective), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = Subset(samples(32), range(20) if strategy.worker == 0 else range(20, 32))
    loader = DataLoader(own, 5 if strategy.worker == 0 else 3)
    model, optimizer = strategy.prepare(model, optimizer)
    loader = strategy.prepare(loader, sharded=True)
    for x, y in loader:
        assert len(x) == (5 if strategy.worker == 0 else 3)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


def test_sharded_loaders_train_on_the_samples_that_each_worker_reads():
    launched = run_workers(2, 2, shard)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    torch.manual_seed(7)
    model, (x, y) = network(), samples(32)[:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        rows = [*range(5 * step, 5 * step + 5), *range(20 + 3 * step, 23 + 3 * step)]
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert launched.results[0] == launched.results[1] == pytest.approx(weights(model), rel=1e-5, abs=1e-6)
