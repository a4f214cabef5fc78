"""Trainings that do more than one backward and one step: run like torch_scenarios.py, which this builds on.

duoka run --devices W --replicas R tests/process/torch_unusual.py [name ...]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.process.torch_scenarios import Plain, data, main, mlp, train

SCENARIOS = {}
OPTIONS = {}


def scenario(**options):
    def add(function):
        SCENARIOS[function.__name__] = function
        OPTIONS[function.__name__] = options
        return function

    return add


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loader_of(*tensors, batch_size=10, **given):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, **given)


@scenario()
def gan(strategy):
    """Two optimizers, each stepping once per batch; the second sees what the first did."""
    torch.manual_seed(5)
    maker, judge = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12)), mlp()
    steps = sgd(maker, 0.05), sgd(judge, 0.05)
    x, _ = data(37)
    noise = torch.randn(37, 6, generator=torch.Generator().manual_seed(9))
    maker, judge, maker_step, judge_step, loader = strategy.prepare(maker, judge, *steps, loader_of(x, noise))
    for _ in range(3):
        for real, z in loader:
            judge_step.zero_grad()
            fake = maker(z)
            (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            judge_step.step()
            maker_step.zero_grad()
            F.softplus(-judge(maker(z))).mean().backward()
            maker_step.step()
    return nn.ModuleList([maker, judge]), judge_step


def batch_norm_net(dtype):
    torch.manual_seed(3)
    # No biases before BatchNorm: their gradient is rounding alone, which Adam blows up on one device too.
    layers = [nn.Conv1d(2, 6, 3, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8, bias=False)]
    return nn.Sequential(nn.Unflatten(1, (2, 6)), *layers, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


@scenario(sync_batchnorm=True)
def synced_sgd(strategy):
    model = batch_norm_net(torch.float32)
    return train(strategy, *strategy.prepare(model, sgd(model, 0.05), loader_of(*data(102))))


@scenario(sync_batchnorm=True)
def synced_adam_float64(strategy):
    model = batch_norm_net(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return train(strategy, *strategy.prepare(model, optimizer, loader_of(*data(102, dtype=torch.float64))))


@scenario(sync_batchnorm=True)
def synced_weighed(strategy):
    """Weights of losses and of statistics at once: the loss is a mean over some of the rows."""
    model = batch_norm_net(torch.float64)
    x, y = data(102, dtype=torch.float64)
    model, optimizer, loader = strategy.prepare(model, sgd(model, 0.05), loader_of(x, y))
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            counted = y < 2
            loss = F.cross_entropy(model(x), y, reduction="none")[counted].sum() / max(int(counted.sum()), 1)
            strategy.weigh(loss, int(counted.sum())).backward()
            optimizer.step()
    return model, optimizer


@scenario()
def accumulated(strategy):
    """Every third batch, and the last one of an epoch; the plain script makes one batch of them."""
    model = mlp()
    is_plain = isinstance(strategy, Plain)
    loader = loader_of(*data(), batch_size=24 if is_plain else 8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer := sgd(model), 2, 0.8)
    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)
    if not is_plain:
        strategy.accumulate(3)
    return train(strategy, model, optimizer, loader, epochs=4, scheduler=scheduler)


@scenario()
def accumulated_by_hand(strategy):
    model = mlp()
    model, optimizer, loader = strategy.prepare(model, sgd(model), loader_of(*data(), batch_size=8))
    for _ in range(2):
        optimizer.zero_grad()
        for index, (x, y) in strategy.enumerate(loader):
            (F.cross_entropy(model(x), y) / 3).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 4)

    def forward(self, tokens):
        return self.out(F.relu(self.table(tokens)).mean(1))


@scenario()
def sparse_table(strategy):
    """SparseAdam takes sparse gradients only, and changes only the rows that were touched."""
    model = Table()
    table = torch.optim.SparseAdam(model.table.parameters(), lr=0.05)
    rest = torch.optim.SGD(model.out.parameters(), lr=0.1)
    tokens = torch.randint(0, 50, (37, 3), generator=torch.Generator().manual_seed(4))
    model, table, rest, loader = strategy.prepare(model, table, rest, loader_of(tokens, data(37)[1]))
    for _ in range(2):
        for tokens, y in loader:
            table.zero_grad()
            rest.zero_grad()
            F.cross_entropy(model(tokens), y).backward()
            assert model.table.weight.grad.is_sparse
            table.step()
            rest.step()
    return model, table


class Turning(nn.Module):
    """Complex and real parameters of two widths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.turn = nn.Parameter(torch.randn(12, 8, dtype=torch.complex64) * 0.3)
        self.exact = nn.Linear(8, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.exact(((x.to(torch.complex64) @ self.turn).abs() * self.scale).double())


@scenario()
def complex_and_mixed(strategy):
    model = Turning()
    return train(strategy, *strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader_of(*data())))


@scenario()
def bfloat16_autocast(strategy):
    model = mlp()
    model, optimizer, loader = strategy.prepare(model, sgd(model), loader_of(*data()))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return model, optimizer


@scenario()
def scaled_float16(strategy):
    """The first scale is too large for float16: steps are skipped, on all replicas alike, and counted."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model, optimizer, scaler, loader = strategy.prepare(model, sgd(model), scaler, loader_of(*data()))
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x).half(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**40
    assert isinstance(strategy, Plain) or strategy.step == 8 * len(loader)
    return model, optimizer


class Remembering(nn.Module):
    """Buffers of all kinds: constant, changed in place, replaced, counted, and changed late."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))
        self.last = nn.Linear(12, 4)
        self.register_buffer("queue", torch.zeros(3, 12))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(12))
        self.register_buffer("late", torch.zeros(12))

    def forward(self, x):
        x = F.relu(self.first(x)) * self.mask
        if self.training:
            with torch.no_grad():
                self.queue[self.place % 3] = x[0]
                self.place = self.place + 1
                if self.place > 5:
                    self.late += x.mean(0)
        return self.last(x + self.queue.mean(0))


@scenario()
def buffers_of_all_kinds(strategy):
    model = Remembering()
    return train(strategy, *strategy.prepare(model, sgd(model), loader_of(*data(40))))


@scenario()
def two_loaders(strategy):
    """The first loader decides the replica, the other follows it."""
    model = mlp()
    x, y = data(40)
    loaders = loader_of(x, y), loader_of(x.flip(0), batch_size=10)
    model, optimizer, one, two = strategy.prepare(model, sgd(model), *loaders)
    for _ in range(2):
        for (x, y), (other,) in zip(one, two, strict=True):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * model(other).square().mean()).backward()
            optimizer.step()
    return model, optimizer


@scenario()
def a_layer_added_later(strategy):
    model = mlp()
    model, optimizer, loader = strategy.prepare(model, sgd(model), loader_of(*data()))
    train(strategy, model, optimizer, loader, epochs=1)
    model.append(nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[-1].weight)
    optimizer.add_param_group({"params": model[-1].parameters()})
    return train(strategy, model, optimizer, loader, epochs=1)


@scenario()
def kept_loader_workers(strategy):
    model = mlp()
    loader = loader_of(*data(), shuffle=True, num_workers=1, persistent_workers=True)
    return train(strategy, *strategy.prepare(model, sgd(model), loader), epochs=3)


def mixing(samples):
    """A collate function that draws: rows are mixed with one another."""
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return x + 0.1 * torch.rand(()) * x[torch.randperm(len(x))], y


@scenario()
def drawn_while_loading(strategy):
    """Mixing in loader processes, a second loader that follows, dropout, and draws outside of bodies."""
    model = mlp(dropout=0.3)
    x, y = data(40)
    one = loader_of(x, y, collate_fn=mixing, num_workers=1, shuffle=True)
    two = loader_of(x.flip(0), collate_fn=lambda samples: mixing([(s[0], s[0]) for s in samples])[0])
    model, optimizer, one, two = strategy.prepare(model, sgd(model), one, two)
    for _ in range(2):
        for (x, y), other in zip(one, two, strict=True):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * model(other).square().mean()).backward()
            optimizer.step()
        with torch.no_grad():
            model[0].bias.add_(0.01 * torch.randn(32))  # the same on all workers
    return model, optimizer


@scenario()
def accumulated_with_a_queue(strategy):
    """A buffer is found to change in the middle of an accumulation."""
    model = Remembering()
    model, optimizer, loader = strategy.prepare(model, sgd(model), loader_of(*data(40)))
    strategy.accumulate(3)
    return train(strategy, model, optimizer, loader, epochs=2)


@scenario()
def weighed_twice(strategy):
    """Two losses with counts of their own, one that needs none, and a second derivative."""
    model = mlp(torch.float64)
    model, optimizer, loader = strategy.prepare(model, sgd(model, 0.02), loader_of(*data(dtype=torch.float64)))
    for x, y in loader:
        optimizer.zero_grad()
        for wanted in (y < 2, y > 0):
            loss = F.cross_entropy(model(x), y, reduction="none")[wanted].sum() / max(int(wanted.sum()), 1)
            strategy.weigh(loss, int(wanted.sum())).backward()
        model(x).square().mean().backward(create_graph=True)
        optimizer.step()
    return model, optimizer


@scenario()
def compiled(strategy):
    """Kernels made for each size of a share: none of them depends on the sizes a worker has seen before."""
    model = torch.compile(mlp(batch_norm=True))
    return train(strategy, *strategy.prepare(model, sgd(model), loader_of(*data(39), batch_size=14)), epochs=3)


if __name__ == "__main__":
    main(SCENARIOS, OPTIONS)
