"""Evaluations to be run by a strategy on some number of workers; each returns numbers, lists and dictionaries.

What a scenario returns must be the same on every worker, and for every number of workers.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from duoka.errors import MismatchError, ReplicaFailed

SCENARIOS: dict[str, Callable] = {}
SIZES = [37, 3, 1, 0]


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


def make_model(*, dropout: float = 0.0, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(16) if batch_norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Linear(16, 4))


def make_data(rows: int = 37) -> TensorDataset:
    """Features, labels, and the number of each row."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    return TensorDataset(x[:rows], y[:rows], torch.arange(rows))


class Stream(IterableDataset):
    def __init__(self, rows: int) -> None:
        self._data = make_data(rows)

    def __iter__(self):
        return iter([self._data[row] for row in range(len(self._data))])


class NoisyStream(IterableDataset):
    def __iter__(self):
        for row in range(37):
            yield torch.rand(3) + random.random(), torch.tensor(row)


class Noisy(Dataset):
    """Draws from all three generators for every sample."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return torch.randn(6) + random.random() + np.random.rand(), index


def shake(samples):
    """Collates, and draws a number."""
    x, numbers = zip(*samples, strict=True)
    return torch.stack(x) + torch.rand(1), torch.tensor(numbers)


def rows_seen(strategy, loader) -> list[int]:
    """The numbers of the rows, in the order of the batches."""
    return strategy.evaluate(lambda *batch: strategy.rows(batch[-1]), loader).tolist()


def is_correct(model, batch) -> torch.Tensor:
    return model(batch[0]).argmax(1) == batch[1]


# Rows.


@scenario
def predictions_in_order(strategy):
    model = strategy.prepare(make_model())
    found = {}
    for rows in SIZES[:-1]:
        loader = strategy.prepare(DataLoader(make_data(rows), batch_size=8))
        found[str(rows)] = strategy.evaluate(
            lambda x, _, numbers: {"predictions": strategy.rows(model(x)), "numbers": strategy.rows(numbers)}, loader
        )
    return found


@scenario
def order(strategy):
    shuffled = DataLoader(make_data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(9))
    dropping = strategy.prepare(DataLoader(make_data(), batch_size=8, drop_last=True))
    return {
        "shuffled": [rows_seen(strategy, shuffled), rows_seen(strategy, shuffled)],
        "drop_last": rows_seen(strategy, dropping),
        "stream": rows_seen(strategy, DataLoader(Stream(37), batch_size=8)),
    }


@scenario
def batches_of_a_batch_sampler_are_not_mixed(strategy):
    """Rows of different widths: only those that the sampler puts together can be stacked."""
    data = [torch.full((2 + number // 10,), number) for number in range(37)]
    sampler = BatchSampler(SequentialSampler(data), 10, drop_last=False)
    loader = strategy.prepare(DataLoader(data, batch_sampler=sampler))
    return strategy.evaluate(lambda batch: strategy.rows(batch[:, 0]), loader).tolist()


@scenario
def blocks_for_the_main_worker_only(strategy):
    """They run locally, and no worker waits."""
    model = make_model(dropout=0.3, batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(make_data(36), batch_size=12))
    shapes = []

    def look():
        model.eval()
        with torch.no_grad():
            shapes.append(list(model(x).shape))
        model.train()

    if strategy.is_main:
        look()
    for batch in strategy.batches(loader):
        optimizer.zero_grad()
        strategy.backward(lambda features, labels, _: F.cross_entropy(model(features), labels), batch)
        optimizer.step()
        if strategy.is_main:
            look()
    if strategy.is_main:
        look()
        # An unprepared loader runs whole, on this worker alone.
        with torch.no_grad():
            assert sum(len(batch[1]) for batch in DataLoader(make_data(), batch_size=8)) == 37
    assert bool(shapes) == strategy.is_main and all(shape == [10, 4] for shape in shapes)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# sum, mean and gather of one value for all replicas of a worker.


@scenario
def one_value_for_all_replicas_of_a_worker(strategy):
    replicas = strategy.local_replicas
    everybody = list(range(strategy.replicas))
    mine = torch.tensor(replicas)
    assert strategy.sum(float(sum(replicas))) == sum(everybody)
    assert strategy.sum(np.full(3, len(replicas))).tolist() == [strategy.replicas] * 3
    assert strategy.mean(float(np.mean(replicas))) == np.mean(everybody)
    assert strategy.mean(1.0, 5 if strategy.is_main else 0) == 1.0
    assert strategy.mean([float(r) for r in replicas], [r == 3 for r in replicas]) == 3.0
    counts = [len(part) for part in strategy.gather(mine)]
    assert (
        len(counts) == strategy.replicas and counts[replicas[0]] == len(replicas) and sum(counts) == sum(everybody) - 2
    )
    assert len(strategy.gather(1.0)) == strategy.num_workers
    assert [int(number) for number in strategy.gather(list(replicas))] == everybody
    assert strategy.gather(None) == []
    return torch.cat(strategy.gather(mine)).tolist()


@scenario
def gathered_types(strategy):
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
    dtypes += [torch.float8_e4m3fn]
    replicas = torch.tensor(strategy.local_replicas, dtype=torch.float32)
    found = {}
    for dtype in dtypes:
        parts = strategy.gather(replicas.to(dtype))
        assert all(part.dtype == dtype for part in parts), dtype
        found[str(dtype)] = torch.cat([part.to(torch.complex64) for part in parts]).real.tolist()
    numbers = strategy.gather([torch.tensor(replica, dtype=torch.bfloat16) for replica in strategy.local_replicas])
    assert [part.shape for part in numbers] == [torch.Size()] * strategy.replicas
    # A worker without a value learns of the others' type all the same.
    parts = strategy.gather(replicas.to(torch.bfloat16) if strategy.is_main else None)
    assert parts[0].dtype == torch.bfloat16
    arrays = strategy.gather(np.asarray(strategy.local_replicas, np.float32))
    assert all(type(array) is np.ndarray and array.dtype == np.float32 for array in arrays)
    large = strategy.gather([torch.full((50_000,), replica) for replica in strategy.local_replicas])
    assert [int(part.sum()) // 50_000 for part in large] == list(range(strategy.replicas))
    return found


@scenario
def one_value_with_several_counts_is_refused(strategy):
    try:
        strategy.mean(1.0, [1, 2])
    except MismatchError as error:
        return "one value and 2 counts" in str(error)


# strategy.evaluate.


@scenario
def accuracy(strategy):
    model = strategy.prepare(make_model(dropout=0.5, batch_norm=True))
    found = {}

    def measure(batch):
        x, y = batch[:2]
        assert not torch.is_grad_enabled() and not model.training
        out = model(x)
        return {
            "accuracy": ((out.argmax(1) == y).sum(), len(y)),
            "loss": (F.cross_entropy(out, y, reduction="sum"), y.numel()),
            "by class": (
                torch.bincount(y[out.argmax(1) == y], minlength=4),
                torch.bincount(y, minlength=4),
            ),
        }

    for rows in SIZES[:-1]:
        loaders = [DataLoader(make_data(rows), batch_size=8), DataLoader(Stream(rows), batch_size=8)]
        loaders.append(strategy.prepare(DataLoader(make_data(rows), batch_size=8)))
        answers = [strategy.evaluate(measure, loader) for loader in loaders]
        assert model.training
        assert _equal(answers[0], answers[2]), "prepared or not, the bits are the same"
        found[str(rows)], found[f"{rows} in a stream"] = answers[:2]
    return found


def _equal(left: dict, right: dict) -> bool:
    return list(left) == list(right) and all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
        for a, b in zip(left.values(), right.values(), strict=True)
    )


@scenario
def nothing_to_count(strategy):
    nothing = strategy.evaluate(lambda batch: (1, 1), DataLoader(make_data(0), batch_size=8))
    zero = strategy.evaluate(lambda batch: {"hits": (0, 0), "rows": (1, 1)}, DataLoader(make_data(3), batch_size=8))
    empty = strategy.evaluate(lambda batch: {}, DataLoader(make_data(3), batch_size=8))
    return [nothing != nothing, zero["hits"] != zero["hits"], zero["rows"], empty]


@scenario
def many_names_and_large_sums(strategy):
    loader = DataLoader(make_data(), batch_size=8)
    names = strategy.evaluate(
        lambda batch: {f"metric {n}": (n * len(batch[1]), len(batch[1])) for n in range(900)}, loader
    )
    assert names == {f"metric {n}": float(n) for n in range(900)}
    large = strategy.evaluate(lambda batch: (torch.ones(300, 300, dtype=torch.bfloat16), 0.5), loader)
    assert large.dtype == torch.float64 and large.shape == (300, 300)
    return [float(large.min()), float(large.max())]


@scenario
def random_numbers_in_evaluate(strategy):
    torch.manual_seed(11)
    loader = DataLoader(Noisy(), batch_size=8, num_workers=2, collate_fn=shake)
    measure = lambda batch: (batch[0].double().sum() + torch.rand(1).item() + random.random(), 1)  # noqa: E731
    return [strategy.evaluate(measure, loader), strategy.evaluate(measure, loader), torch.rand(1).item()]


@scenario
def a_stream_that_draws(strategy):
    """All workers read the same values, whatever each of them draws between two batches."""
    found = []
    for num_workers in (0, 1):
        loader = strategy.prepare(DataLoader(NoisyStream(), batch_size=8, num_workers=num_workers))
        found.append(strategy.evaluate(lambda batch: (batch[0].double().sum(0) + torch.rand(1).item(), 1), loader))
        found += [strategy.evaluate(lambda x, _: strategy.rows(x), loader), torch.rand(1).item()]
    return found


@scenario
def collectives_are_refused_within_the_function(strategy):
    """Also before anything has been prepared."""
    try:
        strategy.evaluate(lambda batch: (strategy.sum(1.0), 1), DataLoader(make_data(8), batch_size=8))
    except MismatchError as error:
        return "inside a function" in str(error)
    except ReplicaFailed as error:  # where that replica is another worker's
        return "inside a function" in str(error)


@scenario
def flags_are_put_back(strategy):
    model = strategy.prepare(make_model(batch_norm=True))
    model[1].eval()  # frozen by hand, in a model that trains
    before = [module.training for module in model.modules()]
    loader = DataLoader(make_data(), batch_size=8)
    trains = strategy.evaluate(lambda batch: (any(m.training for m in model.modules()), 1), loader)
    after = [module.training for module in model.modules()]

    def fail(batch):
        raise KeyError("in the function")

    for _ in range(2):
        try:
            strategy.evaluate(fail, DataLoader(make_data(12), batch_size=12))
        except (KeyError, ReplicaFailed) as error:
            assert "in the function" in str(error)
    return [before == after == [module.training for module in model.modules()], trains > 0, torch.is_grad_enabled()]


WRONG = {
    "not a sum and a count": lambda batch: 0.5,
    "3 values, not a sum": lambda batch: (1, 2, 3),
    "a NoneType, not a sum": lambda batch: None,
    "a float for 'loss', not a sum": lambda batch: {"loss": 0.5},
    "used 1 as a name": lambda batch: {1: (1, 1)},
    "an empty string as a name": lambda batch: {"": (1, 1)},
    "returned a str as a metric, not a number": lambda batch: ("1", 1),
    "complex64": lambda batch: (torch.ones(1, dtype=torch.complex64), 1),
    "a sum of shape (3,) and a count of shape (2,)": lambda batch: (torch.ones(3), torch.ones(2)),
    "a count of -1": lambda batch: (1, -1),
    "a count of nan": lambda batch: (1, float("nan")),
    "return strategy.rows(t)": lambda batch: (batch[0].argmax(1), batch[1]),
    "returned different": lambda batch: (torch.ones(len(batch[1]), len(batch[1])), 1),
    "cannot split a list": None,
}


def changing_functions(strategy):
    """For each part of a message: an evaluation function that changes something, or a module that it changes."""
    average = make_model(batch_norm=True)
    predictions, log, meter = [], {"seen": 0}, SimpleNamespace(total=0.0, last=None)

    def append(batch):
        predictions.append(batch[1])
        return 1, 1

    def count(batch):
        log["seen"] += len(batch[1])
        return 1, 1

    def add(batch):
        meter.total += float(batch[1].sum())
        return 1, 1

    def keep(batch):
        meter.last = batch[1].float().mean()
        return 1, 1

    return {
        "changes predictions": append,
        "changes log['seen']": count,
        "changes meter.total": add,
        "changes meter.last": keep,
        "call eval(), or prepare it": lambda batch: (average(batch[0]).sum(), 1),
    }


@scenario
def functions_that_change_something(strategy):
    """An error on every worker, and what comes afterwards still works."""
    found = {}
    for expected, function in changing_functions(strategy).items():
        try:
            strategy.evaluate(function, DataLoader(make_data(), batch_size=8))
        except (MismatchError, ReplicaFailed) as error:
            found[expected] = expected in str(error) or str(error)
    cache = SimpleNamespace(mask=None)

    def with_cache(batch):
        if cache.mask is None:
            cache.mask = torch.ones(4)
        return cache.mask.sum(), 4

    return found | {"a cache": strategy.evaluate(with_cache, DataLoader(make_data(), batch_size=8))}


@scenario
def an_average_in_training_mode(strategy):
    told = io.StringIO()
    average = make_model(dropout=0.5)
    with contextlib.redirect_stderr(told):
        strategy.evaluate(lambda batch: (average(batch[0]).sum(), 1), DataLoader(make_data(), batch_size=8))
        average.eval()
        strategy.evaluate(lambda batch: (average(batch[0]).sum(), 2), DataLoader(make_data(), batch_size=8))
    return [line.count("average is in training mode") for line in told.getvalue().splitlines()] or [1]


@scenario
def wrong_return_values(strategy):
    """On every worker alike, before anybody waits: what comes afterwards still works."""
    found = {}
    for expected, function in WRONG.items():
        loader = [1, 2] if function is None else DataLoader(make_data(37), batch_size=16)
        try:
            strategy.evaluate(function, loader)
        except (MismatchError, ReplicaFailed) as error:
            found[expected] = expected in str(error) or str(error)
    return {**found, "works": strategy.evaluate(lambda batch: (2, 1), DataLoader(make_data(), batch_size=8))}


@scenario
def replicas_that_measure_different_things(strategy):
    """The last one, as nothing can be called afterwards."""
    loader = DataLoader(make_data(4), batch_size=1)
    try:
        strategy.evaluate(lambda batch: {f"row {int(batch[-1][0])}": (1, 1)}, loader)
    except MismatchError as error:
        return 'replica 2: [["row 2"' in str(error)
