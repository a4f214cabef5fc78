"""Plain loops that cannot be right. Each is an error on all workers before anything is exchanged, or a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.process.torch_plain import network, samples

CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def ready(strategy: Any, *, batch_size: int = 16, optimizer_class: Any = torch.optim.SGD) -> Any:
    model = network()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return strategy.prepare(model, optimizer, DataLoader(samples(32), batch_size))


@case
def outside_of_a_loop(strategy: Any) -> None:
    model, _, _ = ready(strategy)
    for x, y in DataLoader(samples(32), 16):
        F.cross_entropy(model(x), y).backward()


@case
def after_the_loop(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
    loss.backward()


@case
def only_the_loader(strategy: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in strategy.prepare(DataLoader(samples(32), 16)):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@case
def lbfgs(strategy: Any) -> None:
    model, optimizer, loader = ready(strategy, optimizer_class=torch.optim.LBFGS)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@case
def create_graph(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(create_graph=True)


@case
def step_under_no_sync(strategy: Any) -> None:
    model, optimizer, loader = ready(strategy)
    for x, y in loader:
        with strategy.no_sync():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@case
def post_accumulate_hook(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()


@case
def two_counts(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        (strategy.weigh(loss, 3) + strategy.weigh(loss, 4)).backward()


@case
def count_under_no_sync(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for x, y in loader:
        with strategy.no_sync():
            strategy.weigh(F.cross_entropy(model(x), y), 3).backward()


@case
def sum_over_shards(strategy: Any) -> None:
    model, _, _ = ready(strategy)
    for x, y in strategy.prepare(DataLoader(samples(32), 16), sharded=True):
        strategy.weigh(F.cross_entropy(model(x), y, reduction="sum")).backward()


@case
def backward_in_an_evaluation(strategy: Any) -> None:
    """In eval mode, workers without samples leave the last batch out."""
    model, _, _ = ready(strategy)
    loader = strategy.prepare(DataLoader(samples(17), 16))
    model.eval()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()


@case
def infinite_count(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for x, y in loader:
        strategy.weigh(F.cross_entropy(model(x), y), float("inf")).backward()


@case
def unequal_shares(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    other = strategy.prepare(DataLoader(samples(33), 11))
    for (x, y), (u, _) in zip(loader, other, strict=False):
        (F.cross_entropy(model(x), y) + model(u).mean()).backward()


@case
def sum_in_an_evaluation_loop(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    with torch.no_grad():
        for x, y in loader:
            strategy.sum((model(x).argmax(1) == y).sum())


@case
def small_batches(strategy: Any) -> None:
    _, _, loader = ready(strategy, batch_size=1)
    for _ in loader:
        pass


@case
def backward_after_a_plain_loop(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for _ in loader:
        break
    strategy.backward(lambda x, y: F.cross_entropy(model(x), y), *samples(32)[:])


@case
def no_sync_in_function_style(strategy: Any) -> None:
    model, _, loader = ready(strategy)
    for batch in strategy.batches(loader):
        with strategy.no_sync():
            strategy.backward(lambda x, y: F.cross_entropy(model(x), y), batch)


@case
def own_iteration(strategy: Any) -> None:
    class Loader(DataLoader):
        def __iter__(self):
            return iter([])

    for _ in strategy.prepare(Loader(samples(32), 16)):
        pass


@case
def batches_of_a_sharded_loader(strategy: Any) -> None:
    ready(strategy)
    strategy.batches(strategy.prepare(DataLoader(samples(32), 16), sharded=True))


@case
def optimizer_not_prepared(strategy: Any) -> None:
    """Right numbers, and a line: its state is not saved."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, loader = strategy.prepare(model, DataLoader(samples(32), 16))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@case
def gradients_by_hand(strategy: Any) -> None:
    """Workers train apart: a line, as a script may have passed them through strategy.mean."""
    model, optimizer, loader = ready(strategy)
    for x, y in loader:
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for p, gradient in zip(model.parameters(), found, strict=True):
            p.grad = gradient
        optimizer.step()


@case
def batchnorm(strategy: Any) -> None:
    """One line that names sync_batchnorm, one about the evaluation."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(samples(32), 16))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for _ in loader:
            pass


@case
def one_sample_under_batchnorm(strategy: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, loader = strategy.prepare(model, DataLoader(samples(32), 3))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()


@case
def sparse_buffer(strategy: Any) -> None:
    model = network()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    strategy.prepare(model)
